"""The attention backend that is planned for each feature, and that the train step uses the same."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from layouts import mesh_of, tiny

from maxmeg.config.architectures import use_architecture
from maxmeg.config.data import Packing
from maxmeg.config.mixers import AttentionBackend
from maxmeg.config.model import DType
from maxmeg.config.schema import Config
from maxmeg.ops import backend as dispatch
from maxmeg.ops.attention import call as module
from maxmeg.ops.backend import Device
from maxmeg.planning.analytic import attention_words, layer_seconds, score_traffic
from maxmeg.planning.compile import abstract_step
from maxmeg.planning.cost.attention import (
    backends,
    fused_attention,
    kernels,
    score_bytes,
    surplus,
    warnings,
)
from maxmeg.planning.cost.memory import activations, device_memory
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import parse_cluster

AMPERE, HOPPER, BLACKWELL = (Device("cuda", (major, 0)) for major in (8, 9, 10))
WINDOWS = {"layers": "*(local,mlp attention,mlp)", "attention.window": 8}
MLA = {"layers": "*(mla,mlp)", "mla.query_rank": 16, "mla.kv_rank": 16}
LARGE = {"attention.head_dim": 256}


def config_of(model: dict, data: dict | None = None) -> Config:
    config = tiny(
        {"dtype": DType.bfloat16, "attention.num_heads": 4} | model, {"micro_batch_size": 2}, fsdp=1
    )
    config.train.global_batch_size = 2
    for name, value in (data or {}).items():
        setattr(config.data, name, value)
    return config


# feature: (model, data, GPU, backend, a part of the reason)
FEATURES = {
    "causal": ({}, {}, HOPPER, "cudnn", ""),
    "windows": (WINDOWS, {}, HOPPER, "cudnn", ""),
    "heads of 256, Ampere": (LARGE, {}, AMPERE, "xla", "256 is not a multiple of 8 up to 128"),
    "latents": (MLA | {"attention.head_dim": 128}, {}, HOPPER, "cudnn", ""),
    "softcap": ({"attention.softcap": 9.0}, {}, HOPPER, "xla", "softcap=9.0 is not supported"),
    "dropout": ({"attention.dropout": 0.1}, {}, HOPPER, "xla", "attention dropout is not"),
    "documents": ({}, {"reset_attention_mask": True}, HOPPER, "cudnn", "with a mask; not yet"),
    "documents, all keys": (
        {"attention.causal": False},
        *({"reset_attention_mask": True}, HOPPER, "cudnn", "with a mask; not yet run"),
    ),
    "packing, sinks, windows": (
        WINDOWS | {"attention.sinks": True},
        *({"packing": Packing.best_fit}, HOPPER, "cudnn", "with a mask and sinks; not yet run"),
    ),
    "packing, Blackwell": (
        *({}, {"packing": Packing.best_fit}, BLACKWELL, "xla"),
        "documents and chunks are untested on GPUs of compute capability 10.x",
    ),
    "named xla": ({"attention.backend": AttentionBackend.xla}, {}, HOPPER, "xla", ""),
    "named mosaic": (
        {"attention.backend": AttentionBackend.mosaic, "attention.softcap": 9.0},
        *({}, HOPPER, "mosaic", ""),
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_the_backend_of_each_feature_and_why(name):
    model, data, device, backend, reason = FEATURES[name]
    config = config_of(model, data)
    work = workload(config, 1, device)
    found = {kernel for unit in work.units for kernel in kernels(work, unit)}
    assert {kernel.backend for kernel in found} == {backend}
    assert all(reason in kernel.reason and bool(kernel.reason) == bool(reason) for kernel in found)
    assert fused_attention(work) == (backend != "xla")
    assert (score_bytes(work) > 0) == (backend == "xla" or "a mask" in reason)
    assert backends(work).startswith(backend) and reason in backends(work)
    assert not warnings(work)  # short sequences
    config.data.sequence_length = 2048
    warned = warnings(workload(config, 1, device))
    assert bool(warned) == (backend == "xla" and name != "named xla")
    assert all(reason in text and "GB per device" in text for text in warned.values())
    assert len(warned) <= 1


@pytest.mark.parametrize("name", ["windows", "softcap", "documents", "dropout"])
def test_the_train_step_uses_the_backend_that_is_planned(name, monkeypatch):
    """The real step, traced as for the GPU; the backends themselves do not run."""
    model, data, device, _, _ = FEATURES[name]
    config, used = config_of(model, data), set()

    def pretended(name: str):
        def attend(q_BLHK, k_BMGK, v_BMGV, spec, operands):
            used.add(name)
            shape = (*q_BLHK.shape[:3], v_BMGV.shape[-1])
            mixed = q_BLHK.sum() + k_BMGK.sum() + v_BMGV.sum()
            return jnp.full(shape, mixed), jnp.zeros(shape[:3])

        return types.SimpleNamespace(refuses=module.BACKENDS[name].refuses, attend=attend)

    monkeypatch.setattr(module, "BACKENDS", {name: pretended(name) for name in module.BACKENDS})
    monkeypatch.setattr(dispatch, "target_device", lambda: device)
    step, arguments = abstract_step(config, mesh_of(config))
    step.trace(*arguments)
    work = workload(config, 1, device)
    assert used == {kernel.backend for unit in work.units for kernel in kernels(work, unit)}


def test_the_price_of_plain_xla_is_that_of_its_blocks():
    """Gemma 2: 16 heads of 8,192 queries in 16 blocks of 512, each with the keys up to its last."""
    config = use_architecture(Config(), "gemma2-9b")
    config.train.global_batch_size, config.train.micro_batch_size = 8, 1
    cluster = parse_cluster("h100x8")
    work = workload(config, 8, cluster.device)
    full = 512 * 512 * 16 * 17 // 2
    outside = 512 * sum(512 * block - 4095 for block in range(8, 16))  # before windows of 4,096
    windowed = full - outside
    assert score_bytes(work) == 6 * 4 * 16 * (full + windowed) / 2
    assert score_traffic(work) == 4 * 42 * score_bytes(work)
    assert attention_words(work, cluster) == (
        "xla (cudnn: softcap=50.0 is not supported); its scores are written and read: "
        f"{score_traffic(work) / 1e9:,.0f} GB per GPU and step, "
        f"{score_traffic(work) / cluster.memory_rate:.3g} s"
    )
    (text,) = warnings(work).values()
    assert "2.28 GB per device (1 x 16 heads x 8,192 queries x 4,352 keys on average)" in text
    heads = dataclasses.replace(config.model.attention, softcap=0.0)
    model = dataclasses.replace(config.model, attention=heads)
    fused = workload(dataclasses.replace(config, model=model), 8, cluster.device)
    assert backends(fused) == "cudnn" and not warnings(fused) and score_bytes(fused) == 0
    slower, faster = layer_seconds(work, cluster), layer_seconds(fused, cluster)
    moved = score_bytes(work) / cluster.memory_rate
    assert slower.forward - faster.forward >= moved > 0
    assert slower.backward - faster.backward >= 3 * moved


@pytest.mark.parametrize("window", [0, 2048])
def test_the_price_of_a_mask_is_that_of_its_bytes(window):
    """8,192 tokens and 32 heads: bfloat16, written once, read by every head over the causal half;
    with a window cuDNN computes that half whole."""
    config = use_architecture(Config(), "llama3-8b")
    config.train.global_batch_size, config.train.micro_batch_size = 8, 1
    if window:
        config.model.layers, config.model.attention.window = "*(local,mlp)", window
    plain = workload(config, 8, HOPPER)
    packed = dataclasses.replace(config.data, packing=Packing.best_fit)
    masked = workload(dataclasses.replace(config, data=packed), 8, HOPPER)
    half = 8192 * 8193 // 2
    assert score_bytes(plain) == 0
    assert score_bytes(masked) == 2 * 8192**2 + 2 * 32 * half
    visible = 2048 * 2049 // 2 + 6144 * 2048 if window else half
    assert surplus(masked) == half / visible
    assert activations(masked) == activations(plain)
    more = device_memory(masked)["workspace"] - device_memory(plain)["workspace"]
    assert 0 <= more <= 3 * 2 * 8192**2
    words = attention_words(masked, parse_cluster("h100x8"))
    assert words.startswith("cudnn (with a mask; not yet run on a GPU); its mask is written")
    forward = [layer_seconds(work, parse_cluster("h100x8")).forward for work in (plain, masked)]
    assert forward[0] < forward[1]


def test_a_local_gpu_decides_what_is_planned_without_a_cluster(monkeypatch):
    config = config_of({"attention.head_dim": 256})
    assert workload(config, 1).device == HOPPER and fused_attention(workload(config, 1))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: None)
    monkeypatch.setattr(dispatch, "target_platform", lambda: "cuda")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gpu = types.SimpleNamespace(compute_capability="8.0")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert workload(config, 1).device == AMPERE and not fused_attention(workload(config, 1))
