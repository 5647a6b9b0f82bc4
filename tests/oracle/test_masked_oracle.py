"""Samples of BERT and T5 against megatron-core's own datasets, bit for bit."""

import itertools
import types
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its imports say of optional packages
    from megatron.core.datasets import helpers
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.t5_dataset import (
        T5MaskedWordPieceDataset,
        T5MaskedWordPieceDatasetConfig,
    )

from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.masked.bert import BertDataset
from maxmeg.data.masked.masking import Masking, Vocabulary
from maxmeg.data.masked.sentences import SentenceOrder, SentenceSamples
from maxmeg.data.masked.t5 import T5Dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # megatron-core's
    pytest.mark.usefixtures("process_group"),
]
SIZE, CLS, SEP, MASK, BOS, EOS = 300, 1, 2, 3, 4, 5
SENTINELS = tuple(range(290, 300))
SPLIT, ROWS = "80,20,0", 120
MASKINGS = {
    "words": Masking(),
    "pieces": Masking(whole_words=False, max_ngram=1, short_probability=0.0),
    "longer": Masking(0.4, 4, prefers_longer=True, short_probability=0.5),
    "geometric": Masking(0.2, 10, geometric=True, short_probability=1.0),
    "ten": Masking(0.5, 10, whole_words=False, short_probability=0.3),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    random, prefix = np.random.default_rng(3), str(tmp_path_factory.mktemp("corpus") / "sentences")
    with IndexedWriter(prefix, SIZE) as writer:
        for _ in range(90):
            longest = int(random.choice([4, 30, 200, 600], p=[0.3, 0.4, 0.25, 0.05]))
            lengths = random.integers(0, longest, random.integers(0, 12))
            # Ids of special tokens, padding too, as a corpus might hold them.
            writer.add_document(random.integers(0, SIZE, lengths.sum()), lengths.tolist())
    return prefix


def vocabulary(pad: int) -> Vocabulary:
    continues = np.arange(SIZE) % 3 == 1
    continues[:6] = False
    return Vocabulary(SIZE, continues, pad, CLS, SEP, MASK, BOS, EOS, SENTINELS)


def tokenizer(pad: int):
    pieces = vocabulary(pad).continues
    return types.SimpleNamespace(
        vocab_size=SIZE,
        inv_vocab={i: "##x" if pieces[i] else "x" for i in range(SIZE)},
        unique_identifiers={"class": "none"},
        additional_special_tokens_ids=list(SENTINELS),
        **{"cls": CLS, "sep": SEP, "mask": MASK, "bos": BOS, "eos": EOS, "pad": pad},
    )


def megatron(kind, config, prefix, folder, length, rules: Masking, seed, sizes, pad=0, **more):
    return BlendedMegatronDatasetBuilder(
        kind,
        sizes,
        lambda: True,
        config(
            random_seed=seed,
            sequence_length=length,
            path_to_cache=str(folder),
            tokenizer=tokenizer(pad),
            blend=([prefix], None),
            split=SPLIT,
            masking_probability=rules.probability,
            short_sequence_probability=rules.short_probability,
            masking_max_ngram=rules.max_ngram,
            masking_do_full_word=rules.whole_words,
            masking_do_permutation=False,
            masking_use_longer_ngrams=rules.prefers_longer,
            masking_use_geometric_distribution=rules.geometric,
            **more,
        ),
    ).build()


@pytest.mark.parametrize("fewest", [1, 2])
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.4, 0.7, 1.0])
def test_the_same_sentences(prefix, probability, fewest):
    data = IndexedDataset(prefix)
    for longest, requested, seed in itertools.product((3, 61, 509), (1, 77, 900), (1, 1234)):
        bounds = data.document_indices[5:70]
        arguments = (2**31 - 2, requested, longest, probability, seed, False, fewest)
        theirs = helpers.build_mapping(bounds, data.lengths, *arguments)
        samples = SentenceSamples(data.lengths, bounds, longest, fewest, probability)
        ours = samples.rows(SentenceOrder(seed, requested))
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "name, length, has_pairs, seed, pad",
    [
        ("words", 128, True, 1234, 0),
        ("words", 512, False, 1, 7),
        ("pieces", 64, True, 7, 0),
        ("longer", 32, False, 2, 0),
        ("geometric", 100, True, 2**31 - 50, 0),
        ("ten", 16, True, 99, 250),
        ("ten", 256, False, 99, 0),
    ],
)
def test_bert(prefix, tmp_path, name, length, has_pairs, seed, pad):
    rules = MASKINGS[name]
    kind = (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, prefix, tmp_path)
    sizes = [500, 90, None]
    parts = megatron(*kind, length, rules, seed, sizes, pad, classification_head=has_pairs)
    for split_index in range(2):
        theirs = parts[split_index]
        order = SentenceOrder(seed, sizes[split_index])
        part = (IndexedDataset(prefix), SPLIT, split_index)
        ours = BertDataset(*part, length, vocabulary(pad), rules, order, has_pairs)
        assert ours.num_samples == len(theirs)
        chosen = np.random.default_rng(1).permutation(len(theirs))[:ROWS]
        batch = ours.batch(chosen)
        for row, n in enumerate(chosen.tolist()):
            sample = theirs[n]
            np.testing.assert_array_equal(batch["tokens"][row], sample["text"])
            has_loss = sample["loss_mask"] == 1
            np.testing.assert_array_equal(batch["loss_mask"][row], sample["loss_mask"])
            np.testing.assert_array_equal(
                batch["targets"][row], np.where(has_loss, sample["labels"], 0)
            )
            assert batch["is_swapped"][row] == sample["is_random"]
            # It writes the padding's id into its mask and its types, of which 0 is meant.
            real = sample["padding_mask"] != pad
            np.testing.assert_array_equal(batch["segment_ids"][row], real)
            size = np.flatnonzero(real)[-1] + 1
            np.testing.assert_array_equal(batch["token_types"][row, :size], sample["types"][:size])
            assert not batch["token_types"][row, size:].any()
        assert batch["loss_mask"].any()


@pytest.mark.parametrize(
    "name, length, seed, pad",
    [("geometric", 64, 1234, 0), ("words", 40, 5, 0), ("longer", 32, 3, 9), ("pieces", 24, 8, 0)],
)
def test_t5(prefix, tmp_path, name, length, seed, pad):
    rules = MASKINGS[name]
    kind = (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig, prefix, tmp_path)
    theirs, *_ = megatron(
        *kind, length, rules, seed, [500, 90, None], pad, sequence_length_decoder=48
    )
    part = (IndexedDataset(prefix), SPLIT, 0)
    order = SentenceOrder(seed, 500)
    ours = T5Dataset(*part, (length, 48), vocabulary(pad), rules, order)
    assert ours.num_samples == len(theirs)
    chosen = np.random.default_rng(1).permutation(len(theirs))[:ROWS]
    names = {
        "encoder_tokens": "text_enc",
        "encoder_segment_ids": "enc_mask",
        "tokens": "text_dec",
        "segment_ids": "dec_mask",
        "loss_mask": "loss_mask",
    }
    batch = ours.batch(chosen)
    for row, n in enumerate(chosen.tolist()):
        sample = theirs[n]
        for mine, its in names.items():
            np.testing.assert_array_equal(batch[mine][row], sample[its], err_msg=mine)
        targets = np.where(sample["loss_mask"] == 1, sample["labels"], 0)
        np.testing.assert_array_equal(batch["targets"][row], targets)
