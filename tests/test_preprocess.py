"""The preprocess command: formats, bad lines, and a process that is killed."""

import gzip
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

import maxmeg
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.preprocess import main

ROOT = Path(maxmeg.__file__).parents[1]
TEXTS = ["hello world", "", "second: naïve 東京"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
PACKED = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.fixture
def preprocess(capsys, monkeypatch):
    """Runs the command in this process; returns (exit code, standard output, errors)."""

    def run(*flags, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        return main([*map(str, flags)]), *capsys.readouterr()

    return run


def texts(prefix: Path) -> list[str]:
    data = IndexedDataset(prefix)
    return [data.get(i).astype("u1").tobytes().decode() for i in range(len(data))]


@pytest.mark.parametrize(
    ("name", "workers"), [("a.jsonl.zst", 0), ("a.jsonl", 1), ("a.jsonl.gz", 0), ("-", 0)]
)
def test_lines_in_every_wrapping(tmp_path, preprocess, name, workers):
    data = PACKED.get(Path(name).suffix, bytes)(LINES)
    source = "-" if name == "-" else tmp_path / name
    if name != "-":
        source.write_bytes(data)
    flags = (f"--input={source}", f"--output={tmp_path}/out", f"--workers={workers}")
    code, said, errors = preprocess(*flags, stdin=data)
    assert code == 0, errors
    assert "3 documents, 32 tokens" in said and "MB/s" in said
    prefix = tmp_path / "out_text_document"
    assert texts(prefix) == ["hello world", "second: naïve 東京"]
    assert IndexedDataset(prefix).document_indices.tolist() == [0, 1, 1, 2]


def test_text_files_are_whole_documents(tmp_path, preprocess):
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.py.gz").write_bytes(gzip.compress(b"three"))
    files = [tmp_path / "a.txt", tmp_path / "b.py.gz"]
    flags, prefix = (f"--output={tmp_path}/new/out", "--workers=0"), tmp_path / "new/out_text"
    assert preprocess("--input", *files, *flags, "--append_eod")[0] == 0
    data = IndexedDataset(f"{prefix}_document")
    assert [data.get(i).tolist()[-1] for i in range(2)] == [256, 256]
    assert data.lengths.tolist() == [8, 6]
    preprocess("--input=-", *flags, "--stdin_format=text", stdin=b"a\nb. C")
    assert texts(Path(f"{prefix}_document")) == ["a\nb. C"]
    preprocess(f"--input={files[0]}", *flags, "--split_sentences")
    assert texts(Path(f"{prefix}_sentence")) == ["one\ntwo"]


def test_bad_lines_stop_or_are_counted(tmp_path, preprocess):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n{"text": \n{"text": "fine"}\n')
    flags = (f"--input={path}", f"--output={tmp_path}/out")
    code, _, errors = preprocess(*flags, "--workers=1")
    assert code == 2
    assert f"{path} line 2: invalid UTF-8 at byte 10 (0xff)" in errors
    assert "Traceback" not in errors and "--skip_bad_lines" in errors
    assert not list(tmp_path.glob("out*"))
    code, said, errors = preprocess(*flags, "--workers=0", "--skip_bad_lines")
    assert code == 0 and "2 bad lines left out" in said
    assert f"{path} line 3: invalid JSON" in errors
    assert texts(tmp_path / "out_text_document") == ["ok", "fine"]


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_stopped_run_leaves_the_old_files_and_nothing_else(tmp_path, preprocess):
    """SIGTERM, to which its worker does not listen."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    output = f"--output={tmp_path}/out"
    assert preprocess(f"--input={tmp_path}/a.jsonl", output, "--workers=0")[0] == 0
    run = subprocess.Popen(
        [sys.executable, "-m", "maxmeg.preprocess", "--input=-", output, "--workers=1"],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    assert run.stdin
    run.stdin.write(8000 * (json.dumps({"text": "x" * 1000}).encode() + b"\n"))
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size for p in tmp_path.glob("out*.tmp")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.terminate()
    run.stdin.close()
    assert run.wait(60) != 0
    while any(is_running(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert texts(tmp_path / "out_text_document") == ["hello world", "second: naïve 東京"]
    assert not list(tmp_path.glob("*.tmp"))
