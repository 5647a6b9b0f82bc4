"""Bytes by formulas against the real model, its shardings, its residuals, and what compiled."""

import math

import jax
import jax.numpy as jnp
import pytest
from layouts import of
from tables import thinned

from maxmeg.config.architectures import architecture
from maxmeg.config.mixers import Activation, ExpertBackend, QkNorm
from maxmeg.config.model import DType, ModelConfig, Norm, NormPlace
from maxmeg.config.parallel import LaneOrder, ParallelConfig, Schedule
from maxmeg.config.schema import (
    Config,
    TrainConfig,
)
from maxmeg.config.setting import with_fields
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.pipeline.residuals import read
from maxmeg.pipeline.schedule import SCHEDULES
from maxmeg.pipeline.split import SplitVjp
from maxmeg.planning.cost.memory import (
    activations,
    device_memory,
    unit_deferred,
)
from maxmeg.planning.cost.parameters import parameter_counts
from maxmeg.planning.cost.workload import lanes, workload

RESIDUALS = 0.05  # of what jax.vjp keeps
COMPILED = 0.03  # of all that a step takes
GIB = 2**30


def test_parameters_of_each_kind():
    counts = parameter_counts(architecture("llama3-8b"))
    table = 4096 * 128256
    assert counts == {
        "embedding": table,
        "output": table,
        "attention": 32 * 4096 * (2 * 4096 + 2 * 1024),
        "mlp": 32 * 3 * 4096 * 14336,
        "norm": 65 * 4096,
    }
    assert parameter_counts(architecture("345m"))["positions"] == 1024 * 1024


def test_bytes_of_a_parameter_are_megatrons():
    """18 without, 6 + 12 / d with the optimizer over d replicas; everything here divides by d."""
    for replicas, zero1 in ((1, True), (2, False), (2, True), (8, True), (64, True)):
        config = of("22b", 8 * replicas, 1, 4, data=replicas, fsdp=1, tensor=8, zero1=zero1)
        memory = device_memory(workload(config, 8 * replicas))
        own = sum(
            memory[name] for name in ("master weights", "optimizer", "compute weights", "gradients")
        )
        whole = sum(shard.computed for shard in workload(config, 8 * replicas).shards)
        assert own / whole == (6 + 12 / replicas if zero1 else 18)


def test_float32_weights_are_the_masters_unless_gathered_or_fused():
    """A fused weight of queries, keys and values is a copy."""
    config = of("345m", 8, 1, 4, data=8, fsdp=1)
    config.model.dtype = DType.float32
    gathered = device_memory(workload(config, 8))
    assert gathered["compute weights"] == 8 * gathered["master weights"]
    config.parallel.zero1 = False
    layers, width = config.model.num_layers, config.model.hidden_size
    fused = 4 * layers * 3 * width**2
    assert device_memory(workload(config, 8))["compute weights"] == fused


KINDS = {
    "gpt": {"mlp.activation": Activation.gelu_tanh, "norm": Norm.layernorm, "mlp.bias": True},
    "llama": {"attention.num_kv_heads": 2, "mlp.activation": Activation.swiglu},
    "parallel block": {"layers": "*(attention+mlp)", "mlp.activation": Activation.gelu},
    "alternating": {"layers": "*(local,mlp attention,mlp)", "attention.window": 200},
    "experts": {
        "layers": "*(attention,moe)",
        "moe.num_experts": 4,
        "moe.ffn_size": 48,
        "moe.shared_ffn_size": 32,
        "moe.backend": ExpertBackend.xla,
    },
    "convolution": {"layers": "*(conv,mlp)"},
    "parallel norms": {"layers": "*(attention+mlp)", "parallel_norms": True},
    "norms after": {"norm_place": NormPlace.post},
    "norms around": {"norm_place": NormPlace.sandwich},
    "norms of heads": {"attention.qk_norm": QkNorm.head, "attention.head_dim": 64},
    "latent": {
        "layers": "*(mla,mlp)",
        "mla.kv_rank": 32,
        "mla.query_rank": 48,
        "mla.rotary_size": 8,
        "attention.head_dim": 16,
    },
}


