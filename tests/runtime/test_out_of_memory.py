"""Out of memory ends as one line, with the planner's table and what saves memory."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from maxmeg import evaluate, generate, train
from maxmeg.config.architectures import use_architecture
from maxmeg.config.flags import run_command
from maxmeg.config.model import DType
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.planning.remedies import planned_memory
from maxmeg.runtime.faults import out_of_memory
from maxmeg.runtime.faults.out_of_memory import (
    check_memory,
    explains_out_of_memory,
    host_memory,
    is_out_of_memory,
    requested_bytes,
)

ROOT = Path(__file__).parents[2]
GIB = 2**30
POOL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB (rounded to 134217728)."
GPU = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", 16 * GIB),
        (POOL, 12.5 * GIB),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B)", 2 * GIB),
        ("NCCL operation failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory", None),
    ],
)
def test_memory_errors_of_devices_are_recognized(text, size):
    error = jax.errors.JaxRuntimeError(text)
    assert is_out_of_memory(error) and requested_bytes(text) == size
    assert requested_bytes("Unable to allocate 64.0 GiB for an array") == 64 * GIB


def test_other_errors_stay_as_they_are():
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded")

    def command(_):
        raise error

    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        explains_out_of_memory("lower --batch")(command)(None)
    assert raised.value is error


@pytest.fixture
def gpus(monkeypatch):
    """This process believes that it has eight H100s."""
    monkeypatch.setattr(jax, "devices", lambda: [GPU])
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(out_of_memory, "memory_limit", lambda: int(72.8 * GIB))


def explained(monkeypatch, config: Config, error: Exception) -> list[str]:
    """Lines of the error of `train` where opening the run raises `error`."""

    def fail(*_):
        raise error

    monkeypatch.setattr(train, "Run", fail)
    monkeypatch.setattr(sys, "argv", ["maxmeg train", "--config=llama3-8b"])
    with pytest.raises(MemoryError) as raised:
        train.main(config)
    return str(raised.value).splitlines()


def test_a_run_says_where_memory_goes_and_what_saves_it(monkeypatch, tmp_path, gpus):
    config = use_architecture(Config(run_dir=str(tmp_path)), "llama3-8b")
    config.train.global_batch_size, config.parallel.data = 128, 8
    lines = explained(monkeypatch, config, jax.errors.JaxRuntimeError(POOL))
    assert lines[0] == (
        "out of memory on NVIDIA H100 80GB HBM3, which has a memory pool of 72.8 GiB: "
        "12.5 GiB requested"
    )
    total = sum((planned_memory(config, 8) or {}).values()) / GIB
    assert any(line.split() == ["total", f"{total:.2f}"] for line in lines)
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(flags) == [
        "--model.recompute=full",
        "--parallel.data=1",
        "--train.micro_batch_size=1",
    ]
    assert lines[-1].endswith("maxmeg plan --config=llama3-8b --hardware=h100x8 --search")
    config.model.mtp.num_layers = 1  # is not planned
    lines = explained(monkeypatch, config, jax.errors.JaxRuntimeError(POOL))
    assert len(lines) == 3 and "train.micro_batch_size=1" in lines[1]
    monkeypatch.setattr(out_of_memory.multihost, "is_primary", lambda: False)
    lines = explained(monkeypatch, config, jax.errors.JaxRuntimeError(POOL))
    assert len(lines) == 2 and "--search" in lines[1]
    lines = explained(monkeypatch, config, MemoryError("Unable to allocate 64.0 GiB for an array"))
    assert len(lines) == 1 and lines[0].startswith("out of memory on the host, which has ")
    assert lines[0].endswith("of memory: 64.0 GiB requested")


@pytest.mark.parametrize(
    ("command", "flag", "named"),
    [(generate, "--prompt=a", "--batch,"), (evaluate, "--limit=0", "--batch_size,")],
    ids=["generate", "evaluate"],
)
def test_other_commands_say_one_line(monkeypatch, capsys, gpus, command, flag, named):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(POOL)

    monkeypatch.setattr(command, "load_chosen", fail)
    with pytest.raises(SystemExit) as ended:
        run_command(command.main, command.Options, False, ["command", flag])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: out of memory on NVIDIA H100")
    assert named in error and "--dtype=bfloat16" in error and "--tensor" in error


def test_a_run_on_cpus_that_does_not_fit_is_refused_before_it_begins(monkeypatch):
    config = use_architecture(Config(), "llama3-8b")
    sizes = [
        sum((planned_memory(each, jax.device_count()) or {}).values())
        for each in (config, with_fields(config, {"model.dtype": DType.float32}))
    ]
    planned = max(sizes)  # bfloat16's: XLA computes it in float32 here
    assert config.model.dtype is DType.bfloat16 and planned == sizes[0] > sizes[1]
    monkeypatch.setattr(out_of_memory, "host_memory", lambda: jax.device_count() * planned)
    check_memory(config)
    monkeypatch.setattr(out_of_memory, "host_memory", lambda: jax.device_count() * planned - 1)
    with pytest.raises(MemoryError, match=r"a step needs about [\d,.]+ [GT]iB, by the planner"):
        check_memory(config)


@pytest.mark.slow
def test_a_real_run_out_of_memory(tmp_path):
    settings = {
        "run_dir": tmp_path,
        "data.num_workers": 1,
        "model.num_layers": 1,
        "model.mlp.ffn_size": 8_000_000,  # arrays of 3.8 GiB
    }
    command = [sys.executable, "-m", "maxmeg.train", "--config=gpt"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    limit = min(8 * GIB, host_memory())
    limited = ["sh", "-c", f'ulimit -v {limit // 1024}; exec "$@"', "sh", *command]
    environment = {**os.environ, "XLA_FLAGS": ""}  # one device
    done = subprocess.run(limited, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stderr[done.stderr.index("error: ") :].splitlines()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    there_is = f"error: out of memory on the host, which has {limit / GIB:.1f} GiB of memory: "
    assert re.fullmatch(re.escape(there_is) + r"\d+\.\d GiB requested", lines[0])
    assert lines[1].startswith("memory per device, estimated")
    assert any("--train.micro_batch_size=1 " in line for line in lines)
    assert "--config.model.mlp.ffn_size=8000000" in lines[-1] and lines[-1].endswith("--search")
    assert "compiled" not in done.stdout  # the planner knows it before
