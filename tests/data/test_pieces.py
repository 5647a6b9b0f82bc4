"""A corpus in partitions and parts: the same bytes as in one run, also after a kill."""

import dataclasses
import fcntl
import gzip
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import maxmeg
from maxmeg import preprocess
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.prepare.documents import read_span
from maxmeg.data.prepare.encoding import Options
from maxmeg.data.prepare.merge import merge
from maxmeg.data.prepare.run import Share, prepare

ROOT = Path(maxmeg.__file__).parents[1]
SUFFIXES = (".bin", ".idx", ".sums", ".weights.npy")
KILLS = 3  # seconds of a process each


def some_texts(seed: int, count: int, longest: int = 300) -> list[str]:
    source = random.Random(seed)
    words = ["alpha", "beta", "é", "東京", "\n", " "]
    return ["".join(source.choices(words, k=source.randrange(longest))) for _ in range(count)]


def weight_of(text: str) -> float:
    return len(text) % 4 / 2


def row_of(text: str) -> dict:
    return {"text": text, "weight": weight_of(text)}


def as_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps(row_of(text)) + "\n" for text in texts).encode()


@pytest.fixture
def corpus(tmp_path) -> list[str]:
    """Every kind of file, some of them empty, in an order that is not by kind."""
    folder = tmp_path / "in"
    folder.mkdir()
    texts = some_texts(0, 40)
    (folder / "a.jsonl").write_bytes(as_lines(texts[:10]))
    (folder / "b.txt").write_text(texts[10])
    (folder / "c.txt").write_text("")
    (folder / "d.jsonl").write_bytes(b"")
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(as_lines(texts[11:20])))
    (folder / "f.jsonl.gz").write_bytes(gzip.compress(b""))
    weights = list(map(weight_of, texts[20:35]))
    table = pyarrow.table({"weight": weights, "other": range(15), "text": texts[20:35]})
    pyarrow.parquet.write_table(table, folder / "g.parquet", row_group_size=4)
    with pyarrow.ipc.new_stream(folder / "g.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=4)
    array = list(map(row_of, texts[:10]))
    (folder / "g.json").write_text(json.dumps(array, indent=1))
    (folder / "h.jsonl").write_bytes(as_lines(texts[35:]).rstrip(b"\n"))
    return sorted(map(str, folder.iterdir()))


def written(prefix: str) -> list[bytes]:
    return [Path(prefix + suffix).read_bytes() for suffix in SUFFIXES]


def assert_weights(prefix: str, unweighted: str) -> None:
    """Every text that is not empty has the weight of its row."""
    corpus = IndexedDataset(prefix)
    assert corpus.weights is not None
    for weight, (begin, end) in zip(
        corpus.weights, itertools.pairwise(corpus.document_starts()), strict=True
    ):
        text = corpus.tokens[begin : end - 1].astype(np.uint8).tobytes().decode()
        assert not text or weight == (1 if text == unweighted else weight_of(text))


def test_every_line_is_in_one_span(tmp_path):
    data = b"\nab\n\n\ncde\nf"
    (tmp_path / "a").write_bytes(data)
    for cuts in itertools.combinations(range(1, len(data)), 2):
        actual = b""
        for begin, end in itertools.pairwise((0, *cuts, len(data))):
            at, lines = read_span(str(tmp_path / "a"), begin, end, len(data))
            assert not lines or (begin <= at < end and data[at : at + len(lines)] == lines)
            actual += lines
        assert actual == data


@pytest.mark.parametrize("line", [10, 1 << 16, (1 << 16) + 1, 3 << 20])
def test_a_span_reads_on_to_the_end_of_its_last_line(tmp_path, line):
    data = b"ab\n" + b"x" * line + b"\nlast"
    (tmp_path / "a").write_bytes(data)
    path, size = str(tmp_path / "a"), len(data)
    assert read_span(path, 0, 4, size) == (0, data[:-4])
    assert read_span(path, 4, line + 4, size)[1] == b""
    assert read_span(path, 4, size, size) == (line + 4, b"last")


@pytest.mark.parametrize("partitions", [2, 11, 30])
def test_partitions_merge_to_what_one_run_writes(tmp_path, corpus, partitions):
    options = Options("bytes", append_eod=True)
    whole = prepare(corpus, str(tmp_path / "whole"), options, 0)
    assert whole.documents == 66  # an empty .txt is a document
    unweighted = (tmp_path / "in" / "b.txt").read_text()
    assert_weights(whole.prefixes["text"], unweighted)
    output, counts = str(tmp_path / "out"), []
    for i in range(partitions):
        share = Share(i, partitions, part_bytes=50 if i % 2 else 1 << 20)
        counts.append(prepare(corpus, output, options, 0, share=share).documents)
    assert sum(counts) == 66 and max(counts) < 66
    folder = sorted(str(p) for p in tmp_path.glob("out_*.idx"))
    assert len(folder) == partitions and not list(tmp_path.glob("*.parts*"))
    assert merge(folder, str(tmp_path / "merged")).verified == partitions
    assert written(str(tmp_path / "merged")) == written(whole.prefixes["text"])
    options = dataclasses.replace(options, shuffle_seed=5)
    shuffled = prepare(corpus, str(tmp_path / "shuffled"), options, 0)
    assert_weights(shuffled.prefixes["text"], unweighted)
    merge(folder, str(tmp_path / "merged"), shuffle_seed=5)
    assert written(str(tmp_path / "merged")) == written(shuffled.prefixes["text"])
    if partitions > 2:
        return
    with pytest.raises(ValueError, match=r"partitions=2 are shuffled when they are joined"):
        prepare(corpus, output, options, 0, share=Share(0, 2))
    for names, message in (
        (folder[1:], r"\[0\] are missing"),
        (folder[::-1], r"the order is \[1, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(names, str(tmp_path / "other"))


def test_a_bad_line_is_named_wherever_it_is_cut(tmp_path):
    lines = as_lines(some_texts(1, 30, 20)).splitlines(keepends=True)
    for i in (3, 17, 29):
        lines[i] = b'{"text": 1}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n\n" + b"".join(lines))
    for part_bytes in (1 << 20, 100):
        actual: list[str] = []
        output = str(tmp_path / f"out{part_bytes}")
        report = prepare(
            [str(path)], output, Options("bytes"), 0, True, on_bad_line=actual.append,
            share=Share(part_bytes=part_bytes),
        )  # fmt: skip
        assert [message.split(":")[0] for message in actual] == [
            f"{path} line {i + 3}" for i in (3, 17, 29)
        ]
        assert report.bad_lines == 3
        with pytest.raises(ValueError, match=r"line 6: 'text' must be a string"):
            prepare([str(path)], output, Options("bytes"), 0, share=Share(part_bytes=part_bytes))
    assert not list(tmp_path.glob("*.parts"))  # no part was finished


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    path, output = tmp_path / "a.jsonl", str(tmp_path / "out")
    texts = some_texts(2, 60, 50)
    path.write_bytes(as_lines(texts) + b"{}\n")
    options, share = Options("bytes"), Share(part_bytes=path.stat().st_size // 8 + 1)

    def run(skip: bool = False, options: Options = options, share: Share = share):
        return prepare([str(path)], output, options, 0, skip, share=share)

    with pytest.raises(ValueError, match="line 61: no 'text' among no fields"):
        run()
    parts = sorted(p.name for p in (tmp_path / "out.parts").iterdir() if p.is_dir())
    assert parts == [f"{i:06d}" for i in range(6)]
    for changed, message in (
        ({"options": Options("bytes", append_eod=True)}, "append_eod: False there, True now"),
        ({"share": Share(part_bytes=5)}, "part_bytes"),
        ({"options": Options("null:70000")}, "tokenizer: bytes there, null:70000 now"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**changed)
    old = path.stat()
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    with pytest.raises(ValueError, match=r"other settings \(inputs"):
        run()
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    with (tmp_path / "out.parts" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another run is writing"):
            run()
    damaged = tmp_path / "out.parts" / "000002" / "part_text_document.bin"
    damaged.write_bytes(bytes(len(damaged.read_bytes())))
    with pytest.raises(ValueError, match=r"000002 is damaged: delete it"):
        run(skip=True)
    assert not list(tmp_path.glob("out*.bin"))
    shutil.rmtree(damaged.parent)
    report = run(skip=True)
    assert (report.parts_found, report.documents, report.bad_lines) == (7, 60, 1)
    assert report.tokens == sum(len(text.encode()) for text in texts)
    whole = prepare([str(path)], str(tmp_path / "whole"), options, 0, True)
    assert written(report.prefixes["text"]) == written(whole.prefixes["text"])
    assert not list(tmp_path.glob("*.parts*"))


def test_a_file_that_is_written_meanwhile_is_noticed(tmp_path):
    path = tmp_path / "a.jsonl"

    def write_more(message: str) -> None:
        with path.open("ab") as file:
            file.write(as_lines(["more"]))

    for part_bytes in (1 << 20, 100):
        path.write_bytes(as_lines(some_texts(5, 20)) + b"{}\n")
        with pytest.raises(ValueError, match=r"a\.jsonl was changed while it was read"):
            prepare(
                [str(path)], str(tmp_path / f"out{part_bytes}"), Options("bytes"), 0, True,
                on_bad_line=write_more, share=Share(part_bytes=part_bytes),
            )  # fmt: skip
    assert not list(tmp_path.glob("out*.*in")) and not list(tmp_path.glob("out*.idx"))


@pytest.mark.slow
def test_killed_at_any_point_it_goes_on_to_the_same_bytes(tmp_path):
    """SIGKILL: what is there is whole, and the same command ends as an unbroken run does."""
    path, output = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(as_lines([text * 40 for text in some_texts(3, 1500)]))
    command = [sys.executable, "-m", "maxmeg.preprocess", f"--input={path}", f"--output={output}"]
    command += ["--workers=0", "--part_mb=1", "--append_eod"]
    source = random.Random(4)
    final = Path(f"{output}_text_document.idx")
    for _ in range(KILLS):
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        actual = parts_of(output)
        while run.poll() is None and parts_of(output) == actual:
            time.sleep(0.002)
        time.sleep(source.random() * 0.1)
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert not final.exists() or run.returncode == 0
        for part in parts_of(output):
            assert json.loads((part / "counts.json").read_text())["documents"] > 0
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "parts were kept from an interrupted run" in done.stdout
    whole = prepare([str(path)], str(tmp_path / "whole"), Options("bytes", append_eod=True), 0)
    assert written(str(final.with_suffix(""))) == written(whole.prefixes["text"])
    assert not list(tmp_path.glob("*.parts*")) and not list(tmp_path.glob("*.tmp"))


def parts_of(output: Path) -> set[Path]:
    return {p for p in Path(f"{output}.parts").glob("??????") if p.is_dir()}


def test_partitions_come_from_flags_or_a_slurm_array(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_lines(["one", "two", "three"]))

    def run(*flags: str) -> int:
        common = [f"--input={path}", f"--output={tmp_path}/out", "--workers=0", "--partitions=2"]
        return preprocess.main([*common, *flags])

    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    assert run() == 2 and "--partition, from 0" in capsys.readouterr().err
    assert run("--partition=2") == 2 and "partition=2 is not in [0" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert run() == 0 and run("--partition=0") == 0
    assert sorted(p.stem for p in tmp_path.glob("*.idx")) == [
        "out_00000-of-00002_text_document",
        "out_00001-of-00002_text_document",
    ]
    assert preprocess.main(["--input=-", "--output=x", "--partitions=2"]) == 2
    assert "standard input (-) cannot be read in partitions" in capsys.readouterr().err
