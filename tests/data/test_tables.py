"""Parquet: columns as documents, bad rows, files that are none."""

import builtins

import pyarrow
import pyarrow.parquet
import pytest

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.prepare import tables
from maxmeg.data.prepare.encoding import Options
from maxmeg.data.prepare.run import prepare


def write(path, columns: dict, **settings) -> str:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **settings)
    return str(path)


def texts(prefix: str) -> list[str]:
    data = IndexedDataset(prefix)
    return [data.get(i).astype("u1").tobytes().decode() for i in range(len(data))]


def test_each_column_becomes_documents(tmp_path):
    rows = [f"row {i} é" for i in range(100)]
    plain = pyarrow.array(rows)
    lists = [[text, "more"] for text in rows]
    path = write(
        tmp_path / "a.parquet",
        {
            "plain": plain, "large": plain.cast(pyarrow.large_string()), "lists": lists,
            "words": plain.dictionary_encode(), "bytes": plain.cast(pyarrow.binary()),
            "unread": range(100),
        },
        row_group_size=33, compression="zstd",
    )  # fmt: skip
    keys = ("plain", "large", "lists", "words", "bytes")
    report = prepare([path], str(tmp_path / "out"), Options("bytes", keys), 0)
    assert report.documents == 100
    for key in keys:
        expected = rows if key != "lists" else [part for row in lists for part in row]
        assert texts(report.prefixes[key]) == expected


def test_row_groups_are_streamed(tmp_path):
    """No batch holds much more text than was asked for, whatever the row groups."""
    path = write(tmp_path / "a.parquet", {"text": ["x" * 1000] * 2000}, use_dictionary=False)
    sizes = [(len(data), rows) for data, rows in tables.batches(path, (0, 1), ["text"], 50_000)]
    assert sum(rows for _, rows in sizes) == 2000 and tables.rows_before(path) == (0, 2000)
    assert len(sizes) >= 40 and max(size for size, _ in sizes) < 100_000


def test_bad_rows_and_files_are_named(tmp_path, monkeypatch):
    broken = pyarrow.array([b"a", b"\xff", b"c"])
    columns = {"text": ["a", None, "c"], "number": [1, 2, 3], "broken": broken}
    path = write(tmp_path / "a.parquet", columns, row_group_size=1)
    columns["broken"] = pyarrow.Array.from_buffers(pyarrow.string(), 3, broken.buffers())
    unchecked = write(tmp_path / "b.parquet", columns)
    output = str(tmp_path / "out")
    for name, key, message in (
        (path, "text", r"a\.parquet row 2: 'text' must be a string"),
        (path, "number", "row 1: 'number' must be a string"),
        (path, "broken", r"row 2: invalid UTF-8 at byte 0 \(0xff\)"),
        (unchecked, "broken", r"row 2: invalid UTF-8 at byte 0 \(0xff\)"),
        (path, "none", r"a\.parquet: no 'none' among text, number, broken: see --json_keys"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare([name], output, Options("bytes", (key,)), 0)
    assert prepare([path], output, Options("bytes"), 0, True).bad_lines == 1
    cut = tmp_path / "cut.parquet"
    cut.write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cut\.parquet is not a Parquet file, or is truncated"):
        prepare([str(cut)], output, Options("bytes"), 0)
    (tmp_path / "cut.arrow").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"cut\.arrow is not an Arrow file, or is truncated"):
        prepare([str(tmp_path / "cut.arrow")], output, Options("bytes"), 0)
    imported = builtins.__import__

    def without(name, *arguments):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install 'maxmeg\[parquet\]'"):
        tables.rows_before(path)


def test_folders_of_tables(tmp_path):
    """A split alone is read; several splits, other files and damaged lists are named."""
    for name in ("train-00000-of-00002", "train-00001-of-00002", "other"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    assert [path[-13:-8] for path in tables.files_of(str(tmp_path))] == ["other", "00002", "00002"]
    for name, text, error in (
        ("test-00000-of-00001.parquet", "", r"holds 2 splits: name one.*test-\*\.parquet, .*train"),
        ("rows.jsonl", "", r"with Parquet files and rows\.jsonl, and no saved dataset: name its"),
        ("state.json", '{"_data_files": 1}', r"state\.json is damaged: .*_data_files=1"),
        ("state.json", "{}", r"state\.json is damaged: KeyError.*save_to_disk"),
        ("dataset_dict.json", '{"splits": ["a", "b"]}', "holds 2 splits: name one of them, .*/a, "),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=error):
            tables.files_of(str(tmp_path))
        (tmp_path / name).unlink()
