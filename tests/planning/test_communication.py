"""Counts and bytes of collectives against the traced step, and the links that they take."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from layouts import mesh_of, tiny

from maxmeg.config.architectures import use_architecture
from maxmeg.config.mixers import ExpertBackend, ExpertExchange
from maxmeg.config.model import Position
from maxmeg.config.parallel import GradientDType, ParallelConfig, Schedule
from maxmeg.config.quantization import QuantizationConfig, QuantizationRecipe
from maxmeg.config.schema import Config, LossBackend, Optimizer, TrainConfig
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.batch import Batch
from maxmeg.planning.cost.communication import span, traffic
from maxmeg.planning.cost.optimizer import exchanged
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import LINK_REACHED, parse_cluster
from maxmeg.planning.report import Traffic
from maxmeg.state import abstract_state
from maxmeg.step import make_gradients

PRIMITIVES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "psum": "all-reduce",
    "pmax": "all-reduce",
}
Counter = collections.Counter


def inner_jaxprs(equation):
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield getattr(item, "jaxpr", item)


def count(jaxpr, times: int, runs: Counter, volume: Counter) -> None:
    """Executions, and bytes of the larger side, of every collective by (kind, axes)."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in PRIMITIVES:
            axes = params.get("axis_name") or params.get("axes")
            axes = axes if isinstance(axes, tuple) else (axes,)
            axes = ["tensor" if axis == "fold" else axis for axis in axes]  # all of it here
            sides = (
                sum(v.aval.size * v.aval.dtype.itemsize for v in variables)
                for variables in (equation.invars, equation.outvars)
            )
            key = PRIMITIVES[name], " x ".join(axes)
            runs[key] += times
            volume[key] += times * max(sides)
        if name == "while":  # of further rounds, which even loads do not need
            continue
        length = params["length"] if name == "scan" else 1
        for inner in inner_jaxprs(equation):
            count(inner, times * length, runs, volume)


