"""The same batches however they are read: any hosts, any workers, from any step."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import maxmeg
from maxmeg.config.data import Builtin
from maxmeg.config.schema import Config
from maxmeg.data.build import build_dataset, open_corpus
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.loader import Loader, all_rows, eval_batches
from maxmeg.data.prepare.standard_library import source_files
from maxmeg.data.samples.blending import Blend, Phase
from maxmeg.data.samples.gpt import DocumentRules, GptDataset
from maxmeg.data.samples.megatron_order import MegatronOrder

ROOT = Path(maxmeg.__file__).parents[1]
STEPS = 9
PATIENCE = 60  # seconds in which what must happen has happened


def growing(step: int) -> tuple[int, int]:
    """Batches of 4, and of 8 from step 5 on."""
    return (4 * step, 4) if step < 5 else (20 + 8 * (step - 5), 8)


class Rows:
    """Every `hosts`-th row, from `first` on."""

    def __init__(self, first: int, hosts: int = 2) -> None:
        self.first, self.hosts = first, hosts

    def __call__(self, batch_size: int) -> np.ndarray:
        return np.arange(self.first, batch_size, self.hosts)


@pytest.fixture
def dataset(make_corpus) -> GptDataset:
    source = np.random.default_rng(1)
    texts = [np.append(source.integers(0, 99, source.integers(1, 40)), 99) for _ in range(40)]
    rules = DocumentRules(99, True, True, True)
    return GptDataset([IndexedDataset(make_corpus(texts))], "1", 0, 8, 100, 7, rules)


def read(dataset, start=0, rows=all_rows, num_workers=0, prefetch=2):
    with Loader(dataset, growing, rows, range(start, STEPS), num_workers, prefetch) as loader:
        return list(loader)


def assert_same(one, two):
    assert [step for step, _ in one] == [step for step, _ in two]
    for (_, a), (_, b) in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert all(
            np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
        )


@pytest.mark.parametrize("prefetch", [1, 20])
def test_batches_are_the_samples_in_order_from_any_step_on(dataset, prefetch):
    whole = []
    for step in range(STEPS):
        first, size = growing(step)
        whole.append((step, dataset.batch(np.arange(first, first + size))))
    for start in range(STEPS + 1):
        assert_same(read(dataset, start, prefetch=prefetch), whole[start:])


@pytest.mark.parametrize("order", [None, MegatronOrder(30)], ids=["native", "megatron"])
@pytest.mark.parametrize("cut", [0, 3, 6])
def test_a_run_goes_on_with_another_number_of_hosts(make_corpus, order, cut):
    """In the middle of epochs, of a blend that changes at sample 13, within a step."""
    source = np.random.default_rng(1)
    members = []
    for name in "ab":
        texts = [source.integers(0, 99, source.integers(1, 40)) for _ in range(7)]
        corpus = IndexedDataset(make_corpus(texts, name))
        members.append(GptDataset([corpus], "1", 0, 8, 100, 7, order=order))
    phases = [Phase(0, (0, 1), (0.7, 0.3)), Phase(13, (1,), (1.0,))]
    blend = Blend(members, phases, 60)
    whole = dict(read(blend))
    for begin, end, hosts in ((0, cut, 2), (cut, STEPS, 4)):
        parts = [dict(read(blend, begin, Rows(host, hosts))) for host in range(hosts)]
        for step in range(begin, end):
            for name, values in whole[step].items():
                for host, part in enumerate(parts):
                    assert np.array_equal(part[step][name], values[host::hosts])


def test_worker_processes_change_nothing_and_end(dataset):
    start = 3
    loader = Loader(dataset, growing, Rows(1), range(start, 10**6), num_workers=2)
    some = [next(loader) for _ in range(start, STEPS)]
    assert_same(some, read(dataset, start, Rows(1)))
    assert multiprocessing.active_children()
    loader.close()
    loader.close()
    assert not multiprocessing.active_children()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_workers_outlive_signals_to_the_group_but_not_their_parent(tmp_path):
    prefix = str(tmp_path / "x")
    with IndexedWriter(prefix, 100) as writer:
        writer.add_document(np.arange(100))
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, signal, sys\n"
        "from maxmeg.data.samples.gpt import GptDataset\n"
        "from maxmeg.data.corpus.indexed import IndexedDataset\n"
        "from maxmeg.data.loader import Loader, all_rows\n"
        "def steps(n): return n, 1\n"
        "if __name__ == '__main__':\n"
        "    data = GptDataset([IndexedDataset(sys.argv[1])], '1', 0, 8, 100, 7)\n"
        "    loader = Loader(data, steps, all_rows, range(10**6), num_workers=2)\n"
        "    next(loader), next(loader)  # one from each: both have started\n"
        "    workers = [p.pid for p in multiprocessing.active_children()]\n"
        "    for number in (signal.SIGINT, signal.SIGTERM):\n"
        "        for pid in workers: os.kill(pid, number)\n"
        "    for n in range(2, 30): assert next(loader)[0] == n\n"
        "    print(*workers, flush=True)\n"
        "    if sys.argv[2] == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for end, code in (("kill", -signal.SIGKILL), ("return", 0)):
        command = [sys.executable, str(script), prefix, end]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, capture_output=True, timeout=120, env=environment)
        assert run.returncode == code, run.stderr.decode()
        pids = run.stdout.split()
        assert len(pids) == 2
        wait_until(lambda: not any(is_running(pid.decode()) for pid in pids))  # noqa: B023


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Large:
    """Batches that fill a pipe many times over; those from `last` on are never made."""

    vocab_size, sequence_length, num_tokens, samples_per_epoch = 9, 8, 8, 1

    def __init__(self, last: int = 10**9) -> None:
        self.last = last

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        while indices[0] >= self.last:
            time.sleep(1)
        return {"tokens": np.full((1, 1 << 18), indices[0])}


def step_by_step(step: int) -> tuple[int, int]:
    return step, 1


@pytest.mark.parametrize("moment", ["within a batch", "before a batch"])
def test_a_killed_worker_is_reported_at_once(moment):
    """Killed while the pipe holds half a batch, or while it makes one: the rest never comes."""
    data = Large() if moment == "within a batch" else Large(2)
    before = set(multiprocessing.active_children())
    with Loader(data, step_by_step, all_rows, range(10**6), 2, 1) as loader:
        for step in range(2):
            assert next(loader)[1]["tokens"][0, -1] == step
        if moment == "within a batch":
            wait_until(lambda: loader.ready)  # one is here, the next in the pipe
            time.sleep(0.2)
        for process in set(multiprocessing.active_children()) - before:
            os.kill(process.pid, signal.SIGKILL)
        told = []

        def read_on():
            try:
                for _ in range(8):
                    next(loader)
            except ChildProcessError as error:
                told.append(str(error))

        thread = threading.Thread(target=read_on, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert told and "by signal 9 (SIGKILL)" in told[0] and "data.num_workers" in told[0]
    assert not set(multiprocessing.active_children()) - before


def test_waiting_for_data_is_distinguished_from_waiting_for_steps(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Large, "batch", lambda _, indices: gate.wait() and {"tokens": indices})
    with Loader(Large(), step_by_step, all_rows, range(9), prefetch=1) as loader:
        threading.Timer(0.05, gate.set).start()  # the step is there before the batch
        next(loader)
        assert loader.waited > 0
        for _ in range(4):  # the batch is there before the step
            wait_until(lambda: loader.ready)
            next(loader)
            assert loader.waited == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_reach_the_caller(make_corpus, num_workers):
    corpus = IndexedDataset(make_corpus([np.arange(200)]))
    dataset = GptDataset([corpus], "1", 0, 8, 100, 7)
    with pytest.raises(ValueError, match="not in the vocabulary"):
        read(dataset, num_workers=num_workers)


def test_evaluation_reads_the_same_batches_each_time(dataset):
    one, two = list(eval_batches(dataset, 3, 4)), list(eval_batches(dataset, 3, 4))
    assert len(one) == 3
    assert_same(list(enumerate(one)), list(enumerate(two)))
    later = list(eval_batches(dataset, 2, 4, first=4))
    assert_same(list(enumerate(later)), list(enumerate(one[1:])))
    half = list(eval_batches(dataset, 3, 4, Rows(1)))
    assert np.array_equal(half[2]["tokens"], one[2]["tokens"][1::2])


def test_the_default_corpus_is_made_once(tmp_path, caplog):
    caplog.set_level("INFO")
    config = Config()
    with pytest.raises(ValueError, match=r"no setting names a corpus: set data.paths=PREFIX"):
        open_corpus(config.data, str(tmp_path / "run"))
    config.data.builtin = Builtin.source
    tokenizer, (prefix,) = open_corpus(config.data, str(tmp_path / "run"))
    config.data.builtin = Builtin.none  # a run that an earlier version has begun
    assert prefix.startswith(str(tmp_path / "run" / "data"))
    assert open_corpus(config.data, str(tmp_path / "run"))[1] == [prefix]
    assert caplog.text.count("files of Python's standard library") == 1
    corpus = IndexedDataset(prefix)
    files = source_files()
    assert 5e6 < corpus.num_tokens < 5e7 and len(files) - 5 <= corpus.num_documents <= len(files)
    assert tokenizer.decode(corpus.get(0)) == files[0].read_text("utf-8")
    assert corpus.get(0)[-1] == tokenizer.eod
    valid = build_dataset(config.data, [prefix], tokenizer, 1, config.seed)
    assert valid.samples_per_epoch > config.train.eval_steps * config.train.global_batch_size
