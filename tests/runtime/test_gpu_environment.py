"""GPUs before JAX starts: their memory pool, where the user's setting wins, and their absence."""

from pathlib import Path

import jax
import pytest
from jaxlib import xla_client

from maxmeg import evaluate, generate, plan, train
from maxmeg.config.mixers import AttentionBackend
from maxmeg.config.schema import Config
from maxmeg.ops.attention import cudnn as attention_cudnn
from maxmeg.ops.backend import Device
from maxmeg.planning.hardware import parse_cluster
from maxmeg.runtime import determinism, platform
from maxmeg.runtime.gpu_environment import MEMORY_FRACTION, gpu_environment, set_gpu_environment

NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.mark.parametrize("named", [{}, {NAMES[0]: "0.5"}, {NAMES[1]: "0.5"}])
def test_jax_reads_the_fraction_that_is_set(monkeypatch, named):
    for name in NAMES:
        monkeypatch.setenv(name, named.get(name, ""))
    set_gpu_environment()
    options = xla_client.generate_pjrt_gpu_plugin_options()
    assert options["memory_fraction"] == (0.5 if named else MEMORY_FRACTION)
    pool = parse_cluster("h100x8").capacity / 2**30
    assert pool == pytest.approx(72.77, abs=0.01)  # of the 79.1 GiB that CUDA reports


def test_deterministic_programs_are_asked_of_xla_and_nccl():
    """tests/absent proves that XLA obeys the flag."""
    flag = "--xla_gpu_deterministic_ops"
    assert "XLA_FLAGS" not in gpu_environment({"XLA_FLAGS": "--a=1"})
    added = gpu_environment({"XLA_FLAGS": "--a=1"}, deterministic=True)
    assert added["XLA_FLAGS"] == f"--a=1 {flag}=true"
    assert added["NCCL_ALGO"] == "^NVLS,NVLSTree"
    own = {"XLA_FLAGS": f"{flag}=true", "NCCL_ALGO": "Ring"}
    assert own.items() <= gpu_environment(own, deterministic=True).items()
    with pytest.raises(ValueError, match=f"{flag}=false in XLA_FLAGS: remove one"):
        gpu_environment({"XLA_FLAGS": f"{flag}=false"}, deterministic=True)


@pytest.mark.parametrize(
    ("capability", "version", "backend", "refused"),
    [
        ((9, 0), 90100, "auto", False),
        ((10, 0), 91801, "cudnn", False),
        ((10, 0), 91800, "auto", True),
        ((10, 0), 91800, "cudnn", True),
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
        ("cpu", False, True, ""),
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
    assert platform.requested_platforms() == (jax.config.jax_platforms or "")
