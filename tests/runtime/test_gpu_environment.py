"""GPUs before JAX starts: their memory pool, where the user's setting wins, and their absence."""

import os
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jaxlib import xla_client
from layouts import mesh_of, tiny, tiny_abstract

from maxmeg import evaluate, generate, plan, train
from maxmeg.config.mixers import AttentionBackend
from maxmeg.config.schema import Config
from maxmeg.ops.attention import cudnn as attention_cudnn
from maxmeg.ops.backend import Device
from maxmeg.planning.hardware import parse_cluster
from maxmeg.runtime import determinism, platform
from maxmeg.runtime import gpu_environment as gpu_environment_module
from maxmeg.runtime.gpu_environment import (
    AT_ONCE,
    COMBINED,
    MEMORY_FRACTION,
    SLOP,
    SLOP_PERCENT,
    compiler_options,
    generation_of,
    gpu_environment,
    is_known,
    memory_fraction,
    recorded_environment,
    set_gpu_environment,
    user_flags,
)

NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
OURS = {NAMES[0]: str(MEMORY_FRACTION)}


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("NVIDIA A100-SXM4-80GB", "Ampere"),
        ("NVIDIA H100 80GB HBM3", "Hopper"),
        ("NVIDIA B200", "Blackwell"),
        ("NVIDIA L40S", ""),
        ("Tesla V100-SXM2-16GB", ""),
    ],
)
def test_generation_of_a_gpu(name, generation):
    assert generation_of([name] * 8) == generation
    assert generation_of([name, "Another"]) == ""


@pytest.mark.parametrize(
    ("generation", "user", "added", "users"),
    [
        ("Hopper", {}, OURS | {QUEUE: "1"}, []),
        ("Blackwell", {}, OURS, []),
        ("", {}, OURS, []),
        ("Hopper", {QUEUE: "8"}, OURS, [f"{QUEUE}=8"]),
        ("", {NAMES[0]: "0.5"}, {}, [f"{NAMES[0]}=0.5"]),
        ("", {NAMES[1]: "0.5"}, {}, [f"{NAMES[1]}=0.5"]),
        ("", {"XLA_FLAGS": f"--a=1 --{COMBINED}=7"}, OURS, [f"--{COMBINED}=7"]),
        ("", {"XLA_FLAGS": f"--{AT_ONCE}=1 --a=1"}, OURS, [f"--{AT_ONCE}=1"]),
    ],
)
def test_the_users_values_win_and_are_said(generation, user, added, users):
    environment = gpu_environment(user, generation)
    assert environment.added == added
    assert list(environment.users) == users
    words = environment.words()
    assert words.startswith(generation or "unknown, default environment: ")
    assert all(words.count(text) == 1 for text in users)


def test_flags_in_a_file_are_kept(tmp_path):
    """XLA takes XLA_FLAGS as the path of a file if it does not begin with a dash."""
    file = tmp_path / "flags"
    file.write_text("--a=1\n--b=2\n")
    assert user_flags({"XLA_FLAGS": str(file)}) == "--a=1 --b=2"
    with pytest.raises(ValueError, match=r"XLA_FLAGS=/absent is neither flags, .* nor a file"):
        user_flags({"XLA_FLAGS": "/absent"})


@pytest.mark.parametrize("named", [{}, {NAMES[0]: "0.5"}, {NAMES[1]: "0.5"}])
def test_jax_and_the_planner_read_the_fraction_that_is_set(monkeypatch, named):
    monkeypatch.setattr(gpu_environment_module, "uses_gpu", lambda: True)
    for name in (*NAMES, "XLA_FLAGS"):
        monkeypatch.setenv(name, named.get(name, ""))
    environment = set_gpu_environment()
    assert environment is not None and environment.generation == ""
    fraction = 0.5 if named else MEMORY_FRACTION
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == fraction
    pool = parse_cluster("h100x8").capacity / 2**30
    assert pool == pytest.approx(79.1 * fraction, abs=0.01)  # of the GiB that CUDA reports


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "90%", "nan"])
def test_a_fraction_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=rf"{NAMES[1]}={value} must be above 0 and at most 1"):
        memory_fraction({NAMES[1]: value})


def test_a_cpu_keeps_its_environment(monkeypatch):
    before = dict(os.environ)
    assert set_gpu_environment() is None and recorded_environment() == ""
    assert dict(os.environ) == before


def test_deterministic_programs_are_asked_of_xla_and_nccl():
    """tests/absent proves that XLA obeys the flag."""
    flag = "--xla_gpu_deterministic_ops"
    assert "XLA_FLAGS" not in gpu_environment({"XLA_FLAGS": "--a=1"}).added
    added = gpu_environment({"XLA_FLAGS": "--a=1"}, deterministic=True).added
    assert added["XLA_FLAGS"] == f"--a=1 {flag}=true"
    assert added["NCCL_ALGO"] == "^NVLS,NVLSTree"
    own = {"XLA_FLAGS": f"{flag}=true", "NCCL_ALGO": "Ring"}
    assert own.items() <= gpu_environment(own, deterministic=True).added.items()
    with pytest.raises(ValueError, match=f"{flag}=false in XLA_FLAGS: remove one"):
        gpu_environment({"XLA_FLAGS": f"{flag}=false"}, deterministic=True)


