"""Samples of BERT: golden ones of Megatron-LM's, and what every sample keeps."""

import itertools
import json
import pickle

import numpy as np
import pytest
from masked_corpus import CLS, MASK, SEP, SIZE, corpus, vocabulary

from maxmeg import preprocess
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.masked.bert import BertDataset, cut_ends
from maxmeg.data.masked.masking import Masking, Vocabulary
from maxmeg.data.masked.sentences import SentenceOrder
from maxmeg.data.tokenizers.load import load_tokenizer

# megatron-core 0.16.1, seed 1234, 20 tokens, probability 0.3, 6 samples asked for: tokens without
# padding, {masked position: label}, tokens of the first segment, whether they are swapped
GOLDEN = [
    (
        [1, 6, 13, 20, 27, 34, 41, 48, 7, 3, 2, 21, 28, 3, 3, 3, 2],
        {6: 41, 9: 14, 13: 35, 14: 42, 15: 49}, 11, 0,
    ),
    ([1, 3, 3, 15, 29, 36, 43, 2, 50, 2], {1: 8, 2: 15, 3: 22}, 8, 0),
    ([1, 50, 2, 8, 3, 3, 3, 36, 43, 2], {4: 15, 5: 22, 6: 29}, 3, 1),
]  # fmt: skip
ORDER = SentenceOrder(1234, 6)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


def test_samples_equal_the_golden_ones(data):
    ours = BertDataset(data, "1,0,0", 0, 20, vocabulary(), Masking(0.3), ORDER)
    batch = ours.batch(np.arange(len(GOLDEN)))
    assert {name: values.dtype for name, values in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "token_types"), np.int32),
        **dict.fromkeys(("segment_ids", "positions", "is_swapped"), np.int32),
        "loss_mask": np.float32,
    }
    for row, (tokens, labels, first, is_swapped) in enumerate(GOLDEN):
        size = len(tokens)
        assert batch["tokens"][row].tolist() == tokens + [0] * (20 - size)
        assert batch["segment_ids"][row].tolist() == [1] * size + [0] * (20 - size)
        assert np.flatnonzero(batch["loss_mask"][row]).tolist() == list(labels)
        assert {i: int(batch["targets"][row, i]) for i in labels} == labels
        types = [0] * first + [1] * (size - first) + [0] * (20 - size)
        assert batch["token_types"][row].tolist() == types
        assert batch["is_swapped"][row] == is_swapped
    again = pickle.loads(pickle.dumps(ours)).batch(np.arange(len(GOLDEN)))
    assert all((again[name] == batch[name]).all() for name in batch)
    one = ours.batch(np.array([2]))  # whoever else is in the batch
    assert all((one[name][0] == batch[name][2]).all() for name in batch)


@pytest.mark.parametrize("has_pairs", [True, False])
@pytest.mark.parametrize(
    "rules", [Masking(), Masking(0.4, 1, False), Masking(0.3, 10, geometric=True)]
)
def test_invariants_hold_for_every_sample(data, rules, has_pairs):
    length, names = 16, vocabulary()
    ours = BertDataset(data, "1,0,0", 0, length, names, rules, SentenceOrder(3, 40), has_pairs)
    count = 2 * ours.num_samples  # the rows twice, masked in another way
    batch, masked, swapped = ours.batch(np.arange(count)), [], []
    for row in range(count):
        has_loss = batch["loss_mask"][row] > 0
        real = np.arange(length) <= np.flatnonzero(batch["segment_ids"][row])[-1]
        tokens = np.where(has_loss, batch["targets"][row], batch["tokens"][row])
        assert tokens[0] == CLS and tokens[np.flatnonzero(real)[-1]] == SEP
        assert (tokens == SEP).sum() == 1 + has_pairs and not tokens[~real].any()
        sentences, target = ours.sentences(row, np.random.RandomState())
        text, first = np.concatenate(sentences), batch["token_types"][row] == 0
        parts = (tokens[real & first], tokens[real & ~first])
        inside = [part[~np.isin(part, (CLS, SEP))] for part in parts]
        pair = inside[::-1] if batch["is_swapped"][row] else inside
        assert np.concatenate(pair).tolist() == text.tolist() or len(text) > target
        assert sum(map(len, inside)) == min(target, len(text))
        assert has_loss.sum() <= max(1, round(real.sum() * rules.probability))
        assert not has_loss[np.isin(tokens, (CLS, SEP))].any()
        masked += batch["tokens"][row][has_loss].tolist()
        swapped.append(batch["is_swapped"][row])
    assert has_pairs == (0 < sum(swapped) < count)
    assert 0.6 < np.mean(np.array(masked) == MASK) < 0.95  # 0.8 of them


