"""The .bin/.idx reader and writer, against bytes laid out by hand and against damage."""

import copy
import hashlib
import itertools
import struct
from pathlib import Path

import numpy as np
import pytest

from maxmeg.data.corpus.indexed import DTYPES, IndexedDataset, IndexedWriter

DOCUMENTS = [[[1, 2, 3], [4]], [], [[500, 600]], [[7, 8, 9, 10]]]


def golden_index(code: int, itemsize: int) -> bytes:
    lengths = [3, 1, 2, 4]
    pointers = [0, 3 * itemsize, 4 * itemsize, 6 * itemsize]
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QB", 1, code)
        + struct.pack("<QQ", 4, 5)
        + struct.pack("<4i", *lengths)
        + struct.pack("<4q", *pointers)
        + struct.pack("<5q", 0, 2, 2, 3, 4)
    )


def write_golden(prefix: Path, **kind) -> None:
    with IndexedWriter(prefix, **{"checksums": False} | kind) as writer:
        for document in DOCUMENTS:
            tokens = [token for sequence in document for token in sequence]
            writer.add_document(tokens, [len(sequence) for sequence in document])


@pytest.mark.parametrize(
    ("kind", "code", "form"),
    [
        ({"vocab_size": 65499}, 8, "H"),
        ({"vocab_size": 65500}, 4, "i"),
        ({"vocab_size": None}, 4, "i"),
        ({"dtype": np.int64}, 5, "q"),
    ],
)
def test_files_are_exactly_the_format(tmp_path, kind, code, form):
    write_golden(tmp_path / "x", **kind)
    assert (tmp_path / "x.idx").read_bytes() == golden_index(code, struct.calcsize(form))
    tokens = [1, 2, 3, 4, 500, 600, 7, 8, 9, 10]
    assert (tmp_path / "x.bin").read_bytes() == struct.pack(f"<10{form}", *tokens)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_sequences_are_read_back(tmp_path):
    write_golden(tmp_path / "x", vocab_size=1000)
    data = IndexedDataset(tmp_path / "x")
    assert (len(data), data.num_tokens, data.num_documents) == (4, 10, 4)
    assert data.lengths.tolist() == [3, 1, 2, 4]
    assert data.document_indices.tolist() == [0, 2, 2, 3, 4]
    assert [data.get(i).tolist() for i in range(4)] == [[1, 2, 3], [4], [500, 600], [7, 8, 9, 10]]
    assert data.get(3, 1, 2).tolist() == [8, 9]
    assert data.get(3, 4).tolist() == []
    twin = copy.copy(data)
    assert twin.tokens.tolist() == data.tokens.tolist()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_round_trips(tmp_path, dtype):
    with IndexedWriter(tmp_path / "x", dtype=dtype) as writer:
        writer.add_document([1, 2, 127])
    data = IndexedDataset(tmp_path / "x")
    assert data.dtype == dtype
    assert data.get(0).tolist() == [1, 2, 127]


def test_multimodal_modes_are_the_last_bytes(tmp_path):
    with IndexedWriter(tmp_path / "x", vocab_size=1000, multimodal=True) as writer:
        writer.add_document([1, 2, 3, 4], [3, 1], [0, 1])
        writer.add_document([], [])
        writer.add_document(np.array([[500], [600]]), modes=[-1])
        writer.add_document([7, 8, 9, 10])
    modes = struct.pack("<4b", 0, 1, -1, 0)
    assert (tmp_path / "x.idx").read_bytes() == golden_index(8, 2) + modes
    data = IndexedDataset(tmp_path / "x")
    assert data.modes is not None and data.modes.tolist() == [0, 1, -1, 0]
    write_golden(tmp_path / "x", vocab_size=1000)
    assert IndexedDataset(tmp_path / "x").modes is None


