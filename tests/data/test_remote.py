"""Corpora in object storage: the same samples as from files, whatever the network does."""

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from maxmeg.config.data import DataConfig, DataOrder, Packing
from maxmeg.data.build import build_dataset, open_corpus
from maxmeg.data.corpus import remote, storage
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.corpus.remote import Room, open_dataset, open_remote
from maxmeg.data.loader import Loader, all_rows
from maxmeg.data.samples.gpt import GptDataset

CHUNK = 1 << 10
SAMPLES = 60


@pytest.fixture(scope="module")
def store(s3, tmp_path_factory):
    """S3 with corpora `bucket/a` and `bucket/b`; the same files lie in `folder`."""
    import s3fs

    s3.files = s3fs.S3FileSystem(use_listings_cache=False)
    s3.files.mkdir("bucket")
    s3.folder = tmp_path_factory.mktemp("corpora")
    for name, seed in (("a", 1), ("b", 2)):
        write(s3, name, seed)
    return s3


def write(store, name: str, seed: int) -> str:
    source, prefix = np.random.default_rng(seed), str(store.folder / name)
    with IndexedWriter(prefix, 1000) as writer:
        for _ in range(60):
            writer.add_document(source.integers(0, 1000, source.integers(5, 200)))
    if name == "a":
        np.save(prefix + ".weights.npy", np.float32(np.arange(60) % 4))
    for suffix in (".idx", ".bin", ".sums", ".weights.npy")[: 4 if name == "a" else 3]:
        store.files.put(prefix + suffix, f"bucket/{name}{suffix}")
    return prefix


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.01, 0.01))


def opened(cache, *items, **kind):
    config = DataConfig(sequence_length=16, tokenizer="null:1000", split="1", **kind)
    config.paths, config.chunk_kb = items, CHUNK >> 10
    config.cache_dir = str(cache)
    tokenizer, prefixes = open_corpus(config, "unused")
    return build_dataset(config, prefixes, tokenizer, 0, 3, 0, SAMPLES)


def assert_same(one: GptDataset, two: GptDataset) -> None:
    for begin in range(0, SAMPLES, 20):
        a, b = (dataset.batch(np.arange(begin, begin + 20)) for dataset in (one, two))
        assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def chunks(cache) -> list[Path]:
    return [path for path in Path(cache).glob("objects/*/chunks-*/*")]


