"""A server under attack: `python benchmarks/hostile_clients.py --run_dir=RUN [--seconds=300]`.

An honest client asks for a completion again and again, first alone and then while 20 hostile
clients attack the server, five of each kind of `KINDS`. The table shows the honest requests'
seconds and errors, and the server's memory, threads and open files. It exits with 1 if the median
of the honest requests more than doubles, if one fails, or if the server ends. The attackers run at
the lowest priority: in reality they have machines of their own. Further options are those of
maxmeg.serve. Needs maxmeg[serve] and Linux; the run's context should be 1,024 tokens or more.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from serving import NAME, Server, serving

EACH = 5  # clients of each kind
CONNECTIONS = 200  # that each client of the kind "connections" holds
AMBIGUOUS = 'start: s\ns: s s s s | "a" | "aa" | "aaa" |\n'  # more ways to read a text than tokens
LARGE = 7_900_000  # bytes, just below the server's default limit
HONEST = {"model": NAME, "prompt": "def main(", "max_tokens": 400, "ignore_eos": True, "seed": 0}
ROW = "{:>10} {:>8} {:>7} {:>7} {:>7} {:>7} {:>9} {:>8} {:>6}"
NAMES = ("clients", "requests", "failed", "median", "p95", "most", "MiB, most", "threads", "files")


def request(address: tuple[str, int], path: str, body: bytes) -> int:
    """Send a request, read the answer, and return its status."""
    url = f"http://{address[0]}:{address[1]}{path}"
    message = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(message, timeout=120) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def grammars(address: tuple[str, int], seed: int) -> Iterator[int]:
    """Replies that follow an ambiguous grammar; a comment makes each of them new."""
    for number in itertools.count():
        body = {"prompt": "a", "max_tokens": 900, "n": 8, "logit_bias": {"256": -100}}
        body |= {"grammar": f"// {seed} {number}\n{AMBIGUOUS}"}
        yield request(address, "/v1/completions", json.dumps(body).encode())


@functools.cache
def large_bodies() -> list[tuple[str, bytes]]:
    """Bodies of the largest size: one text, many tokens, many lists, one message, many messages."""
    message = {"role": "user", "content": "a" * 8}
    bodies = [
        ("/v1/completions", {"prompt": "a" * LARGE}),
        ("/v1/completions", {"prompt": [7] * (LARGE // 3)}),
        ("/v1/completions", {"prompt": [[7]] * (LARGE // 5)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é" * (LARGE // 6)}]}),
        ("/v1/chat/completions", {"messages": [message] * (LARGE // 45)}),
        ("/tokenize", {"prompt": "a b" * (LARGE // 3)}),
    ]
    return [(path, json.dumps(body).encode()) for path, body in bodies]


def large_prompts(address: tuple[str, int], seed: int) -> Iterator[int]:
    for path, body in itertools.cycle(large_bodies()[seed:] + large_bodies()[:seed]):
        yield request(address, path, body)


def slow_readers(address: tuple[str, int], seed: int) -> Iterator[int]:
    """Streams that nobody reads."""
    body = json.dumps({"prompt": "a", "max_tokens": 1000, "n": 4, "stream": True, "logprobs": 5})
    while True:
        with contextlib.closing(opened(address)) as connection:
            connection.sendall(head("/v1/completions", len(body)) + body.encode())
            time.sleep(20)
        yield 0


def connections(address: tuple[str, int], seed: int) -> Iterator[int]:
    """Connections that send nothing, or a header of a byte a second; closed ones are replaced."""
    kept: list[socket.socket] = []
    slow = b"GET /health HTTP/1.1\r\n" + b"X-Slow: " + b"a" * 10_000
    for second in itertools.count():
        while len(kept) < CONNECTIONS:
            kept.append(opened(address))
        for number, connection in enumerate([*kept]):
            try:
                if number % 2:
                    connection.send(slow[second % len(slow) :][:1])
                elif not connection.recv(1, socket.MSG_DONTWAIT):
                    raise ConnectionError
            except BlockingIOError:
                continue
            except OSError:
                connection.close()
                kept.remove(connection)
        time.sleep(1)
        yield len(kept)


KINDS = {each.__name__: each for each in (grammars, large_prompts, slow_readers, connections)}


def head(path: str, length: int) -> bytes:
    lines = f"POST {path} HTTP/1.1", "Host: a", "Content-Type: application/json"
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()


def opened(address: tuple[str, int]) -> socket.socket:
    """A connection with the smallest buffer for what is received."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    connection.settimeout(60)
    connection.connect(address)
    return connection