@pytest.mark.parametrize(
    ("capability", "version", "backend", "refused"),
    [
        ((9, 0), 90100, "auto", False),
        ((10, 0), 91801, "cudnn", False),
        ((10, 0), 91800, "auto", True),
        ((10, 0), 91800, "xla", False),
    ],
)
def test_attention_that_cannot_be_deterministic_is_refused(
    monkeypatch, capability, version, backend, refused
):
    monkeypatch.setattr(determinism, "target_device", lambda: Device("gpu", capability))
    monkeypatch.setattr(attention_cudnn.fused, "check_cudnn_version", lambda: version)
    config = Config()
    config.model.attention.backend = AttentionBackend(backend)
    determinism.check_deterministic(config)
    config.train.deterministic = True
    if not refused:
        determinism.check_deterministic(config)
        return
    with pytest.raises(ValueError, match=rf"attention.backend={backend}: cuDNN.*91801.*or set"):
        determinism.check_deterministic(config)


@pytest.mark.parametrize(
    ("asked", "has_gpu", "has_plugin", "expected"),
    [
        ("", False, True, "cpu"),  # the plugin would print 20 lines
        ("", False, False, ""),  # perhaps a TPU
        ("", True, True, ""),
        ("cuda", True, True, ""),
        ("cuda", False, True, "JAX_PLATFORMS=cuda: this machine has no NVIDIA GPU"),
        ("cpu, gpu", False, False, "this machine has no NVIDIA GPU"),
        ("cuda", True, False, r"pip install 'maxmeg\[cuda13\]'"),
    ],
)
def test_cuda_is_not_looked_for_in_vain(monkeypatch, asked, has_gpu, has_plugin, expected):
    """A command takes the CPU, or ends with one line that says why there is no GPU."""
    chosen = {}
    monkeypatch.setattr(platform, "requested_platforms", lambda: asked)
    monkeypatch.setattr(platform, "has_nvidia_gpu", lambda: has_gpu)
    monkeypatch.setattr(platform, "has_cuda_plugin", lambda: has_plugin)
    monkeypatch.setattr(platform.jax.config, "update", chosen.__setitem__)
    if expected in ("", "cpu"):
        platform.choose_platform()
        assert chosen == ({"jax_platforms": expected} if expected else {})
        return
    with pytest.raises(ValueError, match=expected):
        set_gpu_environment()


@pytest.mark.parametrize(
    "command",
    [
        lambda: train.main(Config(run_dir="/dev/null/run")),  # a run cannot begin there
        lambda: evaluate.main(evaluate.Options()),
        lambda: generate.main(generate.Options()),
        lambda: plan.main(Config(), plan.Options()),
    ],
    ids=["train", "evaluate", "generate", "plan"],
)
def test_every_command_that_computes_chooses_the_platform(monkeypatch, command):
    monkeypatch.setattr(platform, "requested_platforms", lambda: "cuda")
    monkeypatch.setattr(platform, "has_nvidia_gpu", lambda: False)
    with pytest.raises(ValueError, match="this machine has no NVIDIA GPU"):
        command()


def test_this_machine_is_looked_at():
    assert platform.has_nvidia_gpu() == bool([*Path("/dev").glob("nvidia*")])
    assert platform.requested_platforms() == (jax.config.values["jax_platforms"] or "")


def test_scatters_of_large_matrices_are_not_combined_with_others(monkeypatch):
    """On GPUs, up to the largest matrix of a layer on a device; the user's flag wins."""
    config = tiny({"mlp.ffn_size": 96}, fsdp=4, tensor=2)
    mesh = mesh_of(config)
    model = tiny_abstract(config, mesh)[1].model
    assert compiler_options(model, mesh) == {}
    device = types.SimpleNamespace(platform="cuda")
    gpus: Any = types.SimpleNamespace(devices=np.array([device]), shape=mesh.shape)
    size = 4 * config.model.hidden_size * 96 // 8
    always = {SLOP: SLOP_PERCENT}
    assert compiler_options(model, gpus) == always | {COMBINED: size}
    monkeypatch.setenv("XLA_FLAGS", f"--{COMBINED}=7")
    assert compiler_options(model, gpus) == always
    assert compiler_options(model, gpus, two_lanes=True) == always | {AT_ONCE: 2}
    gpus.shape = dict(mesh.shape) | {"fsdp": 1, "expert": 4}  # inside one node
    assert compiler_options(model, gpus, two_lanes=True) == always
    gpus.shape |= {"expert": 8}
    assert compiler_options(model, gpus, two_lanes=True) == always | {AT_ONCE: 2}
    gpus.shape = mesh.shape
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr("maxmeg.runtime.gpu_environment.XLA_COMBINES", size)
    assert compiler_options(model, gpus) == always


def test_an_option_that_xla_does_not_know_is_left_out_with_a_warning(caplog):
    assert is_known(COMBINED, 7) and not caplog.text
    assert not is_known("xla_gpu_dropped", 1)
    assert "compiled without xla_gpu_dropped=1" in caplog.text