def config_of(kind: str, mode: str, length: int) -> Config:
    """Two samples, width 64."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "attention.num_heads": 4, "recompute": mode}
    config = Config(train=TrainConfig(global_batch_size=2))
    config.data.sequence_length = length
    config.model = with_fields(ModelConfig(), {**KINDS[kind], **sizes})
    return config


# Every kind at both lengths: XLA's attention computes 1,024 queries in two blocks.
MODES = "selective", "selective", "full", "full"
ACTIVATIONS = [(kind, "minimal", (256, 1024)[i % 2]) for i, kind in enumerate(KINDS)]
ACTIVATIONS += [(kind, MODES[i % 4], (1024, 256)[i % 2]) for i, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "mode", "length"), thinned(ACTIVATIONS, 2))
def test_activations_are_what_backward_keeps(kind, mode, length):
    """Counted on what jax.vjp of the stack keeps beside its parameters."""
    config = config_of(kind, mode, length)
    config.model.dtype = DType.float32
    stack = jax.eval_shape(lambda: LM(jax.random.key(0), config.model)).stack

    def function(stack, x_BLD):
        positions_BL = jnp.broadcast_to(jnp.arange(length), x_BLD.shape[:2])
        return stack({"target": x_BLD}, Context(positions_BL))[0]

    x_BLD = jax.ShapeDtypeStruct((2, length, 64), jnp.float32)
    pull = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], stack, x_BLD)
    kept = [a for a in jax.tree.leaves(pull) if a.ndim > 2 and a.shape[:3] != (2, length, 1)]
    kept_bytes = 4 * (sum(a.size for a in kept) - sum(a.size for a in jax.tree.leaves(stack)))
    assert activations(workload(config, 1)) == pytest.approx(kept_bytes, rel=RESIDUALS)


FULL = ("llama", "experts", "norms around")


@pytest.mark.parametrize(
    ("kind", "mode"),
    thinned([*((k, "minimal") for k in KINDS), *((k, "full") for k in FULL)], 4),
)
def test_deferred_is_what_the_weight_lane_keeps(kind, mode):
    """Counted on the divided backward of a real layer, on one device. Left out is XLA's attention
    made again for the weight lane alone, which keeps its weights."""
    config = config_of(kind, mode, 256)
    stack = LM(jax.random.key(0), config.model).stack
    positions_BL = jnp.broadcast_to(jnp.arange(256), (2, 256))

    def unit(params, x, layer):
        return stack.run_unit(params, x, Context(positions_BL), layer, prevent_cse=False)

    x = {"target": jnp.zeros((2, 256, 64), jnp.bfloat16)}
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), read(stack.groups[0], 0))
    split = SplitVjp(unit, params, x, jnp.int32(0))
    kept = sum(math.prod(a.shape) * a.dtype.itemsize for a in split.deferred)
    work = workload(config, 1)
    assert unit_deferred(work, work.units[0]) == pytest.approx(kept, rel=RESIDUALS)


@pytest.mark.parametrize("order", LaneOrder)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_lanes_are_those_of_the_tables(stages, order):
    for name, make in SCHEDULES.items():
        for chunks in (1, 2, 3) if name == "one_f_one_b" else (1,):
            counts = {1, 2, stages, 2 * stages, 4 * stages + 1} if chunks == 1 else {stages}
            for microbatches in counts | {5 * stages}:
                table = make(microbatches, stages, chunks, order is LaneOrder.together)
                parallel = ParallelConfig(
                    pipe=stages, chunks=chunks, schedule=Schedule(name), lanes=order
                )
                found = lanes(parallel, microbatches)
                assert (found.slots, found.deferred) == (table.slots, table.deferred)
                on = {n: int(lane.active.any(axis=1).sum()) for n, lane in table.lanes().items()}
                assert (found.forward, found.backward) == (on["forward"], on["backward"])
                assert found.weight == on.get("weight", on["backward"])


ZERO_BUBBLE = {"schedule": Schedule.zero_bubble}
# (name, GPUs, samples, microbatches, recompute, sizes, GiB in all) of benchmarks/absent_memory.py.
SPLIT_EXPERTS = {"expert": 4, "pad_layers": True} | ZERO_BUBBLE
IN_CHUNKS = {"tensor": 4, "pipe": 4, "data": 8, "chunks": 2}
DRAWN = [
    ("nemotron4-15b", 16, 1, 8, "minimal", {"fsdp": 16}, 38.05),  # its gradient of the output
    ("gpt3-1.3b", 4, 1, 8, "minimal", {"fsdp": 4}, 8.23),  # one chunk of the loss
    ("starcoder2-7b", 4, 2, 1, "minimal", {"fsdp": 4}, 69.78),  # float32 gradients of layers
    ("olmo2-7b", 8, 2, 8, "minimal", {"tensor": 4}, 23.15),  # norms after sublayers
    ("gemma2-2b", 64, 1, 1, "selective", {"fsdp": 64}, 15.25),  # XLA's attention, two layers a unit
    ("gemma2-9b", 64, 1, 8, "full", {"data": 4}, 14.60),  # keys and values in slices
    ("gemma2-2b", 4, 1, 8, "minimal", {"pipe": 4, "pad_layers": True} | ZERO_BUBBLE, 49.54),
    ("gemma3-1b", 4, 1, 2, "minimal", {"tensor": 4}, 7.60),  # a group without a loop
    ("gpt3-760m", 16, 2, 2, "minimal", {"pipe": 2} | ZERO_BUBBLE, 11.02),  # ticks without a loop
    ("moonlight-16b-a3b", 32, 1, 2, "full", {"expert": 4}, 15.23),  # ticks one after the other
    ("moonlight-16b-a3b", 128, 1, 16, "full", SPLIT_EXPERTS | {"pipe": 8}, 36.53),
    ("deepseek-v2-lite", 16, 1, 4, "minimal", SPLIT_EXPERTS | {"pipe": 4}, 74.14),
    ("llama3-8b", 64, 1, 1, "minimal", {"data": 8, "tensor": 8}, 7.06),  # ZeRO-1, shards alone
    ("llama3-8b", 8, 1, 4, "minimal", {"data": 2, "tensor": 2}, 36.57),
    ("gpt-neox-20b", 16, 1, 2, "selective", {"data": 4}, 56.41),  # the first's last gradients
    ("gemma3-1b", 64, 2, 4, "full", {"fsdp": 64}, 9.80),  # six layers a unit
    ("gemma3-4b", 32, 2, 2, "full", {"tensor": 4}, 7.73),  # their gathered sequences
    ("gemma3-4b", 2, 1, 1, "selective", {"fsdp": 2}, 53.20),  # what the last unit stored is free
    ("gemma3-1b", 2, 1, 16, "selective", {"data": 2}, 21.99),  # a tiled loss
    ("qwen2.5-1.5b", 4, 4, 8, "full", {"fsdp": 4}, 13.09),  # the same on one node
    ("olmo2-13b", 64, 1, 4, "selective", {"fsdp": 64}, 25.33),  # gaps between buffers
    ("mistral-7b-v0.1", 8, 1, 1, "minimal", {"pipe": 2, "data": 2} | ZERO_BUBBLE, 53.88),
    ("deepseek-v2-lite", 8, 1, 1, "full", {"pipe": 4, "pad_layers": True} | ZERO_BUBBLE, 52.11),
    ("gpt2-1.5b", 4, 4, 1, "full", {"pipe": 2} | ZERO_BUBBLE, 16.13),  # peak in the weight lane
    ("gemma2-9b", 64, 4, 2, "minimal", {"tensor": 8, "data": 8}, 25.82),  # layers one by one
    ("gemma3-12b", 128, 1, 4, "selective", IN_CHUNKS, 17.86),  # a unit without a loop, at the loss
    ("qwen3-1.7b", 4, 2, 2, "full", {"pipe": 4} | ZERO_BUBBLE, 32.89),  # norms of heads
    ("nemotron4-15b", 64, 1, 2, "minimal", {"pipe": 8, "data": 4} | ZERO_BUBBLE, 19.70),
    ("llama2-7b", 8, 2, 4, "full", {"pipe": 2, "tensor": 2} | ZERO_BUBBLE, 51.99),  # transposed
    ("pythia-1b", 8, 2, 8, "selective", {"pipe": 2, "tensor": 2} | ZERO_BUBBLE, 6.45),  # own norms
    ("gpt-oss-20b", 16, 1, 4, "selective", {"pipe": 8, "data": 2, "pad_layers": True}, 57.69),
    ("qwen3-30b-a3b", 64, 1, 1, "minimal", {"fsdp": 64}, 30.86),  # rows beside weights
    ("mixtral-8x7b", 32, 1, 2, "selective", {"fsdp": 32}, 67.55),  # beyond XLA's limit of memory
]


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: f"{case[0]}-{case[5]}")
def test_memory_of_drawn_models_is_what_was_compiled(case):
    name, gpus, samples, microbatches, mode, parallel, gib = case
    config = of(name, gpus, samples, microbatches, mode, **parallel)
    found = sum(device_memory(workload(config, gpus)).values())
    assert found / GIB == pytest.approx(gib, rel=COMPILED)


def test_a_model_without_a_vocabulary_is_an_error():
    with pytest.raises(ValueError, match=r"model\.vocab_size=0"):
        workload(Config(), 1)
