"""How the processes of an engine find each other."""

import contextlib
import socket
import threading

import pytest
from key_value_store import KeyValueStore

from maxmeg.inference import followers
from maxmeg.processes import multihost

STRANGERS = 40  # unknown connections; handled one after another, each would delay startup by 10 s


@pytest.mark.timeout(120)
def test_strangers_do_not_hold_the_start(monkeypatch):
    store, connections = KeyValueStore(), {}
    monkeypatch.setattr(multihost, "store", lambda: store)
    monkeypatch.setattr(multihost, "leader_host", lambda: "localhost")
    monkeypatch.setattr(multihost, "rank", lambda: 2)
    thread = threading.Thread(target=lambda: connections.update(followers.accepted(1)))
    thread.start()
    port, word = store.blocking_key_value_get(followers.ADDRESS, 60_000).split()
    with contextlib.ExitStack() as stack:
        for i in range(STRANGERS):
            stranger = stack.enter_context(socket.create_connection(("localhost", int(port))))
            for said in (b"", b"ha\xe9 2\n", b"0" * len(word) + b" 1\n")[: i % 4]:
                stranger.sendall(said)
        stack.enter_context(followers.connected())
        thread.join()
    assert connections.keys() == {2}
    connections[2].close()


def test_processes_that_do_not_connect_are_counted(monkeypatch):
    monkeypatch.setattr(multihost, "store", KeyValueStore)
    monkeypatch.setattr(followers, "CONNECT_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="1 of 1 processes have not connected to process 0"):
        followers.accepted(1)
