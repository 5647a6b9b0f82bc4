"""Reading documents: lines, compression, sentences, bad input."""

import bz2
import gzip
import itertools
import json
import lzma
import re
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.prepare import arrays, documents, merge
from maxmeg.data.prepare.documents import (
    LINES,
    Progress,
    Record,
    read_blocks,
    read_records,
    split_sentences,
)
from maxmeg.data.prepare.encoding import Chunk, DocumentNames, Options, encode_chunk
from maxmeg.data.prepare.run import Share, prepare
from maxmeg.data.tokenizers.load import load_tokenizer

BYTES = load_tokenizer("bytes")


def records(path) -> list[Record]:
    return list(read_records([str(path)]))


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_lines_do_not_depend_on_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents, "_BLOCK", block)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{1}\r\n\n  \n{22}\n{333}")
    actual = records(path)
    assert [r.data.strip(b"\xef\xbb\xbf \r") for r in actual] == [b"{1}", b"{22}", b"{333}"]
    assert [r.line for r in actual] == [1, 4, 5]


@settings(max_examples=40)
@given(
    st.lists(st.dictionaries(st.text("a[", max_size=2), st.integers() | st.text('é"\\]}'))),
    st.sampled_from([None, 1]),
    st.integers(1, 9),
)
def test_an_array_is_split_into_rows(rows, indent, step):
    data = ("\ufeff " + json.dumps(rows, indent=indent, ensure_ascii=False)).encode()
    blocks = [data[i : i + step] for i in range(0, len(data), step)]
    assert [json.loads(text) for text in arrays.elements(blocks, "f")] == rows
    assert arrays.is_array([data]) and not arrays.is_array([b" {", data])


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"[1, 2", "f row 2: invalid JSON: the array does not end"),
        (b'[{"a": 1} {"b": 1}]', "f row 2: invalid JSON: ',' is missing before '{\"b\": 1}]'"),
        (b"[1] 2", "f row 2: invalid JSON: text after the end of the array: '2'"),
        (b'[1, {"a": "x', "f row 2: invalid JSON: Unterminated string"),
        (b'[{"a" 1}, "' + b"x" * 99, "f row 1: invalid JSON: Expecting ':' delimiter"),
        (b'["\xff"]', r"f row 1 or later: invalid UTF-8 \(0xff\)"),
        (b"[" * 100_000, "f row 1: JSON nested too deeply"),
        (b'["' + b"x" * 99, r"f row 1: invalid JSON: no end within 50 characters"),
    ],
)
def test_wrong_arrays_are_named(data, error, monkeypatch):
    monkeypatch.setattr(arrays, "MAX_ELEMENT", 50 if "50" in error else 1 << 20)
    with pytest.raises(ValueError, match=error):
        list(arrays.elements([data, b" "], "f"))


def test_compressed_files_are_read_and_truncated_ones_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_BLOCK", 1 << 12)
    text = b'{"text": "%s"}\n' % (b"abc " * 90) * 50
    two = zstandard.ZstdCompressor(write_checksum=True)
    packed = {
        "a.jsonl.gz": gzip.compress(text) + gzip.compress(text),
        "a.jsonl.zst": two.compress(text) + two.compress(text),
        "a.jsonl.bz2": bz2.compress(text) + bz2.compress(text),
        "a.jsonl.xz": lzma.compress(text) + bytes(8) + lzma.compress(text),
        "a.jsonl": text + text,
    }
    for name, data in packed.items():
        path = tmp_path / name
        path.write_bytes(data)
        progress = Progress()
        assert b"".join(read_blocks(str(path), progress)) == text + text
        assert b"".join(r.data + b"\n" for r in records(path)) == text + text
        assert progress.stored == len(data)
        if name == "a.jsonl":
            continue
        changed = data[:40] + b"\xff\xff\xff" + data[43:]
        for damaged in (data[:-3], data[: len(data) // 3], changed, data + b"more"):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=f"{name} is truncated or corrupt"):
                records(path)


def test_files_that_unpack_to_much_are_read_in_small_blocks(tmp_path):
    zeros = bytes(1 << 27)
    packed = {".zst": zstandard.compress(zeros), ".gz": gzip.compress(zeros)}
    packed |= {".bz2": bz2.compress(zeros), ".xz": lzma.compress(zeros)}
    for suffix, data in packed.items():
        path = tmp_path / f"zeros.txt{suffix}"
        path.write_bytes(data)
        sizes = [len(block) for block in read_blocks(str(path))]
        assert sum(sizes) == len(zeros) and max(sizes) <= 1 << 25, suffix


def test_inputs_are_found_in_order(tmp_path, monkeypatch):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("x")
    actual = documents.find_inputs([str(tmp_path / "c.txt"), str(tmp_path / "*.jsonl"), "-"])
    assert [name.rpartition("/")[2] for name in actual] == ["c.txt", "a.jsonl", "b.jsonl", "-"]
    for bad, message in (
        ([str(tmp_path / "none*")], "matches no file"),
        ([str(tmp_path)], "is a folder"),
        (["-", "-"], "only once"),
        ([], "no input"),
    ):
        with pytest.raises(ValueError, match=message):
            documents.find_inputs(bad)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two!  Three?", ["One.", "Two!", "Three?"]),
        ('He said "Stop." Then 3 left.', ['He said "Stop."', "Then 3 left."]),
        ("v1.2 is e.g. fine", ["v1.2 is e.g. fine"]),
        ("A title\n\nA text. (More.)", ["A title", "A text.", "(More.)"]),
        ("一つ。二つ。", ["一つ。", "二つ。"]),
        ("Été. Été.", ["Été.", "Été."]),
        ("", []),
        (" \n\n ", []),
    ],
)
def test_text_is_split_into_sentences(text, sentences):
    assert split_sentences(text) == sentences


