"""Checksums of datasets: any damage is found and named, none is found where there is none."""

from pathlib import Path

import numpy as np
import pytest

from maxmeg.data.corpus import checksum
from maxmeg.data.corpus.checksum import (
    FileSums,
    Sums,
    create_sums,
    read_sums,
)
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter

DOCUMENTS = 4
LENGTH = 786_432  # uint16: each document is 1.5 blocks of 2^20 bytes


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    with IndexedWriter(tmp_path / "x", 1000) as writer:
        for i in range(DOCUMENTS):
            writer.add_document(np.full(LENGTH, i))
    return tmp_path / "x"


def flip(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        (old,) = file.read(1)
        file.seek(byte)
        file.write(bytes([old ^ 16]))


def test_the_writers_sums_are_those_of_its_files(corpus):
    written = Path(f"{corpus}.sums").read_bytes()
    IndexedDataset(corpus).verify()
    create_sums(str(corpus))
    assert Path(f"{corpus}.sums").read_bytes() == written
    assert sorted(p.name for p in corpus.parent.iterdir()) == ["x.bin", "x.idx", "x.sums"]


def test_damage_is_named_with_its_documents(corpus):
    flip(Path(f"{corpus}.bin"), (1 << 20) + 17)
    with pytest.raises(ValueError, match=r"in 1 blocks; bytes \[1048576, 2097152\).*0 to 1: it"):
        IndexedDataset(corpus).verify()
    flip(Path(f"{corpus}.bin"), 0)
    with pytest.raises(ValueError, match=r"in 2 blocks.*documents 0 to 0; bytes"):
        IndexedDataset(corpus).verify()


def test_another_size_and_no_sums_are_refused(corpus):
    sums = Path(f"{corpus}.sums")
    good = sums.read_bytes()
    with IndexedWriter(corpus.parent / "y") as writer:
        writer.add_document([1])
    sums.write_bytes(Path(f"{corpus.parent}/y.sums").read_bytes())
    with pytest.raises(ValueError, match=r"x\.idx has .* bytes, but .*x\.sums describes"):
        IndexedDataset(corpus)
    sums.unlink()
    with pytest.raises(ValueError, match="verify --create"):
        IndexedDataset(corpus).verify()
    sums.write_bytes(good)
    with IndexedWriter(corpus, checksums=False) as writer:  # leaves no sums of what was there
        writer.add_document([1])
    assert not sums.exists() and IndexedDataset(corpus).num_tokens == 1


def test_damage_to_the_sums_is_found(tmp_path):
    with IndexedWriter(tmp_path / "x") as writer:
        writer.add_document([1, 2, 3])
    path = tmp_path / "x.sums"
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"x\.sums"):
            read_sums(str(tmp_path / "x"))
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"x\.sums"):
            IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize(
    "sums",
    [
        Sums({".bin": FileSums(5, np.zeros(1, np.uint32))}),
        Sums({s: FileSums(5, np.zeros(2, np.uint32)) for s in (".bin", ".idx")}),
        Sums({s: FileSums(5, np.zeros(1, np.uint32)) for s in (".bin", ".xdi")}),
        Sums({s: FileSums(5, np.zeros(1, np.uint32)) for s in (".bin", ".idx")}, block_bytes=0),
        Sums({s: FileSums(-5, np.zeros(1, np.uint32)) for s in (".bin", ".idx")}),
    ],
)
def test_sums_that_make_no_sense_are_refused(tmp_path, sums):
    (tmp_path / "x.sums").write_bytes(checksum.render(sums))
    with pytest.raises(ValueError, match=r"x\.sums (describes|begins with|has the line)"):
        read_sums(str(tmp_path / "x"))


def test_an_unwritable_place_is_explained(corpus):
    Path(f"{corpus}.sums").unlink()
    Path(f"{corpus}.sums").mkdir()
    with pytest.raises(ValueError, match="cannot write"):
        create_sums(str(corpus))
