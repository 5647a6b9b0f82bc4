"""Start N processes of one program on this machine, as a cluster's launcher would.

    python launch/local.py -n 2 --devices-per-process 4 -- python -m maxmeg.train ...

Each line of output is prefixed with [rank]. SIGINT and SIGTERM are passed on; when one process
fails the others are ended, and its exit code (128 + N for signal N) is returned.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, TextIO

POLL_SECONDS = 0.05


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and run it; returns the exit code."""
    options = _parse(arguments)
    port = _free_port()
    environments = [_environment(options, rank, port) for rank in range(options.num_processes)]
    return run(options.command, environments, options.grace_seconds)


def run(
    command: Sequence[str], environments: Sequence[dict[str, str]], grace_seconds: float
) -> int:
    """Run the command once per environment, until all have ended or one has failed."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    write = threading.Lock()
    processes: list[subprocess.Popen[bytes]] = []
    pumps: list[threading.Thread] = []
    try:
        for rank, environment in enumerate(environments):
            process = _start(command, environment)
            processes.append(process)
            for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                pump = threading.Thread(target=_copy_lines, args=(source, sink, rank, write))
                pump.start()
                pumps.append(pump)
        code = _wait(processes, received)
    finally:  # also when a process could not be started
        _end(processes, grace_seconds)
        for pump in pumps:
            pump.join()
    return code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/local.py",
        usage="%(prog)s -n N [options] -- COMMAND ...",
        description="Start N processes of one program on this machine.",
    )
    parser.add_argument("-n", "--num-processes", type=_positive, required=True, metavar="N")
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument(
        "--devices-per-process", type=_positive, metavar="K", help="K virtual CPU devices each"
    )
    devices.add_argument(
        "--gpus-per-process", type=_positive, metavar="K", help="K of this machine's GPUs each"
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="time between SIGTERM and SIGKILL for the others when one has failed (default: 10)",
    )
    parser.add_argument("command", nargs="+", help="program and arguments, after --")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _environment(options: argparse.Namespace, rank: int, port: int) -> dict[str, str]:
    environment = dict(
        os.environ,
        MAXMEG_COORDINATOR=f"127.0.0.1:{port}",
        MAXMEG_NUM_PROCESSES=str(options.num_processes),
        MAXMEG_PROCESS_ID=str(rank),
        PYTHONUNBUFFERED="1",  # lines appear when they are printed
    )
    if options.devices_per_process:
        name = "--xla_force_host_platform_device_count"
        flags = [f for f in environment.get("XLA_FLAGS", "").split() if not f.startswith(name)]
        environment["XLA_FLAGS"] = " ".join([*flags, f"{name}={options.devices_per_process}"])
        environment["JAX_PLATFORMS"] = "cpu"
    if options.gpus_per_process:
        share = options.gpus_per_process
        needed = share * options.num_processes
        listed = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(needed))))
        gpus = [name for name in listed.split(",") if name]
        if len(gpus) < needed:
            raise SystemExit(
                f"{options.num_processes} processes x {share} GPUs need {needed} GPUs, but "
                f"CUDA_VISIBLE_DEVICES={listed!r} names {len(gpus)}: lower -n or --gpus-per-process"
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank * share : (rank + 1) * share])
    return environment


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this launcher alone, which passes it on
        )
    except OSError as error:
        message = f"cannot start {command[0]!r}: {error.strerror}: check the command after --"
        raise SystemExit(message) from error


def _copy_lines(source: IO[bytes], sink: TextIO, rank: int, write: threading.Lock) -> None:
    for line in source:
        text = line.decode(errors="replace").rstrip("\r\n")
        with write:
            sink.write(f"[{rank}] {text}\n")
            sink.flush()


def _wait(processes: Sequence[subprocess.Popen[bytes]], received: list[int]) -> int:
    """Pass signals on until a process fails (returns its code) or all have succeeded (0)."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return failed if failed > 0 else 128 - failed
        if all(code == 0 for code in codes):
            return 0
        while received:
            number = received.pop(0)
            for process in processes:
                process.send_signal(number)
        time.sleep(POLL_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]], grace_seconds: float) -> None:
    """SIGTERM to those still running; after the grace, SIGKILL to them and all they started."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(POLL_SECONDS)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