def lengths(line: str, **options) -> tuple[list[int], str]:
    chunk = Chunk(LINES, ("f",), line.encode())
    actual = encode_chunk(chunk, Options("bytes", **options), BYTES)
    errors = [f"{DocumentNames().name(chunk, place)}: {message}" for place, message in actual.bad]
    assert len(errors) + actual.documents == 1
    return actual.columns[0].lengths.tolist(), "".join(errors)


def test_a_document_becomes_sequences():
    assert lengths('{"text": "abc"}') == ([3], "")
    assert lengths('{"text": "abc"}', append_eod=True) == ([4], "")
    assert lengths('{"text": ""}', append_eod=True) == ([], "")
    assert lengths('{"text": ["ab", "", "c"]}', append_eod=True) == ([2, 2], "")
    assert lengths('{"text": "A b. C"}', split_sentences=True, append_eod=True) == ([4, 2], "")
    assert lengths('{"text": "A b. C"}') == ([6], "")
    assert lengths('\ufeff{"text": "abc"}') == ([3], "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "abc"', "f line 1: invalid JSON"),
        ('["text"]', "must be a JSON object, not list; a file that is one array is named .json"),
        ("[", "invalid JSON: .*; a file that is one array is named .json"),
        ('{"other": 1, "more": 2}', r"no 'text' among other, more: see --json_keys$"),
        (
            '{"instruction": "", "output": ""}',
            r"see --json_keys; these are chats \(Alpaca\)",
        ),
        ('{"text": 3}', "must be a string or a list of strings"),
        ('{"text": ["a", null]}', "must be a string or a list of strings"),
        (r'{"text": "\ud800"}', "half a surrogate pair"),
        ('{"text": ' + "[" * 100_000, "nested too deeply|invalid JSON"),
    ],
)
def test_bad_lines_are_named(line, message):
    assert re.search(message, lengths(line)[1])


def test_workers_change_nothing(tmp_path, write_lines):
    path = write_lines([f"document {i} " * (i % 7) for i in range(200)])
    outputs = []
    for workers in (0, 2):
        report = prepare([path], str(tmp_path / f"w{workers}"), Options("bytes"), workers)
        assert report.documents == 200
        prefix = report.prefixes["text"]
        outputs.append([Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")])
    assert outputs[0] == outputs[1]
    assert IndexedDataset(prefix).num_documents == 200


def test_documents_in_a_random_order(tmp_path, monkeypatch):
    """The seed alone decides it, for all keys alike; nothing but the order changes."""
    path, lines = tmp_path / "a.jsonl", [{"q": f"question {i}", "a": "x" * i} for i in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def prepared(name: str, seed: int | None, workers: int = 0, **share) -> list[list[str]]:
        options = Options("bytes", ("q", "a"), append_eod=True, shuffle_seed=seed)
        made = prepare([str(path)], str(tmp_path / name), options, workers, share=Share(**share))
        assert made.documents == 60
        columns = []
        for prefix in made.prefixes.values():
            dataset = IndexedDataset(prefix)
            bounds = itertools.pairwise(dataset.document_starts())
            columns.append([BYTES.decode(dataset.tokens[a:b]) for a, b in bounds])
        return [list(row) for row in zip(*columns, strict=True)]

    plain = [[line["q"], line["a"]] for line in lines]
    assert prepared("plain", None) == plain
    one = prepared("one", 1)
    assert one != plain and sorted(one) == sorted(plain)
    monkeypatch.setattr(merge, "_TOKENS", 100)
    assert prepared("two", 1, workers=1, part_bytes=300) == one != prepared("three", 2)
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_aligned_rows_are_whole_or_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"src": "ja", "tgt": "yes"}, {"src": "", "tgt": "x"}, {"src": "y", "tgt": ["z"]}]
    rows += [{"src": "only"}, {"src": "a", "tgt": ["b", "c"]}, {"src": "nein", "tgt": "no"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bad: list[str] = []
    options = Options("bytes", ("src", "tgt"), append_eod=True, aligned=True)
    report = prepare([str(path)], str(tmp_path / "out"), options, 0, True, on_bad_line=bad.append)
    assert (report.documents, report.empty_rows, report.bad_lines) == (3, 1, 2)
    assert "line 4: no 'tgt'" in bad[0]
    assert "line 5: 2 texts under one key cannot be aligned" in bad[1]
    source, target = (IndexedDataset(report.prefixes[key]) for key in ("src", "tgt"))
    assert source.lengths.tolist() == [3, 2, 5] and target.lengths.tolist() == [4, 2, 3]
    assert source.document_indices.tolist() == target.document_indices.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="leave out split_sentences"):
        prepare([str(path)], "x", Options("bytes", aligned=True, split_sentences=True), 0)


def test_nothing_is_written_before_input_and_output_are_sound(tmp_path, write_lines):
    path, empty = write_lines(["a"]), write_lines(["", ""], "empty.jsonl")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "out")
    for inputs, output, options, message in (
        ([path], str(tmp_path / "file" / "out"), Options("bytes"), "cannot write"),
        ([path], out, Options("byte"), "did you mean 'bytes'"),
        ([path], out, Options("bytes", ("a/b",)), "part of a file name"),
        ([path], out, Options("bytes", ("a", "a")), "distinct keys"),
        ([str(tmp_path / "a.txt")], out, Options("bytes", ("a", "b")), "give one key"),
        ([empty], out, Options("bytes"), "2 documents hold no text"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(inputs, output, options, 0)
    with pytest.raises(ValueError, match="workers=-1"):
        prepare([path], out, Options("bytes"), -1)
    assert not list(tmp_path.glob("out*"))