def traced(config: Config) -> tuple[Counter, Counter]:
    """(runs, bytes) of the collectives in the gradients' real program."""
    mesh = mesh_of(config)
    state = abstract_state(config, make_optimizer(config.optim), mesh)
    batch_size = config.train.global_batch_size
    microbatches = workload(config, mesh.size).microbatches
    shape = (microbatches, batch_size // microbatches, config.data.sequence_length)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct(shape, jnp.float32))
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    jaxpr = jax.make_jaxpr(make_gradients(config, mesh, state.model))(state.model, batch, key).jaxpr
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    runs, volume = Counter(), Counter()
    count(jaxpr, 1, runs, volume)
    return runs, volume


@pytest.mark.parametrize(
    ("kind", "zero1", "per_head"),
    [
        (Optimizer.muon, False, True),
        (Optimizer.muon, True, False),
        (Optimizer.soap, False, False),
        (Optimizer.soap, True, False),
    ],
)
def test_optimizers_exchange_parts_of_matrices_as_planned(kind, zero1, per_head):
    """Feed-forward layers of 84 columns: SOAP's factors of them lie on 4 of 8 devices, or there
    are none."""
    model = {"num_layers": 8, "mlp.ffn_size": 84}
    config = tiny(model, data=2, fsdp=2, tensor=2, zero1=zero1)
    config.optim.optimizer, config.optim.muon.per_head = kind, per_head
    if kind is Optimizer.soap and zero1:
        config.optim.soap.max_precond_dim = 83
    mesh = mesh_of(config)
    optimizer = make_optimizer(config.optim, mesh, zero1)
    state = abstract_state(config, optimizer, mesh)

    def update(parameters, state):
        rates = {"learning_rate": 1.0, "weight_decay": 0.0}
        return optimizer.update(parameters, state, parameters, **rates)

    runs, volume = Counter(), Counter()
    count(jax.make_jaxpr(update)(state.model, state.optimizer).jaxpr, 1, runs, volume)
    planned, sizes = Counter(), Counter()
    for is_exchange, names, size in exchanged(workload(config, mesh.size)):
        name, times = ("all-to-all", 2) if is_exchange else ("all-gather", 1)
        planned[name, " x ".join(names)] += times
        sizes[name, " x ".join(names)] += times * size
    assert any(name == "all-gather" for name, _ in planned) is not zero1  # no device has copies
    assert runs == planned
    assert volume == sizes


LEARNED = {"tied": True, "position": Position.learned, "max_position": 16}
MICRO = {"micro_batch_size": 2}
MULTI_QUERY = {"attention.num_kv_heads": 1}  # one head on both devices along tensor
WEIGHT_LANE = {"schedule": Schedule.zero_bubble}
CASES = {
    "tensor": (MULTI_QUERY, {}, {"fsdp": 1, "tensor": 2}),
    "8-bit gradients of a shared head": (
        MULTI_QUERY | {"attention.head_dim": 16},
        {"quantization": QuantizationConfig(QuantizationRecipe.tensorwise)},
        {"fsdp": 1, "tensor": 2},
    ),
    "tiled loss": (
        {"num_layers": 1},
        {"loss_backend": LossBackend.tiled, "label_smoothing": 0.1},
        {"fsdp": 1, "tensor": 2},
    ),
    "full": (
        MULTI_QUERY | {"recompute": "full"},
        MICRO,
        {"fsdp": 2, "tensor": 2},
    ),
    "selective": (LEARNED | {"recompute": "selective"}, MICRO, {"data": 2, "fsdp": 1, "tensor": 2}),
    "tied": (LEARNED, MICRO, {"data": 2, "fsdp": 2}),
    "bfloat16 gradients": (
        {},
        MICRO,
        {"data": 2, "fsdp": 2, "gradient_dtype": GradientDType.bfloat16},
    ),
    "parallel block": ({"layers": "*(attention+mlp)"}, MICRO, {"fsdp": 2, "tensor": 2}),
    "pipe": ({"num_layers": 4, "vocab_size": 512}, MICRO, {"pipe": 2, "fsdp": 2, "tensor": 2}),
    "weight lane": ({"num_layers": 2}, MICRO, {"pipe": 2, "fsdp": 2} | WEIGHT_LANE),
    "weight lane, one microbatch": (
        {"num_layers": 4, "vocab_size": 512},
        {"global_batch_size": 4, "micro_batch_size": 1},
        {"pipe": 2, "data": 2, "fsdp": 2} | WEIGHT_LANE,
    ),
}


EXPERTS = {
    "layers": "*(attention,moe)",
    "moe.num_experts": 4,
    "num_layers": 1,
    "moe.shared_ffn_size": 16,
    "moe.backend": ExpertBackend.xla,
}
BATCHED = {"moe.backend": ExpertBackend.batched}
PADDED = {"moe.capacity_factor": 0.7, "moe.pad_to_capacity": True} | BATCHED
LATENT = {
    "layers": "*(mla,mlp)",
    "mla.kv_rank": 8,
    "mla.query_rank": 12,
    "mla.rotary_size": 4,
    "attention.head_dim": 4,
}
CASES |= {
    "exchanged": (EXPERTS, {}, {"fsdp": 1, "expert": 2, "tensor": 2}),
    "blocks": (EXPERTS | BATCHED | {"recompute": "full"}, MICRO, {"fsdp": 2, "expert": 2}),
    "folded": (
        EXPERTS | LATENT | {"num_layers": 2, "layers": "mla,mlp *(mla,moe)"},
        {},
        {"fsdp": 2, "expert": 2, "tensor": 2, "expert_tensor": 1},
    ),
    "gathered": (
        EXPERTS,
        {},
        {"fsdp": 1, "expert": 2, "tensor": 2, "expert_exchange": ExpertExchange.gather},
    ),
    "not sent": (EXPERTS | PADDED, {}, {"fsdp": 2, "tensor": 2}),
    "experts in a pipeline": (
        EXPERTS | {"num_layers": 2},
        MICRO,
        {"fsdp": 1, "expert": 2, "pipe": 2, "expert_buffer": 1.0},
    ),
    "padded": (
        EXPERTS | PADDED,
        {},
        {"fsdp": 1, "expert": 2, "tensor": 2, "expert_tensor": 1},
    ),
}


CONTEXT = {"micro_batch_size": 1}
CASES |= {
    "ring": ({"recompute": "selective"}, CONTEXT, {"fsdp": 2, "context": 2}),
    "ring, full": (
        {"recompute": "full"},
        CONTEXT,
        {"fsdp": 2, "context": 2, "tensor": 2, "fsdp_context": True},
    ),
    "windows": (
        {"attention.window": 3, "layers": "*(local,mlp)"},
        CONTEXT,
        {"fsdp": 1, "context": 2},
    ),
    "heads exchanged": (
        MULTI_QUERY,
        CONTEXT,
        {"fsdp": 1, "context": 2, "context_strategy": "exchange"},
    ),
    "keys gathered": ({}, CONTEXT, {"fsdp": 2, "context": 2, "context_strategy": "gather"}),
    "latents in a ring": (LATENT, CONTEXT, {"fsdp": 2, "context": 2, "context_strategy": "ring"}),
    "convolutions": (
        {"layers": "attention,conv *(conv,mlp)", "recompute": "selective"},
        CONTEXT,
        {"fsdp": 1, "context": 2, "tensor": 2},
    ),
    "states": (
        {
            "layers": "*(mamba)",
            "attention.num_heads": 4,
            "mamba.num_heads": 4,
            "mamba.head_dim": 8,
            "mamba.num_groups": 1,
        }
        | {"mamba.state_size": 6, "mamba.chunk": 4, "mamba.norm": False, "recompute": "selective"},
        CONTEXT,
        {"fsdp": 1, "context": 2, "tensor": 2},
    ),
    "experts along context": (
        EXPERTS,
        {},
        {
            **{"fsdp": 1, "expert": 4, "context": 2, "context_strategy": "ring"},
            "fsdp_context": True,
        },
    ),
}


QUICK = ("tensor", "tied", "pipe", "experts in a pipeline", "ring")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in QUICK)]
)
def test_gathers_scatters_and_permutes_are_the_programs(name):
    """As many, over the same axes, with the same bytes; every axis has two devices."""
    model, train, parallel = CASES[name]
    config = tiny(model, train, **parallel)
    runs, volume = traced(config)
    found_runs, found_volume = Counter(), Counter()
    size = mesh_of(config).size
    for entry in traffic(workload(config, size), parse_cluster(f"h100x{size}")):
        found_runs[entry.kind, entry.axis] += entry.runs
        found_volume[entry.kind, entry.axis] += entry.volume
    for key in {*runs, *found_runs}:
        kind, axis = key
        if kind != "all-reduce":
            assert found_runs[key] == runs[key], key
            devices = 2 ** len(axis.split(" x "))
            share = 1 if kind == "collective-permute" else (devices - 1) / devices
            shown = volume[key] * share
            assert found_volume[key] == shown, key
        elif axis in ("pipe", "pipe x tensor", "tensor") and runs[key]:
            # 4-byte scalars and the loss's two sums in one make the difference
            devices = 2 ** len(axis.split(" x "))
            sent = 2 * (devices - 1) / devices * volume[key]
            assert found_volume[key] == pytest.approx(sent, rel=0.01), key


