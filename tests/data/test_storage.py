"""Objects of a real S3 server on loopback, and stores that fail in every way."""

import gzip
import json
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from maxmeg.data.corpus import storage
from maxmeg.data.prepare.encoding import Options
from maxmeg.data.prepare.run import Share, prepare

OPTIONS = Options("bytes", append_eod=True)
NAMES = ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt")
TEXTS = [f"document {i} " * (i % 9) for i in range(300)]


@pytest.fixture(scope="module")
def bucket(s3):
    """`s3://texts`, as fsspec sees it."""
    store = fsspec.filesystem("s3", use_listings_cache=False)
    store.mkdir("texts")
    return store


@pytest.mark.parametrize(
    ("inputs", "workers", "part_bytes"),
    [
        (["s3://texts/in/*"], 1, 1 << 30),
        ([f"s3://texts/in/{name}" for name in NAMES], 0, 1000),
    ],
)
def test_objects_are_prepared_like_files(tmp_path, bucket, inputs, workers, part_bytes):
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
    table = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:50]}), table, row_group_size=20)
    packed = gzip.compress(b"".join(lines[:99]))
    files = (b"".join(lines), packed, table.read_bytes(), b"text")
    for name, data in zip(NAMES, files, strict=True):
        (tmp_path / name).write_bytes(data)
        bucket.pipe_file(f"texts/in/{name}", data)
    bucket.pipe_file("texts/in/deeper/e.txt", b"not matched")
    here = prepare([str(tmp_path / name) for name in NAMES], str(tmp_path / "here"), OPTIONS, 0)
    share = Share(part_bytes=part_bytes)
    there = prepare(inputs, str(tmp_path / "out"), OPTIONS, workers, share=share)
    for suffix in (".bin", ".idx", ".sums"):
        near, far = (Path(report.prefixes["text"] + suffix) for report in (here, there))
        assert near.read_bytes() == far.read_bytes()


def test_what_a_bucket_lacks_is_named(tmp_path, bucket):
    bucket.pipe_file("texts/a.txt", b"0123456789")
    assert storage.exists("s3://texts/a.txt") and not storage.exists("s3://texts/b.txt")
    assert not storage.exists("s3://texts/in") and not storage.exists("s3://nothing/a.txt")
    assert storage.state("s3://texts/a.txt")[0] == 10
    assert storage.read_range("s3://texts/a.txt", 3, 6) == b"345"
    with storage.open_input("s3://texts/a.txt") as file:
        assert (file.read(4), file.seek(-2, 2), file.read()) == (b"0123", 8, b"89")
    for address, message in (
        ("s3://texts/b.txt", "input s3://texts/b.txt does not exist and matches no file"),
        ("s3://nothing/*.txt", "matches no file"),
        ("s3://No_Bucket!/a.txt", "Invalid bucket name"),
        ("s4://texts/a.txt", "Protocol not known: s4; use s3://"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare([address], str(tmp_path / "out"), OPTIONS, 0)
    with pytest.raises(ValueError, match=r"s3://texts/b\.txt does not exist: check bucket"):
        storage.state("s3://texts/b.txt")
    with pytest.raises(ValueError, match="ends at byte 10, before byte 11"):
        storage.read_range("s3://texts/a.txt", 5, 11)


def test_wrong_credentials_are_distinguished_from_missing_keys(tmp_path, bucket, monkeypatch):
    """In the moment of the request: nothing is tried again."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(storage, "WAITS", (60.0,))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(ValueError, match=r"not allowed to look for s3://texts/a\.txt: .*AWS_PROF"):
        storage.exists("s3://texts/a.txt")
    fsspec.get_filesystem_class("s3").clear_instance_cache()


class Failing:
    """A store that fails some times, then answers."""

    def __init__(self, failures: list) -> None:
        self.failures, self.asked = failures, 0

    def info(self, key: str) -> dict:
        return {"size": 4, "type": "file"}

    def cat_file(self, key: str, start: int, end: int) -> bytes:
        self.asked += 1
        failure = self.failures.pop(0) if self.failures else b"data"[start:end]
        if isinstance(failure, Exception):
            raise failure
        return failure


@pytest.mark.parametrize(
    ("failures", "asked", "message"),
    [
        ([ConnectionResetError("cut"), TimeoutError("late"), b"da"], 4, ""),
        ([OSError("cut")] * 9, 4, r"read s3://b/k: 4 attempts .* OSError: cut; check the net"),
        ([b"d"] * 9, 4, "EOFError: 1 of the bytes"),
        ([PermissionError("Forbidden")], 1, "not allowed to read s3://b/k: .*Forbidden; check the"),
        ([FileNotFoundError("k")], 1, "s3://b/k does not exist"),
        ([TypeError("a program's error")], 1, "cannot read s3://b/k: TypeError"),
    ],
)
def test_reads_are_tried_again_where_that_can_help(monkeypatch, failures, asked, message):
    store, waited = Failing(list(failures)), []
    monkeypatch.setattr(storage, "_store", lambda path: (store, "b/k"))
    monkeypatch.setattr(storage, "WAITS", (1.0, 2.0, 4.0))
    monkeypatch.setattr(storage.time, "sleep", waited.append)
    if message:
        with pytest.raises(ValueError, match=message):
            storage.read_range("s3://b/k", 0, 4)
    else:
        assert storage.read_range("s3://b/k", 0, 4) == b"data"
    assert store.asked == asked and len(waited) == asked - 1
    assert all(w / 2 <= s <= w for s, w in zip(waited, storage.WAITS, strict=False))


def test_missing_libraries_are_named(monkeypatch):
    def missing(*arguments, **settings):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(ValueError, match=r"needs s3fs: pip install 'maxmeg\[s3\]'"):
        storage.state("s3://texts/a.txt")
    with pytest.raises(ValueError, match="needs gcsfs: pip install gcsfs"):
        storage.state("gs://texts/a.txt")