def test_cutting_is_one_by_one_from_the_longer():
    for a, b, target in ((5, 9, 3), (9, 5, 4), (6, 6, 5), (6, 0, 2), (3, 4, 7)):
        first, second = np.arange(a), np.arange(100, 100 + b)
        left, right = cut_ends(first, second, target, np.random.RandomState(4))
        random, texts = np.random.RandomState(4), [first.tolist(), second.tolist()]
        while len(texts[0]) + len(texts[1]) > target:
            longer = texts[0] if len(texts[0]) > len(texts[1]) else texts[1]
            del longer[0 if random.random() < 0.5 else -1]
        assert [left.tolist(), right.tolist()] == texts


def test_invalid_input_is_refused(data, tmp_path):
    def opened(names=None, index=0):
        return BertDataset(data, "1,0,0", index, 20, names or vocabulary(), order=ORDER)

    bare = vocabulary()
    object.__setattr__(bare, "mask", None)
    with pytest.raises(ValueError, match="no mask token"):
        opened(bare)
    with pytest.raises(ValueError, match="padding id 2 is also"):
        vocabulary(pad=SEP)
    with pytest.raises(ValueError, match="leaves none of 4 documents"):
        opened(index=1)
    with pytest.raises(ValueError, match="sample -1 is negative"):
        opened().batch(np.array([-1]))
    with IndexedWriter(tmp_path / "other", 2 * SIZE) as writer:
        writer.add_document([5, SIZE, 7], [1, 2])
    foreign = type(data)(tmp_path / "other")
    with pytest.raises(ValueError, match=r"other\.bin: id \d+ is not in the vocabulary"):
        BertDataset(foreign, "1,0,0", 0, 20, vocabulary()).batch(np.arange(1))


def test_sentences_are_sampled_from_text(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog", "##s", ".", "run"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    options = "special_tokens=[BOS],[EOS]&bos=[BOS]&eod=[EOS]&extra_ids=2"
    spec = f"wordpiece:{tmp_path}/vocab.txt?{options}"
    text = {"text": "The dogs run. The dog runs. The dogs. Run the dog."}
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(text)] * 6))
    flags = [f"--input={tmp_path}/a.jsonl", f"--output={tmp_path}/out", f"--tokenizer={spec}"]
    assert preprocess.main([*flags, "--split_sentences", "--workers=0"]) == 0
    names = Vocabulary.of(load_tokenizer(spec))
    assert (names.cls, names.sep, names.mask, names.pad) == (2, 3, 4, 0)
    assert (names.bos, names.eos, names.sentinels) == (10, 11, (12, 13))
    assert np.flatnonzero(names.continues).tolist() == [7]
    stored = IndexedDataset(tmp_path / "out_text_sentence")
    batch = BertDataset(stored, "1,0,0", 0, 24, names, order=ORDER).batch(np.arange(6))
    whole = np.where(batch["loss_mask"] > 0, batch["targets"], batch["tokens"])
    sentences = [[5, 6, 7, 9, 8], [5, 6, 9, 7, 8], [5, 6, 7, 8], [9, 5, 6, 8]]
    rows = {tuple(row[row > 3].tolist()) for row in whole}
    turned = {tuple(itertools.chain(*sentences[i:], *sentences[:i])) for i in range(4)}
    assert rows <= turned and len(rows) > 1
    with pytest.raises(ValueError, match="bytes has no padding token"):
        Vocabulary.of(load_tokenizer("bytes"))