BLEND = ("0.6", "{}/a", "0.4", "{}/b")


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        (BLEND, {"order": DataOrder.megatron}),
        (BLEND, {"order": DataOrder.native}),
        (("{}/a",), {"packing": Packing.best_fit}),
    ],
)
def test_samples_are_those_of_files(store, tmp_path, items, kind):
    def of(folder):
        return opened(tmp_path, *(item.format(folder) for item in items), **kind)

    far, near = of("s3://bucket"), of(store.folder)
    assert_same(far, near)
    assert {*near.batch(np.arange(20))["loss_mask"].flat} >= {0, 1, 2, 3}
    assert "packing" in kind or (far.reads_ahead and not near.reads_ahead)
    asked = len(store.asked)
    assert_same(of("s3://bucket"), near)
    assert len(store.asked) == asked  # everything is there


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_fetches_ahead_of_its_steps(store, tmp_path, num_workers):
    far, near = (
        opened(tmp_path / "cache", path) for path in ("s3://bucket/a", f"{store.folder}/a")
    )
    for path in chunks(tmp_path / "cache"):  # what the check of ids has read
        path.unlink()
    span = range(SAMPLES // 2)
    with Loader(far, two_by_two, all_rows, span, num_workers, 1) as loader:
        first = next(loader)
        deadline = time.monotonic() + 60
        ahead = near.samples.pieces(np.arange(2 * 4))  # of the steps after the first
        while len(chunks(tmp_path / "cache")) < min(4, len(ahead.lengths)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for step, batch in [first, *loader]:
            expected = near.batch(np.arange(2 * step, 2 * step + 2))
            assert all(np.array_equal(batch[name], expected[name]) for name in expected)


def two_by_two(step: int) -> tuple[int, int]:
    return 2 * step, 2


def test_a_connection_that_is_cut_is_tried_again(store, tmp_path):
    near = opened(tmp_path, f"{store.folder}/a")
    store.cuts = 2
    far = opened(tmp_path, "s3://bucket/a")
    assert_same(far, near)
    assert store.cuts == 0


def test_a_failing_store_is_reported_with_object_and_bytes(store, tmp_path, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)  # its own tries, each of ours
    far = opened(tmp_path, "s3://bucket/a")
    for path in chunks(tmp_path):
        path.unlink()
    store.cuts = 10**6
    try:
        with pytest.raises(
            ValueError, match=r"bytes \[\d+, \d+\): cannot read s3://bucket/a.bin: .*check the net"
        ):
            far.batch(np.arange(4))
    finally:
        store.cuts = 0
    assert not chunks(tmp_path)
    assert_same(far, opened(tmp_path, f"{store.folder}/a"))  # it was the store, not the run


def test_the_cache_keeps_to_its_room_and_what_was_read_last(store, tmp_path):
    room = Room(str(tmp_path), 6 * CHUNK, CHUNK)
    far = IndexedDataset("s3://bucket/a", remote=open_remote("s3://bucket/a", room))
    near = IndexedDataset(f"{store.folder}/a")
    source = np.random.default_rng(0)
    for _ in range(30):
        begin, length = int(source.integers(0, near.num_tokens)), int(source.integers(0, 1500))
        assert np.array_equal(
            far.tokens[begin : begin + length], near.tokens[begin : begin + length]
        )
        assert far.tokens[0] == near.tokens[0]  # never the one that was read longest ago
        kept = list(tmp_path.glob("*/chunks-*/*"))
        assert sum(path.stat().st_size for path in kept) <= room.limit
        assert "0" in {path.name for path in kept} and len(kept) <= 6
    assert not list(tmp_path.glob("*/chunks-*/*.tmp"))


def test_a_cache_smaller_than_a_batch_is_reported(store, tmp_path, caplog):
    """And still every sample comes; nothing is fetched before its time only to go again."""
    room = Room(str(tmp_path), 3 * CHUNK, CHUNK)
    corpus = IndexedDataset("s3://bucket/a", remote=open_remote("s3://bucket/a", room))
    far = GptDataset([corpus], "1", 0, 16, 1000, 3)
    far.read_ahead(np.arange(20))
    time.sleep(0.1)
    assert not list(tmp_path.glob("*/chunks-*/*"))
    near = GptDataset([IndexedDataset(f"{store.folder}/a")], "1", 0, 16, 1000, 3)
    assert_same(far, near)
    assert caplog.text.count("more than data.cache_gb=3.072e-06 allows") == 1


def test_slices_are_those_of_an_array(store, tmp_path):
    far, near = (
        open_dataset(path, DataConfig(cache_dir=str(tmp_path)), "")
        for path in ("s3://bucket/a", f"{store.folder}/a")
    )
    bounds = ((0, 0), (5, 2), (-3, None), (None, 4), (7, 10**9))
    for where in (*(slice(*pair) for pair in bounds), -1, 9):
        assert np.array_equal(far.tokens[where], near.tokens[where])
    assert far.get(3).tolist() == near.get(3).tolist() and far.num_tokens == near.num_tokens
    with pytest.raises(IndexError):
        far.tokens[far.num_tokens]
    with pytest.raises(ValueError, match="not with step 2"):
        far.tokens[::2]


def read_all(cache: str, prefix: str, start, total) -> None:
    start.wait()
    dataset = open_dataset(prefix, DataConfig(cache_dir=cache, chunk_kb=1), "")
    total.value = int(dataset.tokens[:].astype(np.int64).sum())


def test_processes_of_a_node_share_what_was_read(store, tmp_path):
    """This process and another one, which begin together."""
    context = multiprocessing.get_context("spawn")
    start, (one, two) = context.Barrier(2), (context.Value("q", 0) for _ in range(2))
    process = context.Process(target=read_all, args=(str(tmp_path), "s3://bucket/b", start, one))
    process.start()
    read_all(str(tmp_path), "s3://bucket/b", start, two)
    process.join()
    near = IndexedDataset(f"{store.folder}/b")
    assert one.value == two.value == int(near.tokens.astype(np.int64).sum())
    assert sum(path.stat().st_size for path in chunks(tmp_path)) == near.tokens.nbytes
    assert int((tmp_path / "objects/used").read_text()) <= 2 * near.tokens.nbytes
    asked = len(store.asked)
    read_all(str(tmp_path), "s3://bucket/b", context.Barrier(1), one)
    assert len(store.asked) == asked


def test_an_object_that_was_replaced_is_noticed(store, tmp_path, monkeypatch):
    write(store, "c", 3)
    before = opened(tmp_path, "s3://bucket/c")
    prefix = write(store, "c", 4)
    assert_same(opened(tmp_path, "s3://bucket/c"), opened(tmp_path, prefix))
    monkeypatch.setattr(remote, "_CHECKED", -1)
    for path in chunks(tmp_path):
        path.unlink()
    with pytest.raises(ValueError, match=r"c.bin: it ends|c.bin was replaced while it was read"):
        before.batch(np.arange(SAMPLES))
    for suffix in (".idx", ".sums"):
        store.files.put(str(store.folder / f"a{suffix}"), f"bucket/c{suffix}")
    with pytest.raises(ValueError, match=r"s3://bucket/c: s3://bucket/c.bin has \d+ bytes, but"):
        opened(tmp_path, "s3://bucket/c")


def test_missing_and_forbidden_objects_are_reported_at_once(store, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"s3://bucket/none.idx does not exist"):
        opened(tmp_path, "s3://bucket/none")
    store.files.rm("bucket/b.sums")
    assert_same(opened(tmp_path, "s3://bucket/b"), opened(tmp_path, f"{store.folder}/b"))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "exists", refuse)
        assert_same(opened(tmp_path, "s3://bucket/b"), opened(tmp_path, f"{store.folder}/b"))
    with pytest.raises(ValueError, match=r"object storage needs a folder .* data.cache_dir"):
        open_dataset("s3://bucket/a", DataConfig(), "")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot keep s3://bucket/a.idx in .*data.cache_dir"):
        open_dataset("s3://bucket/a", DataConfig(), str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"give the prefix of a .bin and an .idx file"):
        IndexedDataset("s3://bucket/a")  # commands read files


def refuse(path: str) -> bool:
    raise ValueError(f"not allowed to look for {path}")


def test_a_full_disk_is_reported(store, tmp_path, monkeypatch):
    room = Room(str(tmp_path), 1 << 30, CHUNK)
    corpus = open_remote("s3://bucket/a", room)
    far = IndexedDataset("s3://bucket/a", remote=corpus)

    def fail(self, data):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(ValueError, match=r"cannot keep a chunk in .*: No space .*data.cache_gb"):
        far.get(0)
