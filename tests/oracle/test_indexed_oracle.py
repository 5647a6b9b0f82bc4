"""Megatron-LM's own .bin/.idx classes: files written by one are read by the other."""

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from maxmeg.data.corpus.indexed import DTYPES, IndexedDataset, IndexedWriter, token_dtype
from maxmeg.data.prepare.merge import merge

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of accelerators that are not there
    from megatron.core.datasets import indexed_dataset as megatron

Documents = list[list[tuple[list[int], int]]]  # of sequences: tokens and mode


def some_documents(seed: int, multimodal: bool) -> Documents:
    source = random.Random(seed)
    return [
        [
            (
                [source.randrange(128) for _ in range(source.randrange(6))],
                source.randrange(3) * multimodal,
            )
            for _ in range(source.randrange(4))
        ]
        for _ in range(20)
    ]


def write_ours(prefix: Path, documents: Documents, dtype: np.dtype, multimodal: bool) -> None:
    with IndexedWriter(prefix, dtype=dtype, multimodal=multimodal) as writer:
        for document in documents:
            tokens = [token for sequence, _ in document for token in sequence]
            lengths = [len(sequence) for sequence, _ in document]
            modes = [mode for _, mode in document] if multimodal else None
            writer.add_document(tokens, lengths, modes)


def write_megatrons(prefix: Path, documents: Documents, dtype: np.dtype, multimodal: bool) -> None:
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype.type, multimodal)
    for document in documents:
        for sequence, mode in document:
            builder.add_item(torch.tensor(sequence), mode)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def same(one: Path, other: Path) -> bool:
    return all(
        Path(f"{one}{suffix}").read_bytes() == Path(f"{other}{suffix}").read_bytes()
        for suffix in (".bin", ".idx")
    )


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("code", DTYPES)
def test_each_reads_what_the_other_writes(tmp_path, code, multimodal):
    dtype, documents = DTYPES[code], some_documents(code, multimodal)
    assert megatron.DType.code_from_dtype(dtype.type) == code
    write_ours(tmp_path / "ours", documents, dtype, multimodal)
    write_megatrons(tmp_path / "megatrons", documents, dtype, multimodal)
    assert same(tmp_path / "ours", tmp_path / "megatrons")
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"), multimodal=multimodal)
    ours = IndexedDataset(tmp_path / "megatrons")
    sequences = [sequence for document in documents for sequence in document]
    assert len(theirs) == len(ours) == len(sequences)
    assert np.array_equal(theirs.document_indices, ours.document_indices)
    assert np.array_equal(theirs.sequence_lengths, ours.lengths)
    assert (ours.modes is not None) == multimodal
    for i, (tokens, mode) in enumerate(sequences):
        whole, half = theirs[i], theirs.get(i, len(tokens) // 2)
        if multimodal:
            (whole, their_mode), (half, _) = whole, half
            assert their_mode == mode == ours.modes[i]
        assert whole.tolist() == ours.get(i).tolist() == tokens
        assert half.tolist() == ours.get(i, len(tokens) // 2).tolist()


@pytest.mark.parametrize("multimodal", [False, True])
def test_a_merge_is_megatrons(tmp_path, multimodal):
    dtype, prefixes = np.dtype("<u2"), [tmp_path / f"part{i}" for i in range(4)]
    parts = [some_documents(i, multimodal) for i in range(3)] + [[[], []]]
    for prefix, documents in zip(prefixes, parts, strict=True):
        write_ours(prefix, documents, dtype, multimodal)
    merge([str(prefix) for prefix in prefixes], f"{tmp_path}/ours")
    builder = megatron.IndexedDatasetBuilder(f"{tmp_path}/megatrons.bin", np.uint16, multimodal)
    for prefix in prefixes:
        builder.add_index(str(prefix))
    builder.finalize(f"{tmp_path}/megatrons.idx")
    assert same(tmp_path / "ours", tmp_path / "megatrons")


@pytest.mark.parametrize("vocab_size", [None, 1, 65499, 65500, 65536, 200000])
def test_the_choice_of_dtype_is_megatrons(vocab_size):
    assert token_dtype(vocab_size) == np.dtype(megatron.DType.optimal_dtype(vocab_size))
