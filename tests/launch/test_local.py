"""launch/local.py with real processes."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from maxmeg.processes.coordinator import Coordinator

REPOSITORY = Path(__file__).parents[2]
LAUNCHER = REPOSITORY / "launch" / "local.py"
SECONDS = 240


def launch(program: str, *options: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(program)
    return subprocess.Popen(
        [sys.executable, str(LAUNCHER), *options, "--", sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate()
    return process.returncode, sorted(out.splitlines()), err


def wait_for_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return sorted(process.stdout.readline().strip() for _ in range(count))


def test_two_processes_sum_over_all_their_devices():
    program = """
        import jax
        from maxmeg.processes import multihost
        multihost.initialize()
        multihost.initialize()  # the second call does nothing
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
        x = jax.make_array_from_callback((4,), rows, lambda index: jax.numpy.arange(4.0)[index])
        total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh,
                                      in_specs=jax.P("data"), out_specs=jax.P()))(x)
        print("sum", jax.process_count(), jax.local_device_count(), float(total[0]),
              multihost.is_primary())
        multihost.shutdown()
    """
    code, lines, err = finish(launch(program, "-n", "2", "--devices-per-process", "2"))
    assert code == 0, err
    sums = [line for line in lines if " sum " in line]  # gloo prints too
    assert sums == ["[0] sum 2 2 6.0 True", "[1] sum 2 2 6.0 False"]


def test_one_failure_ends_all_and_its_code_is_returned():
    program = """
        import os, sys, time
        if os.environ["MAXMEG_PROCESS_ID"] == "1":
            print("no such file", file=sys.stderr)
            sys.exit(7)
        time.sleep(600)
    """
    code, _, err = finish(launch(program, "-n", "3", "--grace-seconds", "0.5", "--restarts=3"))
    assert code == 7
    assert "[1] no such file" in err
    assert err.count("rank 1 ended with exit code 7") == 1  # no restart


def test_a_process_that_ignores_sigterm_is_killed_with_its_children():
    program = """
        import os, signal, subprocess, sys, time
        if os.environ["MAXMEG_PROCESS_ID"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print(child.pid)
            time.sleep(600)
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    code, lines, err = finish(launch(program, "-n", "2", "--grace-seconds", "0.5"))
    assert code == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in err
    child = int(lines[0].removeprefix("[0] "))
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"  # gone, or not yet reaped


def test_a_lost_process_restarts_all(tmp_path):
    program = f"""
        import os, pathlib, signal, sys
        rank, attempts = os.environ["MAXMEG_PROCESS_ID"], pathlib.Path({str(tmp_path)!r})
        (attempts / f"{{rank}}-{{len(list(attempts.glob(f'{{rank}}-*')))}}").touch()
        attempt = len(list(attempts.glob(f"{{rank}}-*")))
        if rank == "1" and attempt < 3:
            sys.exit(75) if attempt == 1 else os.kill(os.getpid(), signal.SIGKILL)
        print("attempt", attempt)
    """
    code, lines, err = finish(launch(program, "-n", "2", "--grace-seconds", "0.5", "--restarts=3"))
    assert code == 0 and lines[-1] == "[1] attempt 3"
    assert [line for line in err.splitlines() if line.startswith("launch/local.py")] == [
        "launch/local.py: rank 1 ended with exit code 75",
        "launch/local.py: restart 1 of 3",
        "launch/local.py: rank 1 was killed by SIGKILL",
        "launch/local.py: restart 2 of 3",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_process(number: signal.Signals):
    program = f"""
        import signal, sys, time
        def stop(*_):
            print("saved")
            sys.exit(0)
        signal.signal({int(number)}, stop)
        print("ready")
        time.sleep(600)
    """
    process = launch(program, "-n", "2")
    assert wait_for_lines(process, 2) == ["[0] ready", "[1] ready"]
    process.send_signal(number)
    code, lines, _ = finish(process)
    assert (code, lines) == (0, ["[0] saved", "[1] saved"])


def test_a_signal_that_is_not_handled_is_the_exit_code():
    process = launch("print('ready'); import time; time.sleep(600)", "-n", "1")
    wait_for_lines(process, 1)
    process.terminate()
    assert finish(process)[0] == 128 + signal.SIGTERM


def test_devices_and_gpus_are_divided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    program = "import os; print(os.environ['XLA_FLAGS'], os.environ['CUDA_VISIBLE_DEVICES'])"
    code, lines, err = finish(launch(program, "-n", "2", "--devices-per-process", "3"))
    assert code == 0, err
    assert lines[0] == "[0] --a=1 --xla_force_host_platform_device_count=3 4,5,6,7"
    code, lines, err = finish(launch(program, "-n", "2", "--gpus-per-process", "2"))
    assert code == 0, err
    assert [line.split()[-1] for line in lines] == ["4,5", "6,7"]
    code, _, err = finish(launch(program, "-n", "2", "--gpus-per-process", "3"))
    assert code != 0
    assert "need 6 GPUs" in err and "names 4" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "--", "true"], "not a positive whole number"),
        (["-n", "2"], "command"),
        (["-n", "2", "--", "/no/such/program"], "cannot start '/no/such/program'"),
    ],
)
def test_wrong_use_is_explained(arguments: list[str], message: str):
    done = subprocess.run(
        [sys.executable, str(LAUNCHER), *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ,
    )
    assert done.returncode not in (0, None)
    assert message in done.stderr


def test_a_port_in_use_is_one_line():
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of .*: Address already in use. Choose"):
            Coordinator(f"[::]:{port}", 2, 100, 1)