def test_missing_empty_and_truncated_files_are_named(tmp_path):
    prefix = tmp_path / "x"
    with pytest.raises(ValueError, match=r"x\.idx does not exist"):
        IndexedDataset(prefix)
    for name in ("corpus.jsonl", "corpus.txt"):
        (tmp_path / name).write_text("text")
        shown = rf"maxmeg.preprocess --input={tmp_path}/{name} --output=corpus .*corpus_text_docum"
        with pytest.raises(ValueError, match=shown):
            IndexedDataset(tmp_path / name)
    write_golden(prefix, vocab_size=1000)
    with pytest.raises(ValueError, match=f"without the ending: {prefix}$"):
        IndexedDataset(f"{prefix}.bin")
    for suffix in (".idx", ".bin"):
        path = Path(f"{prefix}{suffix}")
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=rf"x\{suffix}"):
                IndexedDataset(prefix)
        path.write_bytes(whole + b"\x00")
        with pytest.raises(ValueError, match=rf"x\{suffix}"):
            IndexedDataset(prefix)
        path.write_bytes(whole)
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(ValueError, match=r"x\.bin does not exist"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("multimodal", [False, True])
def test_flips_never_read_out_of_range_and_checksums_find_all(tmp_path, multimodal):
    prefix, path = tmp_path / "x", tmp_path / "x.idx"
    write_golden(prefix, vocab_size=1000, multimodal=multimodal, checksums=True)
    whole, accepted = path.read_bytes(), 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"x\.(idx|bin)"):
            IndexedDataset(prefix)
        try:
            data = IndexedDataset(prefix, check_sums=False)
        except ValueError as error:
            assert "x.idx" in str(error) or "x.bin" in str(error)
            continue
        accepted += 1
        assert sum(len(data.get(i)) for i in range(len(data))) == data.num_tokens
        assert data.document_starts()[-1] == data.num_tokens
        ends = data.document_indices
        assert sum(end - begin for begin, end in itertools.pairwise(ends)) == len(data)
    # An end that is moved between its neighbours is a legal file, and so is any mode.
    assert 0 < accepted <= 4 + 8 * 4 * multimodal


def test_foreign_ids_are_found_by_sampling(tmp_path):
    prefix = tmp_path / "x"
    write_golden(prefix, vocab_size=1000)
    assert IndexedDataset(prefix, vocab_size=601).num_tokens == 10
    with pytest.raises(ValueError, match=r"sequence 2 of document 2: id 600 is not in .*\[0, 600"):
        IndexedDataset(prefix, vocab_size=600)
    write_golden(prefix, dtype=np.float32)
    with pytest.raises(ValueError, match="holds float32, not token ids"):
        IndexedDataset(prefix, vocab_size=601)
    with IndexedWriter(prefix) as writer:
        writer.add_document(np.full(1_000_000, 7))
        writer.add_document([-1])
    with pytest.raises(ValueError, match="sequence 1 of document 1: id -1"):
        IndexedDataset(prefix, vocab_size=8)


def test_positions_are_reported(tmp_path):
    write_golden(tmp_path / "x", vocab_size=1000)
    data = IndexedDataset(tmp_path / "x")
    assert [data.sequence_at(i) for i in range(10)] == [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    assert [data.document_of(i) for i in range(4)] == [0, 0, 2, 3]
    assert data.document_starts().tolist() == [0, 4, 4, 6, 10]


def test_an_error_while_writing_leaves_the_old_files(tmp_path):
    write_golden(tmp_path / "x", vocab_size=1000, checksums=True)
    before = {p.name: hashlib.sha256(p.read_bytes()).digest() for p in tmp_path.iterdir()}
    with pytest.raises(KeyError), IndexedWriter(tmp_path / "x", 100) as writer:
        writer.add_document([1, 2])
        raise KeyError
    after = {p.name: hashlib.sha256(p.read_bytes()).digest() for p in tmp_path.iterdir()}
    assert before == after


@pytest.mark.parametrize("tokens", [[70000], [-1]])
def test_ids_that_do_not_fit_are_refused(tmp_path, tokens):
    writer = IndexedWriter(tmp_path / "x", 1000)
    with pytest.raises(ValueError, match="do not fit uint16"):
        writer.add_document(tokens)
    writer.abandon()


def test_unwritable_places_and_dtypes_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write"):
        IndexedWriter(tmp_path / "file" / "x")
    with pytest.raises(ValueError, match="choose one of"):
        IndexedWriter(tmp_path / "x", dtype=np.complex64)
