"""The preprocess command as a process: formats, bad lines, and being killed."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard
from tables import thinned

import maxmeg
from maxmeg.data.corpus.indexed import IndexedDataset

ROOT = Path(maxmeg.__file__).parents[1]
TEXTS = ["hello world", "", "second: naïve 東京"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "maxmeg.preprocess", *map(str, arguments)]


def preprocess(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, cwd=ROOT, timeout=120
    )


def texts(prefix: Path) -> list[str]:
    data = IndexedDataset(prefix)
    return [data.get(i).astype("u1").tobytes().decode() for i in range(len(data))]


@pytest.mark.parametrize("name", thinned(["a.jsonl.zst", "a.jsonl", "a.jsonl.gz", "-"], 4))
def test_lines_in_every_wrapping(tmp_path, name):
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    data = pack.get(Path(name).suffix, bytes)(LINES)
    source = "-" if name == "-" else tmp_path / name
    if name != "-":
        source.write_bytes(data)
    done = preprocess(f"--input={source}", f"--output={tmp_path}/out", "--workers=1", stdin=data)
    assert done.returncode == 0, done.stderr
    assert b"3 documents, 32 tokens" in done.stdout and b"MB/s" in done.stdout
    prefix = tmp_path / "out_text_document"
    assert texts(prefix) == ["hello world", "second: naïve 東京"]
    assert IndexedDataset(prefix).document_indices.tolist() == [0, 1, 1, 2]


def test_text_files_are_whole_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.py.gz").write_bytes(gzip.compress(b"three"))
    files = [tmp_path / "a.txt", tmp_path / "b.py.gz"]
    output = f"--output={tmp_path}/new/out"
    done = preprocess("--input", *files, output, "--workers=0", "--append_eod")
    assert done.returncode == 0, done.stderr
    data = IndexedDataset(tmp_path / "new" / "out_text_document")
    assert [data.get(i).tolist()[-1] for i in range(2)] == [256, 256]
    assert data.lengths.tolist() == [8, 6]
    done = preprocess("--input=-", output, "--stdin_format=text", "--workers=0", stdin=b"a\nb. C")
    assert texts(tmp_path / "new" / "out_text_document") == ["a\nb. C"]
    done = preprocess(f"--input={files[0]}", output, "--split_sentences", "--workers=0")
    assert texts(tmp_path / "new" / "out_text_sentence") == ["one\ntwo"]


def test_bad_lines_stop_or_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n{"text": \n{"text": "fine"}\n')
    flags = (f"--input={path}", f"--output={tmp_path}/out", "--workers=1")
    done = preprocess(*flags)
    assert done.returncode == 2
    assert f"{path} line 2: invalid UTF-8 at byte 10 (0xff)" in done.stderr.decode()
    assert b"Traceback" not in done.stderr and b"--skip_bad_lines" in done.stderr
    assert not list(tmp_path.glob("out*"))
    done = preprocess(*flags, "--skip_bad_lines")
    assert done.returncode == 0 and b"2 bad lines left out" in done.stdout
    assert f"{path} line 3: invalid JSON" in done.stderr.decode()
    assert texts(tmp_path / "out_text_document") == ["ok", "fine"]


def test_wrong_flags_are_explained_without_a_traceback(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    for flags, message in (
        ((f"--input={tmp_path}/none.jsonl", f"--output={tmp_path}/out"), b"matches no file"),
        ((f"--input={path}", "--output=/proc/none/out"), b"cannot write"),
        ((f"--input={path}", f"--output={tmp_path}/out", "--tokenizer=gpt3:x"), b"'gpt2'"),
        ((f"--input={path}", f"--output={tmp_path}/out", "--worker=2"), b"did you mean --workers?"),
    ):
        done = preprocess(*flags)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert b"Traceback" not in done.stderr
    assert not list(tmp_path.glob("out*"))


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("kill", "workers"),
    [
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_leaves_nothing_that_looks_whole(tmp_path, kill, workers):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    old = preprocess(f"--input={tmp_path}/a.jsonl", f"--output={tmp_path}/old", "--workers=0")
    assert old.returncode == 0
    for output in ("new", "old"):
        read, write = os.pipe()
        run = subprocess.Popen(
            command("--input=-", f"--output={tmp_path}/{output}", f"--workers={workers}"),
            stdin=read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
        os.close(read)
        line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
        for _ in range(8000):
            os.write(write, line)
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size for p in tmp_path.glob(f"{output}*.tmp")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        run.send_signal(kill)
        os.close(write)
        assert run.wait(60) != 0
        while any(is_running(child) for child in children):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert not list(tmp_path.glob("new*.bin")) and not list(tmp_path.glob("new*.idx"))
    assert texts(tmp_path / "old_text_document") == ["hello world", "second: naïve 東京"]
    if kill == signal.SIGTERM:
        assert not list(tmp_path.glob("*.tmp"))
