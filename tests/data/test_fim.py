"""Fill in the middle: Megatron-LM's samples from the same stream; ours from a sample's own."""

import hashlib
import pickle

import numpy as np
import pytest
from tokenizer_files import folder

from maxmeg.config.data import DataConfig, DataOrder
from maxmeg.data.build import build_dataset, open_corpus
from maxmeg.data.samples.fim import Fim, FimRules, sentinel_ids
from maxmeg.data.tokenizers.load import load_tokenizer

PREFIX, MIDDLE, SUFFIX, PAD, EOD, SPLIT = 257, 258, 259, 260, 256, 262
SENTINELS = {"prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX, "pad": PAD}
# Rates, split token, prefix that stays -> digest of what GPTFIMDataset of Megatron-LM's d98e8a64dd
# made of `samples` from RandomState(11), on the bytes tokenizer.
GOLDEN = {
    (1.0, 0.5, 0.5, None, ""): "1fe487e92560b335",
    (0.5, 0.0, 0.5, None, ""): "b391a1122e9b0664",
    (0.9, 1.0, 0.5, None, ""): "8515a3c0c89b5417",
    (0.8, 0.5, 0.5, SPLIT, ""): "be05ba2076c4fbee",
    (1.0, 0.5, 1.0, SPLIT, ""): "533099bea71fa8bc",
    (1.0, 0.5, 1.0, SPLIT, "a"): "28f0a09dacd9a342",
}


def samples():
    """Words of a to d, some ends of documents and split tokens."""
    made = np.random.RandomState(7)
    for _ in range(50):
        tokens = made.randint(97, 101, made.randint(1, 60))
        tokens[made.random_sample(len(tokens)) < 0.06] = EOD
        tokens[made.random_sample(len(tokens)) < 0.06] = SPLIT
        yield tokens


def fim(rate=1.0, spm=0.5, fragment=0.5, split=None, no_prefix="", seed=3) -> Fim:
    rules = FimRules(rate, spm, fragment, SENTINELS, EOD, split, no_prefix)
    return Fim(rules, load_tokenizer("bytes"), seed)


@pytest.mark.parametrize("case", GOLDEN)
def test_samples_are_megatrons(case):
    made, stream, digest = fim(*case), np.random.RandomState(11), hashlib.sha256()
    for tokens in samples():
        new = made.transform(tokens, stream)[: len(tokens)]
        padding = np.full(len(tokens) - len(new), PAD)
        digest.update(np.concatenate([new, padding]).astype("<i4").tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[case]


def test_a_sample_depends_only_on_its_number():
    text = np.tile(np.arange(97, 117, dtype=np.int32), (6, 1))
    rows, used = fim()(text, np.arange(6))
    assert rows.dtype == np.int32 and (used == 20).all() and len(np.unique(rows, axis=0)) == 6
    backwards, _ = pickle.loads(pickle.dumps(fim()))(text, np.arange(6)[::-1])
    assert (backwards == rows[::-1]).all()
    assert (fim()(text[:1], np.array([2**40]))[0] != rows[:1]).any()
    assert (fim(seed=4)(text, np.arange(6))[0] != rows).any()
    assert (fim(rate=0.0)(text, np.arange(6))[0] == text).all()


def settings(make_corpus, **changes) -> DataConfig:
    documents = [[97 + i % 26 for i in range(n)] + [EOD] for n in (30, 3, 50, 41, 7, 64)]
    data = DataConfig(paths=(make_corpus(documents),), split="1,0,0", sequence_length=24)
    data.fim_rate, data.fim_tokens = 1.0, ("257", "258", "259", "260")
    for name, value in changes.items():
        setattr(data, name, value)
    return data


@pytest.mark.parametrize("order", DataOrder)
def test_training_samples_contain_fim(make_corpus, order):
    data = settings(make_corpus, order=order, reset_attention_mask=True)
    tokenizer, prefixes = open_corpus(data, "unused")
    actual = build_dataset(data, prefixes, tokenizer, 0, seed=1, vocab_size=300)
    assert actual is not None
    numbers = np.arange(actual.samples_per_epoch)
    batch = actual.batch(numbers)
    assert (batch["tokens"] == PREFIX).any(1).all()
    assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
    assert batch["segment_ids"].max() > 1
    again = pickle.loads(pickle.dumps(actual)).batch(numbers[3:5])
    assert all((array == batch[name][3:5]).all() for name, array in again.items())
    data.fim_rate = 0
    plain = build_dataset(data, prefixes, tokenizer, 0, seed=1, vocab_size=300)
    assert plain is not None and (plain.batch(numbers)["tokens"] < PREFIX).all()


def test_padding_has_no_loss(make_corpus):
    ends = settings(make_corpus, paths=(make_corpus([[EOD] * 200 + [97]], "ends"),))
    tokenizer, prefixes = open_corpus(ends, "unused")
    actual = build_dataset(ends, prefixes, tokenizer, 0, seed=1, vocab_size=300)
    assert actual is not None
    batch = actual.batch(np.arange(8))  # empty documents go with their ends: sentinels are left
    is_padding = batch["targets"] == PAD
    assert is_padding.sum(1).min() > 10
    assert (batch["loss_mask"] == ~is_padding).all()


def test_special_tokens_leave_the_text(tmp_path):
    tokenizer = folder(tmp_path / "hf", {"eos_token": "</s>"})  # <s> </s> <|user|> ... a b
    actual = sentinel_ids(("<s>", "<|user|>", "3", "</s>"), tokenizer, 7)
    assert actual == {"prefix": 0, "middle": 2, "suffix": 3, "pad": 1}
    rules = FimRules(1.0, 0.0, 0.5, actual, tokenizer.eod)
    new = Fim(rules, tokenizer, 0).transform(np.array([4, 2, 5]), np.random.RandomState(1)).tolist()
    assert new.count(2) == 1 and sorted(t for t in new if t > 3) == [4, 5]


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("257", "258", "259", "300"), "'300' is neither a token of bytes nor an id below 300"),
        (("257", "258", "<fim>", "9"), "'<fim>' is neither a token of bytes"),
        (("257", "258", "258", "9"), "must be distinct tokens"),
    ],
)
def test_unknown_tokens_are_refused(names, error):
    with pytest.raises(ValueError, match=error):
        sentinel_ids(names, load_tokenizer("bytes"), 300)
