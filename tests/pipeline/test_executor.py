"""The executor: every schedule gives one device's loss and gradients; memory, FLOPs, reductions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layouts import (
    ALTERNATING,
    BATCH,
    CONVOLUTIONS,
    EVERYTHING,
    HYBRID,
    MLP_ONLY,
    SHARED_KEYS,
    assert_equal_but_rounding,
    controls,
    mesh_of,
    model_gradients,
    tiny,
    tiny_abstract,
    tiny_batch,
    tiny_state,
)

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import LaneOrder, ParallelConfig, Schedule
from maxmeg.config.schema import Config
from maxmeg.config.stages import units_of_chunks
from maxmeg.eval_step import make_eval_step
from maxmeg.layers.auxiliary import by_layer, over_devices
from maxmeg.parallel import collectives
from maxmeg.parallel.maxima import Max
from maxmeg.parallel.mesh import AXES, BATCH_AXES, MESH_AXES, make_mesh
from maxmeg.parallel.spmd import spmd
from maxmeg.pipeline.executor import run_pipeline
from maxmeg.pipeline.last_stage import from_last_stage
from maxmeg.pipeline.layout import arrange
from maxmeg.pipeline.program import Program
from maxmeg.pipeline.schedule import SCHEDULES
from maxmeg.planning import hlo
from maxmeg.planning.cost.communication import traffic
from maxmeg.planning.cost.flops import training_flops
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import parse_cluster
from maxmeg.step import make_train_step

TOLERANCE = 5e-6  # relative, float32: the order of sums differs
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
LAYERS = 8

MODELS = {
    "llama": {"attention.num_kv_heads": 1},
    "everything": EVERYTHING,
    "alternating": ALTERNATING,
    "convolutions": CONVOLUTIONS,
    "hybrid": HYBRID,
    "shared keys": SHARED_KEYS | {"vocab_size": 64},
    "experts": {"layers": "*(attention,moe)", "moe.num_experts": 8},
}
ORDERS = {
    "1f1b": {},
    "interleaved": {"chunks": 2},
    "zero_bubble": {"schedule": Schedule.zero_bubble},
    "together": {"lanes": LaneOrder.together},
}
ZERO1 = {"pipe": 2, "data": 2, "fsdp": 2}
UNITS = {"pipe": 2, "fsdp": 2, "tensor": 2, "chunk_layers": (2, 1)}
QUICK = [
    ("llama", {"pipe": 2, "fsdp": 2, "tensor": 2, "chunks": 2}, {"recompute": "full"}, 1),
    ("llama", ZERO1 | {"chunks": 2}, {}, 1),
    ("llama", {"pipe": 2, "tensor": 2, "pad_layers": True} | ORDERS["together"], {}, BATCH // 4),
]
SLOW = [  # model, layout, settings, rows of a microbatch
    # every schedule on two stages and on four
    ("llama", {"pipe": 2, "fsdp": 2}, {"recompute": "selective"}, 2),
    ("llama", {"pipe": 4, "fsdp": 1, "tensor": 2}, {"recompute": "full"}, 2),
    ("llama", {"pipe": 4, "fsdp": 1} | ORDERS["zero_bubble"], {"recompute": "selective"}, 4),
    # two microbatches without a pipeline and without a loop over layers: ticks follow each other
    ("llama", {"fsdp": 2}, {"scan_layers": False}, BATCH // 4),
    # what ZeRO-1 cuts is gathered in the first tick and scattered in the last, which may be the
    # same; stages that differ; one microbatch with a weight lane, which writes shards once
    ("llama", {"data": 2, "fsdp": 2}, {"recompute": "full"}, 2),
    ("llama", ZERO1 | ORDERS["zero_bubble"], {"recompute": "full"}, 1),
    ("llama", ZERO1 | ORDERS["zero_bubble"] | {"chunk_layers": (3, 5)}, {}, BATCH // 4),
    ("llama", {"pipe": 2, "data": 2, "fsdp": 1, "chunk_layers": (3, 5)}, {}, 1),
    # three units of several layers, the last shorter and a group of its own
    ("convolutions", UNITS, {}, 2),
    ("hybrid", UNITS | ORDERS["zero_bubble"], {}, 2),
    # arrays of the residual stream that a stage writes and the next one reads
    ("shared keys", UNITS | ORDERS["zero_bubble"], {}, 2),
    ("everything", {"pipe": 2, "fsdp": 1, "data": 2, "tensor": 2} | ORDERS["zero_bubble"], {}, 2),
    ("everything", {"pipe": 2, "data": 4, "fsdp": 1, "zero1": False}, {}, 1),
    ("everything", {"pipe": 4, "fsdp": 1, "chunks": 2, "pad_layers": True}, {"num_layers": 10}, 1),
    # both lanes in one loop: in chunks, without loops, with a weight lane, beside other groups
    ("llama", ZERO1 | {"chunks": 2} | ORDERS["together"], {"recompute": "full"}, 1),
    ("llama", {"fsdp": 2} | ORDERS["together"], {"scan_layers": False}, BATCH // 4),
    ("convolutions", UNITS | ORDERS["zero_bubble"] | ORDERS["together"], {}, 2),
    ("experts", {"fsdp": 2, "expert": 4} | ORDERS["together"], {}, 1),
    (
        "everything",
        {"pipe": 4, "fsdp": 1, "chunks": 2, "pad_layers": True} | ORDERS["together"],
        {"num_layers": 10},
        1,
    ),
]


@functools.cache
def one_device(model: str, **settings):
    return run(model, {"fsdp": 1}, settings, 0)


def run(model: str, parallel: dict, settings: dict, micro: int):
    """(loss, gradients by name in model order) of one batch."""
    fields = {"num_layers": LAYERS, **MODELS[model], **settings}
    train = {"z_loss": 1e-3, "micro_batch_size": micro}
    loss, gradients = model_gradients(tiny(fields, train, **parallel))
    return {"loss": loss}, gradients


@pytest.mark.parametrize(
    ("model", "parallel", "settings", "micro"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_schedule_equals_one_device(model, parallel, settings, micro):
    found = run(model, parallel, settings, micro)
    layers = {name: n for name, n in settings.items() if name == "num_layers"}
    assert_equal_but_rounding(found, one_device(model, **layers), TOLERANCE, FLOOR)


def toy_unit(weight, x_B, given, prevent_cse):
    """x * weight, which reports its input."""
    aux = {"total": jnp.sum(x_B), "largest": Max(jnp.max(x_B))}
    return x_B * weight, [{"toy": aux}]


@pytest.mark.parametrize("order", [*ORDERS, "one stage"])
def test_auxiliary_values_are_combined_by_their_kind(order):
    """Over microbatches, and over devices, in model order; stages that idle report nothing."""
    layers, stages = 5, 2 if order in ORDERS else 1
    parallel = ParallelConfig(pipe=stages, pad_layers=True, **ORDERS.get(order, {}))
    counts = units_of_chunks(ModelConfig(num_layers=layers), parallel)
    layout = arrange((layers,), stages, counts)
    sizes = dict.fromkeys(AXES, 1) | {"data": 2, "pipe": parallel.pipe}
    mesh = make_mesh(sizes, jax.devices()[: 2 * parallel.pipe])
    rng = np.random.default_rng(0)
    x_MB, weights_L = -1 - rng.random((4, 6)), 1 + rng.random(layers)

    def embed(outer, x_B):
        return collectives.counted_once(outer * x_B, (collectives.PIPE_AXIS,))

    def head(outer, output, y_B, later, microbatch):
        y_B = from_last_stage(y_B)
        return jnp.sum(y_B), {"loss_sum": jnp.sum(y_B)}

    def local(weights_S, x_MB):
        outer = jnp.ones(())
        program = Program(
            outer,
            (weights_S,),
            (None,),
            x_MB,
            embed,
            lambda x_B: x_B,
            toy_unit,
            lambda outer: outer,
            head,
        )
        together = parallel.lanes is LaneOrder.together
        schedule = SCHEDULES[parallel.schedule.value]
        table = schedule(4, parallel.pipe, parallel.chunks, together)
        _, _, aux = run_pipeline(program, table, layout)
        return {"stack_aux": over_devices(aux, MESH_AXES)}

    run = jax.jit(spmd(local, mesh, (P("pipe"), P(None, BATCH_AXES)), P()))
    places = weights_L[np.maximum(layout.orders[0], 0)]
    actual = by_layer(run(jnp.float32(places), jnp.float32(x_MB)))
    inputs = np.cumprod([1, *weights_L[:-1]])[:, None, None] * x_MB
    np.testing.assert_allclose(actual["total"], inputs.sum((1, 2)), rtol=TOLERANCE)
    np.testing.assert_allclose(actual["largest"], inputs.max((1, 2)), rtol=TOLERANCE)


@pytest.mark.parametrize(("chunks", "zero1"), [(1, True), (2, False)])
def test_a_step_learns_and_reduces_its_gradients_once(chunks, zero1):
    """Losses fall, one compilation; validation runs forwards alone and agrees."""
    parallel = {"pipe": 2, "data": 2, "fsdp": 1, "tensor": 2, "zero1": zero1, "chunks": chunks}
    config = tiny({"num_layers": 4}, {"micro_batch_size": 1}, **parallel)
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    evaluate = make_eval_step(config, mesh, abstract.model)
    batch, losses = tiny_batch(config, mesh), []
    text = step.lower(state, batch, controls(mesh)).compile().as_text()
    check_reductions(config, hlo.parse(text))
    for _ in range(3):
        sums = evaluate(state.model, batch)
        state, metrics = step(state, batch, controls(mesh))
        losses.append(float(metrics["loss"]))
        assert float(sums["loss_sum"] / sums["tokens"]) == pytest.approx(losses[-1], rel=TOLERANCE)
    assert losses == sorted(losses, reverse=True)
    assert step._cache_size() == evaluate._cache_size() == 1


def check_reductions(config: Config, program: hlo.Program) -> None:
    """Over the replicas: one collective for every set of axes, outside of loops. Under ZeRO-1 what
    the planner says: the gradients of layers in the last tick, weights once (here in float32)."""
    sizes = {"pipe": 2, "data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    rows = [row for row in hlo.collectives(program, sizes) if "data" in row.axes]
    large = [row for row in rows if row.volume > 128]
    if config.parallel.zero1:
        planned = traffic(workload(config, 8), parse_cluster("h100x8"))
        for kind, width in (("reduce-scatter", 1), ("all-gather", 2)):
            sent = sum(row.volume for row in planned if (row.kind, row.axis) == (kind, "data"))
            assert sum(row.volume for row in large if row.kind == kind) == width * sent > 0
    else:
        assert large and all(row.runs == row.instructions for row in large)
        assert {row.kind for row in large} == {"all-reduce"}
        # by sets of axes: what pipe and tensor shard, what one of them, what neither; the sums of
        # losses and tokens go with one of these, or alone
        assert len({row.axes for row in large}) == len(large)
        assert sum(row.instructions for row in large) <= len(large) + 1


def compiled(parallel: dict, microbatches: int, **model):
    """(config, the compiled train step) on a batch of `microbatches` a replica."""
    replicas = parallel.get("data", 1) * parallel["fsdp"]
    sizes = {"micro_batch_size": 1, "global_batch_size": microbatches * replicas}
    fields = {"hidden_size": 64, "num_layers": LAYERS, **model}
    config = tiny(fields, {**sizes, "loss_chunk": 512}, **parallel)
    config.data.sequence_length = 128
    mesh = mesh_of(config)
    optimizer, abstract = tiny_abstract(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    lowered = step.lower(abstract, tiny_batch(config, mesh), controls(mesh))
    return config, lowered.compile()


@pytest.mark.parametrize("zero1", [pytest.param(False, marks=pytest.mark.slow), True])
def test_without_a_pipeline_microbatches_add_no_collectives(zero1):
    """Gradients are reduced over the replicas after the last one, outside of their loop."""
    sent = []
    for microbatches in (1, 4):
        _, step = compiled({"data": 4, "fsdp": 1, "zero1": zero1}, microbatches, **MLP_ONLY)
        rows = hlo.collectives(hlo.parse(step.as_text()), {"data": 4})
        sent.append(sorted((row.kind, row.runs, row.volume // 128) for row in rows))
    assert sent[0] == sent[1]
    # all gradients together; sums of losses and of tokens
    assert zero1 or [row[:2] for row in sent[0]] == [("all-reduce", 1), ("all-reduce", 2)]


FOUR_STAGES = {"pipe": 4, "fsdp": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "few", "many", "least", "most"),
    [
        (FOUR_STAGES, 16, 256, 1, 1.01),
        (FOUR_STAGES | ORDERS["zero_bubble"], 16, 256, 1, 1.01),
        (FOUR_STAGES | ORDERS["together"], 16, 256, 1, 1.01),
        # two microbatches have no loop: the second's forward must wait for the first's backward
        ({"data": 2, "fsdp": 1}, 2, 4, 1 / 1.01, 1.01),
    ],
)
def test_memory_does_not_grow_with_microbatches(parallel, few, many, least, most):
    steps = (compiled(parallel, microbatches)[1] for microbatches in (few, many))
    first, second = (step.memory_analysis().temp_size_in_bytes for step in steps)
    assert least * first <= second <= most * first


def expected_flops(config: Config, microbatches: int) -> tuple[float, float]:
    """FLOPs of layers and head in the ticks of a schedule, summed over stages and tensor."""
    parallel, length = config.parallel, config.data.sequence_length
    model = training_flops(config.model, length, microbatches, parallel.tensor, causal=False)
    head = 6 * microbatches * length * config.model.hidden_size
    head *= config.model.padded_vocab_size(parallel.tensor, parallel.pipe)
    ticks = microbatches * parallel.chunks + parallel.pipe - 1  # in which a lane is on
    layers = (model - head) * ticks / (microbatches * parallel.chunks)
    if parallel.schedule is Schedule.zero_bubble:
        # the weight lane has no bubble; its products: all but attention's
        scores = 12 * microbatches * length**2 * config.model.hidden_size
        weights = (model - head - scores * LAYERS) / 3
        layers -= weights * (ticks / microbatches - 1)
    return layers, head


@pytest.mark.slow
def test_a_stage_runs_only_the_layers_that_it_holds():
    """Three layers of one kind on the first stage, five of another on the second: all products of
    layers stand in branches, whose collectives join devices of one stage. The slowest stage runs
    the FLOPs of five layers a tick, as the planner says, not those of all eight places."""
    mesh = {"pipe": 2, "fsdp": 2, "tensor": 2, "chunk_layers": (3, 5)}
    kinds = "3(attention+mlp) *(attention,mlp)"
    config, step = compiled(mesh | ORDERS["zero_bubble"], 8, layers=kinds)
    program = hlo.parse(step.as_text())
    inside = in_branches(program)
    sizes = {"pipe": 2, "data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    actual = {axis for row in hlo.collectives(inside, sizes) for axis in row.axes}
    assert actual == {"fsdp", "tensor"}
    held, places = workload(config, 8).layers_of_chunk, 8
    assert held == 5
    branches = hlo.matrix_flops(inside)
    counted = hlo.matrix_flops(program) - branches * (1 - held / places)
    layers, head = expected_flops(config, 8)
    expected = layers * 2 * held / LAYERS + head  # two stages as busy as the slowest
    assert expected <= counted * 4 <= 1.02 * expected


@pytest.mark.slow
def test_the_last_stage_alone_runs_the_mtp_layer():
    """In branches, whose collectives join devices of one stage: where the last stage has one layer
    less than the others, no stage waits for it. Outside: the losses of one more token."""
    mesh = {"pipe": 2, "fsdp": 2, "tensor": 2, "chunk_layers": (4, 3)}
    sizes = {"pipe": 2, "data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    inside, outside, expected = [], [], []
    for depths in (0, 1):
        fields = {"num_layers": 7, "mtp.num_layers": depths}
        config, step = compiled(mesh, 8, **fields)
        program = hlo.parse(step.as_text())
        branches = in_branches(program)
        rows = hlo.collectives(branches, sizes)
        assert {axis for row in rows for axis in row.axes} == {"fsdp", "tensor"}
        inside.append(hlo.matrix_flops(branches) * 4)
        outside.append(hlo.matrix_flops(program) * 8 - inside[-1] * 2)
        expected.append(training_flops(config.model, 128, 16, 2, causal=False))
    head = 6 * 16 * 128 * 64 * config.model.padded_vocab_size(2, 2)
    assert outside[1] - outside[0] == pytest.approx(head, rel=0.02)
    assert inside[1] - inside[0] == pytest.approx(expected[1] - expected[0] - head, rel=0.02)


def in_branches(program: hlo.Program) -> hlo.Program:
    """The computations that conditionals call, also through others."""
    pending = [i for _, i, _ in program.instructions() if i.opcode == "conditional"]
    names: set[str] = set()
    while pending:
        for name in hlo.callees(pending.pop()):
            if name not in names:
                names.add(name)
                pending += program.computations[name]
    computations = {name: program.computations[name] for name in names}
    return dataclasses.replace(program, computations=computations)
