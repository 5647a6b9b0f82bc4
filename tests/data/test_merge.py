"""Merging datasets: what one writer would have written, byte for byte."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmeg.data.corpus import indexed
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.prepare.merge import find_prefixes, merge

DOCUMENT = st.lists(st.lists(st.integers(0, 60000), max_size=4), max_size=3)
CORPUS = st.lists(DOCUMENT, max_size=4)  # which may be empty, as a part of a corpus may be


def write(prefix: Path, corpora, **kind) -> None:
    with IndexedWriter(prefix, **kind) as writer:
        for document in [document for corpus in corpora for document in corpus]:
            tokens, lengths = list(itertools.chain(*document)), list(map(len, document))
            modes = [length % 3 for length in lengths] if kind.get("multimodal") else None
            writer.add_document(tokens, lengths, modes)


@settings(max_examples=30)
@given(
    st.lists(CORPUS, min_size=1, max_size=4).filter(
        lambda corpora: any(s for corpus in corpora for document in corpus for s in document)
    ),
    st.booleans(),
)
def test_a_merge_is_what_one_writer_writes(tmp_path_factory, corpora, multimodal):
    folder = tmp_path_factory.mktemp("merge")
    kind = {"vocab_size": 60001, "multimodal": multimodal}
    prefixes = [folder / f"part{i}" for i in range(len(corpora))]
    for prefix, corpus in zip(prefixes, corpora, strict=True):
        write(prefix, [corpus], **kind)
    write(folder / "whole", corpora, **kind)
    report = merge([str(prefix) for prefix in prefixes], str(folder / "merged"))
    for suffix in (".bin", ".idx", ".sums"):
        whole, merged = (Path(f"{folder}/{name}{suffix}") for name in ("whole", "merged"))
        assert whole.read_bytes() == merged.read_bytes()
    assert report.documents == sum(len(corpus) for corpus in corpora)
    assert report.tokens == IndexedDataset(folder / "whole").num_tokens
    assert report.datasets == report.verified == len(corpora)


def test_copying_in_parts_gives_the_same_file(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "_COPIED", 7)
    write(tmp_path / "a", [[[list(range(20))]]], vocab_size=100)
    merge([f"{tmp_path}/a", f"{tmp_path}/a"], f"{tmp_path}/b")
    assert IndexedDataset(tmp_path / "b").tokens.tolist() == [*range(20)] * 2


def test_folders_stand_for_their_datasets(tmp_path):
    for name in ("b", "a", "a.1"):
        write(tmp_path / "in" / name, [[[[1]]]])
    assert find_prefixes([f"{tmp_path}/in"]) == [f"{tmp_path}/in/{n}" for n in ("a", "a.1", "b")]
    assert find_prefixes(["x/a", "x/b.idx", "x/c.bin"]) == ["x/a", "x/b", "x/c"]
    with pytest.raises(ValueError, match="s3://b/c is in object storage, which runs read"):
        find_prefixes(["x/a", "s3://b/c"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.bin and .idx files"):
        find_prefixes([f"{tmp_path}/empty"])


def test_what_cannot_be_merged_leaves_no_files(tmp_path):
    write(tmp_path / "a", [[[[1]]]], vocab_size=100)
    write(tmp_path / "int32", [[[[1]]]])
    write(tmp_path / "modes", [[[[1]]]], vocab_size=100, multimodal=True)
    a, out = f"{tmp_path}/a", f"{tmp_path}/out"
    with pytest.raises(ValueError, match=r"a uint16, .*int32 int32; prepare"):
        merge([a, f"{tmp_path}/int32"], out)
    with pytest.raises(ValueError, match=r"a uint16, .*modes uint16 with modes; prepare"):
        merge([a, f"{tmp_path}/modes"], out)
    with pytest.raises(ValueError, match="leave out --shuffle_documents"):
        merge([f"{tmp_path}/modes"], out, shuffle_seed=1)
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([], out)
    write(tmp_path / "empty", [[[]]], vocab_size=100)
    with pytest.raises(ValueError, match="empty hold no tokens"):
        merge([f"{tmp_path}/empty"], out)
    with pytest.raises(ValueError, match="does not exist"):
        merge([a, f"{tmp_path}/none"], out)
    with pytest.raises(ValueError, match="is also an input"):
        merge([a, f"{tmp_path}/../{tmp_path.name}/a"], a)
    Path(f"{a}.bin").write_bytes(np.array([2], "<u2").tobytes())
    with pytest.raises(ValueError, match=r"a\.bin differs"):
        merge([f"{tmp_path}/a", a], out)
    assert not list(tmp_path.glob("out*"))
    Path(f"{a}.sums").unlink()
    assert merge([a, a], out, checksums=False).verified == 0
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.bin", "out.idx"]