def attack(kind: str, address: tuple[str, int]) -> None:
    """Run EACH clients of a kind until this process is ended, and print what they got."""
    os.nice(19)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    counts: Counter = Counter()

    def run(seed: int) -> None:
        while True:
            try:
                for answer in KINDS[kind](address, seed):
                    counts[answer] += 1
            except Exception as error:
                counts[type(error).__name__] += 1
                time.sleep(0.1 + random.random() / 10)

    large_bodies()
    print("ready", flush=True)
    for seed in range(EACH):
        threading.Thread(target=run, args=(seed,), daemon=True).start()
    sys.stdin.read()  # until the benchmark closes it
    print(f"  {kind}: {dict(counts)}", flush=True)


@contextlib.contextmanager
def attacked(kinds: list[str], address: tuple[str, int]) -> Iterator[None]:
    """Hostile clients while the block runs."""
    command = [sys.executable, __file__, f"--address={address[0]}:{address[1]}"]
    started = [
        subprocess.Popen(
            [*command, f"--kinds={kind}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in kinds
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield
    finally:
        for process in started:
            print(process.communicate(timeout=60)[0], end="")


def state(server: Server) -> tuple[float, int, int]:
    """MiB of memory, threads and open files of the server's process."""
    folder = Path(f"/proc/{server.process.pid}")
    lines = (folder / "status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    memory = int(values["VmRSS"].split()[0]) / 1024
    return memory, int(values["Threads"]), len(os.listdir(folder / "fd"))


def measured(server: Server, address: tuple[str, int], seconds: float) -> tuple[list, float, int]:
    """(cells of the table, median of the honest requests, number of failed ones)."""
    times, failed, most = [], 0, np.zeros(3)
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.process.poll() is None:
        start = time.monotonic()
        try:
            failed += request(address, "/v1/completions", json.dumps(HONEST).encode()) != 200
        except OSError:
            failed += 1
        times.append(time.monotonic() - start)
        most = np.maximum(most, state(server))
        time.sleep(0.1)
    quantiles = np.percentile(times, (50, 95, 100))
    cells = [len(times), failed, *(f"{value:.2f}" for value in quantiles)]
    return [*cells, *(f"{value:.0f}" for value in most)], float(quantiles[0]), failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run_dir", default="")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of hostile clients")
    parser.add_argument("--address", default="", help="of the server, for the attackers' processes")
    options, flags = parser.parse_known_args()
    kinds = [*filter(None, options.kinds.split(","))]
    if options.address:
        host, port = options.address.split(":")
        attack(options.kinds, (host, int(port)))
        return 0
    print(ROW.format(*NAMES))
    with serving(options.run_dir, flags) as server:
        host, port = server.url.removeprefix("http://").split(":")
        address = host, int(port)
        measured(server, address, 2)  # warm
        cells, alone, _ = measured(server, address, min(options.seconds, 20))
        print(ROW.format("none", *cells), flush=True)
        with attacked(kinds, address):
            time.sleep(5)
            cells, median, failed = measured(server, address, options.seconds)
            print(ROW.format(len(kinds) * EACH, *cells), flush=True)
        ended = server.process.poll() is not None
        time.sleep(5)
        if not ended:
            print(ROW.format("afterwards", *measured(server, address, 5)[0]))
    print(f"median {median / alone:.2f} times as long, {failed} failed, server ended: {ended}")
    return int(median > 2 * alone or failed > 0 or ended)


if __name__ == "__main__":
    raise SystemExit(main())