@pytest.mark.parametrize(
    ("sizes", "axes", "expected"),
    [
        ({"fsdp": 8, "tensor": 8}, ("tensor",), (8, 1, 8)),
        ({"fsdp": 8, "tensor": 8}, ("fsdp",), (8, 8, 1)),
        ({"fsdp": 8, "tensor": 2}, ("fsdp",), (8, 2, 4)),
        ({"data": 2, "fsdp": 16}, ("fsdp",), (16, 2, 8)),
        ({"data": 2, "fsdp": 16}, ("data",), (2, 2, 1)),
        ({"pipe": 4, "tensor": 8}, ("pipe", "tensor"), (32, 4, 8)),
        ({"data": 8, "tensor": 3}, ("tensor",), (3, 2, 1)),  # some lie across two nodes
    ],
)
def test_span_of_groups(sizes, axes, expected):
    mesh = [sizes.get(axis, 1) for axis in ("pipe", "data", "fsdp", "expert", "context", "tensor")]
    assert span(tuple(mesh), axes) == expected


def of_175b(**parallel) -> tuple[Traffic, ...]:
    train = TrainConfig(global_batch_size=512, micro_batch_size=1)
    config = use_architecture(Config(parallel=ParallelConfig(**parallel), train=train), "175b")
    return traffic(workload(config, 1024), parse_cluster("h100x1024"))


def test_volumes_of_175b_in_numbers():
    entries = of_175b(pipe=16, data=8, fsdp=1, tensor=8)
    found = {(e.axis, e.purpose, e.kind): e for e in entries}
    assert len(found) == len(entries)
    sequences = found["tensor", "sequences into sublayers, forward", "all-gather"]
    assert sequences.seconds == sequences.volume / (450e9 * LINK_REACHED)
    sent = found["pipe", "hidden state to the next stage", "collective-permute"]
    assert sent.seconds == sent.volume / (50e9 * LINK_REACHED)
    ends = found["data", "weights of the step (ZeRO-1)", "all-gather"].volume
    layers = found["data", "weights of layers (ZeRO-1)", "all-gather"].volume
    parameters = 175e9 / (16 * 8)
    assert ends + layers == pytest.approx(2 * parameters * 7 / 8, rel=0.02)
    for kind, both in (("all-gather", 7 / 6), ("reduce-scatter", 2)):  # float32; of 6 slots 7
        once = sum(e.volume for e in entries if e.axis == "data" and e.kind == kind)
        assert once == pytest.approx(both * (ends + layers), rel=0.1)


def test_without_zero1_gradients_are_summed_at_the_same_cost():
    sizes = {"data": 128, "fsdp": 1, "tensor": 8}
    with_it, without = of_175b(**sizes), of_175b(**sizes, zero1=False)
    whole = ("gradients (ZeRO-1)", "gradients of layers (ZeRO-1)")
    in_float32 = [e.volume for e in with_it if e.purpose in whole]
    summed = [e.volume for e in without if e.kind == "all-reduce" and "data" in e.axis]
    assert sum(summed) == pytest.approx(2 * sum(in_float32), rel=1e-3)
    assert not [e for e in without if e.kind != "all-reduce" and e.axis == "data"]


def test_one_device_carries_nothing():
    config = use_architecture(Config(), "345m")
    assert traffic(workload(config, 1), parse_cluster("h100x1")) == ()
