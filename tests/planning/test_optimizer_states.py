"""Bytes of masters and optimizer states by formulas against the real states, on every layout."""

import math

import jax
import pytest
from layouts import ALTERNATING, mesh_of, of, tiny
from tables import thinned

from maxmeg.config.model import DType, Norm, Position
from maxmeg.config.schema import Config, Masters, Moments, OptimConfig, Optimizer
from maxmeg.config.setting import with_fields
from maxmeg.optim.build import make_optimizer
from maxmeg.planning.analytic import analyze
from maxmeg.planning.cost.memory import device_memory
from maxmeg.planning.cost.optimizer import newton_schulz_flops
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import parse_cluster
from maxmeg.runtime.metrics.parameter_table import parameter_rows
from maxmeg.state import abstract_state

EXPERTS = {"layers": "attention,mlp *(attention,moe)", "moe.num_experts": 4}
LAYOUTS = {
    "one device": {},
    "fsdp": {"fsdp": 4},
    "zero1": {"data": 4, "fsdp": 2},
    "replicas": {"data": 4, "fsdp": 1, "zero1": False},
    "tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "pipe": {"pipe": 2, "fsdp": 2, "tensor": 2},
    "chunks": {"pipe": 2, "chunks": 2, "data": 2, "fsdp": 1},
    "padded": {"pipe": 4, "data": 2, "fsdp": 1, "pad_layers": True},
    "uneven": {"pipe": 2, "fsdp": 1, "first_stage_layers": 1},
    "units": {"pipe": 2, "fsdp": 1, "chunk_layers": (1, 2)},
    "experts": {"expert": 2, "tensor": 2, "data": 2, "fsdp": 1},
    "whole experts": {"expert": 4, "tensor": 2, "fsdp": 2, "expert_tensor": 1},
}


def config_of(name: str, model: dict) -> Config:
    model = {"num_layers": 5 if name == "padded" else 4, **model}
    if name == "units":
        model |= ALTERNATING | {"position": Position.rotary}
    if "experts" in name:
        model |= EXPERTS
    return tiny(model, {"micro_batch_size": 1}, **{"fsdp": 1, **LAYOUTS[name]})


def bytes_on_a_device(tree) -> int:
    """Of an abstract tree."""
    arrays = jax.tree.leaves(tree)
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)


def check(config: Config, mesh: jax.sharding.Mesh) -> None:
    """The planned bytes on a device equal those of the real training state."""
    optimizer = make_optimizer(config.optim, mesh, config.parallel.zero1)
    state = abstract_state(config, optimizer, mesh)
    found = device_memory(workload(config, mesh.size))
    assert found["master weights"] == bytes_on_a_device((state.model, state.remainders))
    held = sum(row.bytes_per_device for row in parameter_rows(state.model))
    assert held == bytes_on_a_device(state.model)
    counts = sum(leaf.ndim == 0 for leaf in jax.tree.leaves(state.optimizer))
    own = bytes_on_a_device((state.optimizer, state.ema))
    assert found["optimizer"] == own - 4 * counts


@pytest.mark.parametrize("name", thinned(LAYOUTS, 2))
def test_masters_and_optimizer_are_those_of_the_real_state(name):
    model = {"norm": Norm.layernorm, "position": Position.learned, "max_position": 16}
    config = config_of(name, model | {"attention.num_kv_heads": 1})
    mesh = mesh_of(config)
    for config.optim.optimizer in (Optimizer.adamw, Optimizer.sgd, Optimizer.muon):
        check(config, mesh)


@pytest.mark.parametrize("name", thinned(LAYOUTS, 4))
def test_small_states_are_those_of_the_real_state(name):
    """Hidden size 320 and blocks of 107 to 128: devices share some, and not others."""
    sizes = {"hidden_size": 320, "mlp.ffn_size": 642}
    config = config_of(name, {"dtype": DType.bfloat16, **sizes})
    mesh = mesh_of(config)
    cases = [(Optimizer.adamw, Moments.float8), (Optimizer.muon, Moments.bfloat16)]
    cases += [(Optimizer.lion, Moments.float32), (Optimizer.adafactor, Moments.float8)]
    cases.append((Optimizer.soap, Moments.float8))
    for optimizer, moments in cases:
        config.optim = OptimConfig(optimizer, moments=moments, masters=Masters.remainders)
        config.optim.ema.decay = 0.9 if moments is Moments.float8 else 0.0
        check(config, mesh)


def test_newton_schulz_of_single_heads_is_counted():
    """Of 8 heads, in queries, keys and values of 2 layers: matrices of 32 x 4, not 32 x 32."""
    config, flops = tiny(), {}
    config.optim.optimizer = Optimizer.muon
    for per_head in (False, True):
        config.optim.muon.per_head = per_head
        flops[per_head] = newton_schulz_flops(workload(config, 1))
    whole, head = (5 * (4 * m**2 * 32 + 2 * m**3) for m in (32, 4))
    assert flops[False] - flops[True] == 2 * 3 * (whole - 8 * head)


def test_muon_takes_three_percent_of_a_long_step():
    """Of Llama 3 8B on 8 H100s, 4M tokens a step."""
    cluster, seconds = parse_cluster("h100x8"), {}
    for optimizer in (Optimizer.adamw, Optimizer.muon):
        config = of("llama3-8b", 8, 1, 64, fsdp=8)
        assert config.train.global_batch_size * config.data.sequence_length == 2**22
        config = with_fields(config, {"optim.optimizer": optimizer})
        seconds[optimizer] = analyze(config, cluster).step_seconds
    added = seconds[Optimizer.muon] - seconds[Optimizer.adamw]
    assert 0 < added <= 0.03 * seconds[Optimizer.muon]
