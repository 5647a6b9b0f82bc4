"""Samples and blends against megatron-core's own datasets: its arrays, and token rows."""

import itertools
import json
import types
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its imports say of optional packages
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.core.datasets.utils import get_blend_from_list

from maxmeg.config.data import DataConfig
from maxmeg.data.build import build_dataset
from maxmeg.data.corpus.indexed import IndexedWriter
from maxmeg.data.samples.blending import parse_blend
from maxmeg.data.tokenizers.load import load_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # megatron-core's
    pytest.mark.usefixtures("process_group"),
]
VOCAB, EOD, ROWS = 1000, 999, 1000

CORPORA = {  # lengths of documents
    "long": lambda random: random.integers(100, 900, 12),
    "short": lambda random: random.integers(1, 6, 400),
    "mixed": lambda random: np.where(random.random(150) < 0.3, 0, random.integers(0, 120, 150)),
    "one": lambda random: np.array([777]),
    "one_tiny": lambda random: np.array([5]),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, str]:
    folder, actual = tmp_path_factory.mktemp("corpora"), {}
    for name, lengths in CORPORA.items():
        random = np.random.default_rng(7)
        actual[name] = str(folder / name)
        with IndexedWriter(actual[name], VOCAB) as writer:
            for length in lengths(random):
                writer.add_document(random.integers(0, VOCAB, length))
    return actual


def tokenizer():
    return types.SimpleNamespace(
        vocab_size=VOCAB, eod=EOD, spec="none", unique_identifiers={"class": "none"}
    )


def megatron(folder, length: int, seed: int, sizes, kind=GPTDataset, **blend) -> list:
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        path_to_cache=str(folder),
        tokenizer=tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **blend,
    )
    return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()


def assert_rows_equal(ours, theirs, seed: int = 0) -> None:
    chosen = np.random.default_rng(seed).integers(0, len(theirs), min(ROWS, 3 * len(theirs)))
    batch = ours.batch(chosen)
    for row, n in enumerate(chosen.tolist()):
        wanted = theirs[n]
        assert np.array_equal(batch["tokens"][row], wanted["tokens"].numpy())
        assert np.array_equal(batch["targets"][row], wanted["labels"].numpy())


def ours(config: DataConfig, index: int, seed: int, size: int | None):
    config.max_epochs = 0
    return build_dataset(config, list(config.paths), tokenizer(), index, seed, 0, size)


GRID = list(
    itertools.product(
        CORPORA, (2, 16, 64), (0, 1234), ("1", "8,1,1", "0.5,0.3,0.2"), (1, 30, 130, 400, None)
    )
)


@pytest.mark.parametrize("name", CORPORA)
def test_orders_are_megatrons(corpora, tmp_path, name):
    """Document, sample and shuffle index, and rows, over lengths, seeds, splits and epochs."""
    compared = epochs = separate = 0
    for i, (_, length, seed, split, size) in enumerate(g for g in GRID if g[0] == name):
        config = DataConfig(paths=(corpora[name],), split=split, sequence_length=length)
        cut = [len(CORPORA[name](np.random.default_rng(7))) * f > 1 for f in (0.1, 0.2)]
        sizes = (size, size, size) if all(cut) else (size, 1, 1)
        if split != "1" and not all(cut):
            continue  # sets without documents: megatron-core does not come back
        tokens = int(CORPORA[name](np.random.default_rng(7)).sum())
        if size is None and tokens <= length:
            continue  # not one sample
        theirs = megatron(tmp_path, length, seed, sizes, blend=([corpora[name]], None), split=split)
        for index, wanted in enumerate(theirs):
            if wanted is None or not len(wanted):
                continue
            actual = ours(config, index, seed, size)
            samples = actual.samples
            assert np.array_equal(samples.documents + actual._begins[0], wanted.document_index)
            assert np.array_equal(samples.shuffle, wanted.shuffle_index)
            assert samples.shuffle.dtype == wanted.shuffle_index.dtype
            assert actual.num_samples == len(wanted)
            places, offsets = samples.boundaries(np.arange(len(wanted) + 1))
            assert np.array_equal(np.stack([places, offsets], 1), wanted.sample_index)
            compared += 1
            epochs = max(epochs, samples.plan.num_epochs)
            separate += samples.plan.has_separate_epoch
            if i % 7 == 0:
                assert_rows_equal(actual, wanted, i)
    assert compared >= 20 and epochs > 2 and (separate or "one" in name)


BLENDS = (
    ("0.7", "long", "0.3", "mixed"),
    ("3", "short", "1", "long", "2.5", "mixed"),
    ("1", "long"),
    ("long", "short", "mixed"),
    ("long", "mixed"),
)


@pytest.mark.parametrize("names", BLENDS, ids=" ".join)
def test_blends_are_megatrons(corpora, tmp_path, names):
    items = tuple(corpora.get(name, name) for name in names)
    blend = get_blend_from_list(list(items))
    assert parse_blend(items) == (list(blend[0]), blend[1])
    for length, seed, size in itertools.product((16, 40), (1, 99), (50, 500, None)):
        if size is None and blend[1] is not None:
            continue  # megatron-core needs a number of samples for weights
        sizes = (size, size, size)
        theirs = megatron(tmp_path, length, seed, sizes, blend=blend, split="6,3,1")
        config = DataConfig(paths=items, split="6,3,1", sequence_length=length)
        for index, wanted in enumerate(theirs):
            if size is not None and len(wanted) < size and index == 0:
                with pytest.raises(ValueError, match="without weights holds"):
                    ours(config, index, seed, size)
                continue
            actual = ours(config, index, seed, size)
            members, numbers = actual.locate(np.arange(len(wanted)))
            assert np.array_equal(members, wanted.dataset_index)
            assert np.array_equal(numbers, wanted.dataset_sample_index)
            assert_rows_equal(actual, wanted)


def test_sets_of_their_own_are_megatrons(corpora, tmp_path):
    paths = (("0.4", "long", "0.6", "mixed"), ("2", "short"), ("long", "short"))
    items = [tuple(corpora.get(name, name) for name in names) for names in paths]
    blends = [get_blend_from_list(list(each)) for each in items]
    theirs = megatron(tmp_path, 16, 5, (300, 40, 60), blend_per_split=blends)
    named = DataConfig(sequence_length=16)
    named.train_paths, named.validation_paths, named.test_paths = items
    file = tmp_path / "blend.json"
    file.write_text(json.dumps(dict(zip(("train", "valid", "test"), items, strict=True))))
    for config in (named, DataConfig(sequence_length=16, blend=str(file))):
        for index, size in enumerate((300, 40, 60)):
            assert_rows_equal(ours(config, index, 5, size), theirs[index])


def test_mock_data_equal_megatrons(tmp_path):
    config = DataConfig(mock=True, tokenizer=f"null:{VOCAB}", sequence_length=512)
    sizes = [900, 40, 30]
    parts = megatron(tmp_path, 512, 1234, sizes, kind=MockGPTDataset)
    for index, (size, theirs) in enumerate(zip(sizes, parts, strict=True)):
        ours = build_dataset(
            config, ["mock"], load_tokenizer(config.tokenizer), index, 1234, 0, size
        )
        assert ours is not None
        rows = ours.batch(np.arange(size))
        for n in range(0, size, 7):
            sample = theirs[n]
            assert (rows["tokens"][n] == sample["tokens"].numpy()).all()
            assert (rows["targets"][n] == sample["labels"].numpy()).all()
