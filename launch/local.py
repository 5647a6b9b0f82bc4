"""Start N processes of one program on this machine, as a cluster's launcher would.

    python launch/local.py -n 2 --devices-per-process 4 -- python -m maxmeg.train ...

Each line of output is prefixed with [rank]. SIGINT and SIGTERM are passed on. When one process
fails, its rank and how it ended are printed, the others are ended, and its exit code (128 + N for
signal N) is returned. With --restarts=N all are started again, up to N times, when a process was
killed by a signal or ended with code 75 (a hang or a lost process; see
maxmeg/runtime/faults/watchdog.py): a training run goes on from its newest checkpoint.
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
RESTART_CODE = 75  # as in maxmeg/config/errors.py


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and run it; returns the exit code."""
    options = _parse(arguments)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    for attempt in range(options.restarts + 1):
        code = run(options, signals)
        if signals or not asks_for_restart(code) or attempt == options.restarts:
            break
        _say(f"restart {attempt + 1} of {options.restarts}")
    return code


def asks_for_restart(code: int) -> bool:
    """Whether a hang, a lost process or a crash caused the exit code: no error of the user's."""
    on_purpose = (128 + signal.SIGINT, 128 + signal.SIGTERM)
    return code == RESTART_CODE or (code > 128 and code not in on_purpose)


def run(options: argparse.Namespace, signals: list[int]) -> int:
    """Run the command once per rank, until all processes have ended or one has failed.

    `signals` fills up with the signals that this launcher receives. Returns the exit code.
    """
    port = _free_port()
    environments = [_environment(options, rank, port) for rank in range(options.num_processes)]
    write = threading.Lock()
    processes: list[subprocess.Popen[bytes]] = []
    pumps: list[threading.Thread] = []
    try:
        for rank, environment in enumerate(environments):
            process = _start(options.command, environment)
            processes.append(process)
            for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                pump = threading.Thread(target=_copy_lines, args=(source, sink, rank, write))
                pump.start()
                pumps.append(pump)
        code = _wait(processes, signals)
    finally:  # also when a process could not be started
        _end(processes, options.grace_seconds)
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
        help="when one has failed, time for the others to end by themselves before SIGTERM, and "
        "again between SIGTERM and SIGKILL (default: 10)",
    )
    parser.add_argument(
        "--restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start all again up to N times after a hang or a killed process (default: 0)",
    )
    parser.add_argument("command", nargs="+", help="program and arguments, after --")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
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
        num_gpus = share * options.num_processes
        ids = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))
        gpus = [name for name in ids.split(",") if name]
        if len(gpus) < num_gpus:
            raise SystemExit(
                f"{options.num_processes} processes x {share} GPUs need {num_gpus} GPUs, but "
                f"CUDA_VISIBLE_DEVICES={ids!r} names {len(gpus)}: lower -n or --gpus-per-process"
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


def _wait(processes: Sequence[subprocess.Popen[bytes]], signals: list[int]) -> int:
    """Pass signals on until a process fails (returns its code) or all have succeeded (0)."""
    passed_on = len(signals)
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                _say(f"rank {rank} {_cause(code)}")
                return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        for number in signals[passed_on:]:
            for process in processes:
                process.send_signal(number)
            passed_on += 1
        time.sleep(POLL_SECONDS)


def _cause(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


def _say(text: str) -> None:
    print(f"launch/local.py: {text}", file=sys.stderr, flush=True)


def _end(processes: Sequence[subprocess.Popen[bytes]], grace_seconds: float) -> None:
    """Give processes time to end by themselves, then SIGTERM, then SIGKILL to all they started."""
    if not _ended(processes, grace_seconds):
        for process in processes:
            if process.poll() is None:
                process.terminate()
        _ended(processes, grace_seconds)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ended(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Wait up to `seconds` until no process runs any more."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
