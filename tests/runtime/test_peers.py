"""What processes conclude from each other's heartbeats, with a key-value store in memory."""

import json
import time
import types

import pytest
from jax.errors import JaxRuntimeError
from key_value_store import KeyValueStore

from maxmeg.config.errors import RESTART_CODE
from maxmeg.config.schema import Config
from maxmeg.processes import multihost
from maxmeg.runtime.faults import peers
from maxmeg.runtime.faults.peers import Failure, Peers, ending_together


class Rank:
    """A process's Peers with a clock that is set by hand; `ended`: why it left."""

    def __init__(self, monkeypatch, store, rank, host=""):
        monkeypatch.setattr(multihost, "store", lambda: store)
        monkeypatch.setattr(multihost, "rank", lambda: rank)
        monkeypatch.setattr(multihost, "size", lambda: 2)
        if host:
            monkeypatch.setattr(peers, "_process_space", lambda: host)
        self.store = store
        self.clock, self.ended = types.SimpleNamespace(now=0.0, stalled=0.0), []
        status = {"phase": "training", "dispatched": 7}
        self.peers = Peers(60, self.clock, lambda: status, self.ended.append)  # pyright: ignore

    def after(self, seconds: float) -> list[str]:
        """Advance the clock; what it leaves for."""
        self.clock.now += seconds
        while not self.store.silent.is_set() and self.peers._answered < self.clock.now:
            time.sleep(0.001)  # until the thread has heard of the coordinator
        self.peers.check()
        return [failure.line for failure in self.ended]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(peers, "INTERVAL", 0.01)
    monkeypatch.setattr(peers, "GRACE", 0.01)
    monkeypatch.setattr(peers.socket, "gethostname", lambda: "node")


def heard(rank: Rank, other: int) -> None:
    """Wait until a heartbeat of the other process has arrived."""
    for _ in range(1000):
        if other in rank.peers.statuses:
            return
        time.sleep(0.01)
    raise AssertionError(f"no heartbeat of process {other}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_on_another_host_is_dead_when_its_heartbeats_stop(monkeypatch, short, rank):
    store = KeyValueStore()
    other = 1 - rank
    status = {"process": other, "host": "far", "pid": 5, "space": "there", "began": "1", "beat": 1}
    status |= {"phase": "saving", "dispatched": 3}
    store.values[f"{peers.ALIVE}{other}/beat"] = json.dumps(status)
    here = Rank(monkeypatch, store, rank)
    heard(here, other)
    assert not here.after(59)
    assert here.after(2) == [
        f"process {other} (far, pid 5; last heartbeat: saving, step 3) has not answered for 61 s: "
        "it was killed or stopped, or its host or network is down"
    ]
    published = Failure(*json.loads(store.values[peers.FAILURE]))
    assert published == here.ended[0] and published.code == RESTART_CODE and published.stacks


def test_a_coordinator_that_does_not_answer_is_named(monkeypatch, short):
    store = KeyValueStore()
    store.silent.set()
    here = Rank(monkeypatch, store, 1)
    assert not here.after(59)
    assert "process 0 and the coordinator there do not answer for 61 s" in here.after(2)[0]


def test_a_hang_names_the_processes_that_are_silent_or_behind(monkeypatch, short):
    store = KeyValueStore()
    status = {"process": 1, "host": "far", "pid": 5, "space": "there", "began": "1", "beat": 1}
    status |= {"phase": "training", "dispatched": 6}
    store.values[f"{peers.ALIVE}1/beat"] = json.dumps(status)
    here = Rank(monkeypatch, store, 0)
    heard(here, 0)
    process = "process 1 (far, pid 5; last heartbeat: training, step 6)"
    line = f"hang; no heartbeat from: {process}; behind: {process}"
    assert here.peers.with_laggards(Failure(0, "hang", RESTART_CODE)).line == line
    here.peers.close()
    assert not here.peers._thread.is_alive() and not here.ended


def test_a_published_failure_ends_the_others(monkeypatch, short):
    store = KeyValueStore()
    here = Rank(monkeypatch, store, 1)
    failure = Failure(0, "process 0 failed: KeyError: 'a'", 1)
    peers.publish(failure)
    here.peers._thread.join()
    assert here.ended == [failure]
    peers.publish(Failure(1, "later", 2))
    assert Failure(*json.loads(store.values[peers.FAILURE])) == failure


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (KeyError("lost"), 1, "KeyError: 'lost'"),
        (ValueError("raise it"), 2, "error: raise it"),
        (SystemExit(3), 3, ""),
        (JaxRuntimeError("Gloo AllReduce timed out"), RESTART_CODE, "Gloo AllReduce timed out"),
        (ValueError("/data/igloo is empty"), 2, "error: /data/igloo is empty"),
    ],
)
def test_an_exception_is_told_to_all_processes(monkeypatch, capsys, error, code, shown):
    class Left(Exception):
        pass

    def leave(line, code):
        raise Left(line, code)

    def main(config):
        raise error

    store = KeyValueStore()
    monkeypatch.setattr(peers, "leave", leave)
    monkeypatch.setattr(multihost, "rank", lambda: 3)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # for the cause of a lost connection
    with pytest.raises(type(error)):  # alone, it is raised
        ending_together(main)(Config())
    monkeypatch.setattr(multihost, "store", lambda: store)
    with pytest.raises(Left) as left:
        ending_together(main)(Config())
    assert left.value.args == ("", code)
    assert capsys.readouterr().err.strip().endswith(shown)
    text = f"process 3 failed: {type(error).__name__}: {error}"
    assert Failure(*json.loads(store.values[peers.FAILURE])) == Failure(3, text, code)
