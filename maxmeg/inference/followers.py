"""A command whose engine uses the devices of several processes: process 0 leads, others follow.

Process 0 has the requests and the scheduler. Before each step it sends the arrays that the step
needs to the others, which start the same program with the same arrays. They decide nothing, so that
they cannot decide otherwise, and they wait for a message without using their devices.
"""

import contextlib
import functools
import secrets
import select
import selectors
import signal
import socket
import threading
import time
import typing
from collections.abc import Callable

import jax
import numpy as np

from maxmeg.config.errors import RESTART_CODE, report
from maxmeg.inference.programs import Programs
from maxmeg.processes import multihost
from maxmeg.runtime.faults.peers import leave
from maxmeg.runtime.gpu_environment import set_gpu_environment

ADDRESS = "maxmeg/leader"  # key of process 0's port and the word that the others say there
CONNECT_SECONDS = 300
LOST_SECONDS = 1  # a collective may fail before the lost process is noticed
STOP, UNCHANGED = -1, -1  # in place of a chunk; in place of a number of values


def together(command: Callable[..., typing.Any]) -> Callable[[typing.Any], typing.Any]:
    """Decorate a `command(options, link)`, which all processes of a job call.

    It gets a `Leader` in process 0 and a `Follower` in the others. If one of several processes
    fails or is lost, all of them end at once.
    """

    @functools.wraps(command)
    def run(options: typing.Any) -> typing.Any:
        set_gpu_environment()
        multihost.initialize()
        if multihost.size() == 1:
            return command(options, Leader())
        try:
            link = Follower() if multihost.rank() else Leader()
            result = command(options, link)
            link.close()
            multihost.shutdown()
            return result
        except BaseException as error:  # JAX would wait for the others before it lets Python end
            time.sleep(
                LOST_SECONDS
            )  # if a process was lost, the watching thread reports that first
            leave("", report(error, None, options))

    return run


class Link:
    """A process's TCP connections, by the numbers of the other processes.

    Whatever it does, the process ends when one of them is closed before `close`.
    """

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self.connections, self._is_closed = connections, False
        for number, connection in connections.items():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._watch, args=(number, connection), daemon=True).start()

    def close(self) -> None:
        self._is_closed = True

    def _watch(self, number: int, connection: socket.socket) -> None:
        closing = select.poll()
        closing.register(connection, select.POLLRDHUP)
        closing.poll()
        if not self._is_closed:
            leave(f"error: process {number} has ended or cannot be reached", RESTART_CODE)


class Leader(Link):
    """Process 0. Without other processes it sends nothing."""

    def __init__(self) -> None:
        super().__init__(accepted(multihost.size() - 1))
        if self.connections:  # JAX has a handler, which would ignore a signal before the first step
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def lead(self, programs: Programs) -> None:
        """Send the arrays of each step of `programs` from now on."""
        if self.connections:
            self._arrays = idle_arrays(programs)
            programs.before_step, programs.leads = self._send, True

    def close(self) -> None:
        """End the others."""
        super().close()
        for connection in self.connections.values():
            connection.sendall(np.array([STOP, UNCHANGED, UNCHANGED], np.int32).tobytes())

    def _send(self, chunk: int, packed: np.ndarray, changes: np.ndarray | None) -> None:
        """Send where an array differs from the last one of its kind, and the values there."""
        arrays, head, parts = self._arrays[chunk], [chunk], []
        for i, array in enumerate((packed, changes)):
            if array is None:
                head.append(UNCHANGED)
                continue
            places = np.flatnonzero(array != arrays[i]).astype(np.int32)
            head.append(len(places))
            parts += [places.tobytes(), array.flat[places].tobytes()]
            arrays[i] = array
        message = b"".join([np.array(head, np.int32).tobytes(), *parts])
        for connection in self.connections.values():
            connection.sendall(message)


class Follower(Link):
    """Another process. Signals do not end it: process 0 gets them too, and may serve on a while."""

    def __init__(self) -> None:
        super().__init__({0: connected()})
        self._file = self.connections[0].makefile("rb")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def follow(self, programs: Programs) -> None:
        """Start the steps that process 0 starts, until it ends."""
        arrays, results = idle_arrays(programs), ()
        while (head := self._read(3).tolist())[0] != STOP:
            chunk, *counts = head
            for i, count in enumerate(counts):
                if count != UNCHANGED:
                    places, values = self._read(count), self._read(count)
                    arrays[chunk][i] = arrays[chunk][i].copy()  # a step may still use the last one
                    arrays[chunk][i].flat[places] = values
            packed, changes = arrays[chunk]
            changes = None if counts[1] == UNCHANGED else changes
            before, results = results, programs.start(chunk, packed, changes)
            jax.block_until_ready(before)  # an error of the device raises here
        self.close()

    def _read(self, count: int) -> np.ndarray:
        data = self._file.read(4 * count)
        while len(data) < 4 * count:  # the connection is closed, and the process about to end
            threading.Event().wait()
        return np.frombuffer(data, np.int32)


def idle_arrays(programs: Programs) -> dict[int, list[np.ndarray]]:
    """The arrays of steps without requests, by the chunk of the step."""
    chunks = (0, programs.chunk)
    return {n: [programs.packed({}, n), programs.changes({}, n)] for n in chunks}


def accepted(count: int) -> dict[int, socket.socket]:
    """Connections to `count` other processes, by their numbers."""
    connections: dict[int, socket.socket] = {}
    if not count:
        return connections
    dual = socket.has_dualstack_ipv6()
    family, word = socket.AF_INET6 if dual else socket.AF_INET, secrets.token_hex(16)
    with (
        socket.create_server(("", 0), family=family, backlog=count, dualstack_ipv6=dual) as server,
        selectors.DefaultSelector() as selector,
    ):
        multihost.store().key_value_set(ADDRESS, f"{server.getsockname()[1]} {word}")
        selector.register(server, selectors.EVENT_READ)
        end = time.monotonic() + CONNECT_SECONDS
        while len(connections) < count:
            events = selector.select(end - time.monotonic())
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"{count - len(connections)} of {count} processes have not connected to "
                    f"process 0 within {CONNECT_SECONDS} s: let the hosts of a job connect to all "
                    "ports of each other"
                )
            for key, _ in events:
                if key.fileobj is server:
                    connection, _ = server.accept()
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ, connection)
                    continue
                selector.unregister(key.data)
                if (number := hello(key.data, word)) is None:
                    key.data.close()
                else:
                    connections[number] = key.data
        for key in [*selector.get_map().values()]:
            (key.data or server).close()
    return connections


def hello(connection: socket.socket, word: str) -> int | None:
    """The number of the process that has connected; None for anything but the word and a number."""
    with contextlib.suppress(OSError, ValueError):
        answer, number = connection.recv(99).decode("ascii").split()
        if secrets.compare_digest(answer, word):
            return int(number)
    return None


def connected() -> socket.socket:
    """A connection to process 0. ConnectionError if its host cannot be reached."""
    address = multihost.store().blocking_key_value_get(ADDRESS, 1000 * CONNECT_SECONDS)
    port, word = address.split()
    try:
        connection = socket.create_connection((multihost.leader_host(), int(port)), CONNECT_SECONDS)
    except OSError as error:
        raise ConnectionError(
            f"process 0 cannot be reached at {multihost.leader_host()}:{port} ({error}): "
            "let the hosts of a job connect to all ports of each other"
        ) from None
    connection.sendall(f"{word} {multihost.rank()}\n".encode())
    return connection
