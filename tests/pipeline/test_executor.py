"""The executor: every schedule gives one device's loss and gradients; memory, FLOPs, reductions."""

import contextlib
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
    controls,
    mesh_of,
    tiny,
    tiny_abstract,
    tiny_batch,
    tiny_state,
)

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig, Schedule
from maxmeg.config.recompute import POLICIES
from maxmeg.config.schema import Config
from maxmeg.config.stages import units_of_chunks
from maxmeg.layers.auxiliary import by_layer, over_devices
from maxmeg.layers.mlp import Mlp
from maxmeg.parallel import collectives
from maxmeg.parallel.maxima import Max
from maxmeg.parallel.mesh import AXES, BATCH_AXES, MESH_AXES, make_mesh
from maxmeg.parallel.rules import Reduction
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
from maxmeg.state import to_arrays
from maxmeg.step import make_eval_step, make_gradients, make_train_step

TOLERANCE = 5e-6  # relative, float32: the order of sums differs
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
LAYERS = 8
UNCUT = Reduction(None, ())

MODELS = {
    "llama": {"attention.num_kv_heads": 1},
    "everything": EVERYTHING,
    "alternating": ALTERNATING,
    "convolutions": CONVOLUTIONS,
    "hybrid": HYBRID,
}
ORDERS = {
    "gpipe": {"schedule": Schedule.gpipe},
    "1f1b": {},
    "interleaved": {"chunks": 2},
    "zero_bubble": {"schedule": Schedule.zero_bubble},
}
MESHES = [
    {"pipe": 2, "fsdp": 1, "tensor": 2},
    {"pipe": 2, "fsdp": 2},
    {"pipe": 2, "fsdp": 2, "tensor": 2},
    {"pipe": 4, "fsdp": 1},
    {"pipe": 4, "fsdp": 1, "tensor": 2},
    {"pipe": 4, "fsdp": 2},
]


def grid() -> list:
    """Every schedule on a mesh of two stages and one of four; recompute modes and 1, 2 or 4
    microbatches a stage in turn. One microbatch with a weight lane, which writes shards of ZeRO-1
    once, on stages that differ; two without a pipeline and without a loop over layers, whose ticks
    follow each other."""
    zero1 = {"pipe": 2, "data": 2, "fsdp": 2, "chunk_layers": (3, 5)}
    once = ("llama", zero1 | ORDERS["zero_bubble"], {}, BATCH // 4)
    twice = ("llama", {"fsdp": 2}, {"scan_layers": False}, BATCH // 4)
    cases: list = [pytest.param(*case, marks=pytest.mark.slow) for case in (once, twice)]
    for i, (order, settings) in enumerate(ORDERS.items()):
        for j, mesh in enumerate([MESHES[i % 3], MESHES[3 + i % 3]]):
            recompute = list(POLICIES)[(i + j) % 3]
            rounds = (1, 2, 4)[(i + j // 2) % 3]
            micro = BATCH // (mesh["pipe"] * rounds * mesh["fsdp"])
            if micro * mesh["pipe"] * rounds * mesh["fsdp"] == BATCH:
                kept = order == "interleaved" and j == 0  # the one among the quick tests
                case = ("llama", mesh | settings, {"recompute": recompute}, micro)
                cases.append(case if kept else pytest.param(*case, marks=pytest.mark.slow))
    return cases


def layer_by_layer() -> list:
    """One, two and four microbatches without a pipeline; every schedule; stages that differ."""
    uneven = {"pipe": 2, "fsdp": 1, "chunk_layers": (3, 5)}
    slow = [
        ({"fsdp": 2}, {"recompute": "full"}, 2),
        ({"pipe": 2, "fsdp": 2} | ORDERS["zero_bubble"], {}, 1),
        (uneven, {}, 1),
    ]
    quick = ("llama", {"pipe": 2, "fsdp": 2} | ORDERS["interleaved"], {}, 1)
    return [quick, *(pytest.param("llama", *case, marks=pytest.mark.slow) for case in slow)]


MIXED = [
    ({"pipe": 2, "fsdp": 1, "data": 2, "tensor": 2, "schedule": Schedule.zero_bubble}, 2),
    ({"pipe": 2, "data": 4, "fsdp": 1, "zero1": False, "chunk_layers": (3, 5)}, 1),
    ({"pipe": 4, "fsdp": 1, "chunks": 2, "pad_layers": True}, 1),
]


@contextlib.contextmanager
def reporting_mlps():
    """MLPs report the sum of squares of their inputs and the largest negative one of a token."""
    plain = Mlp.__call__

    def call(self, h_BLD, ctx, cache=None):
        squares_BL = jnp.sum(jnp.square(h_BLD), axis=-1)
        aux = {"squares": jnp.sum(squares_BL), "largest": Max(jnp.max(-squares_BL))}
        return *plain(self, h_BLD, ctx, cache)[:2], aux

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mlp, "__call__", call)
        yield


def run(model: str, parallel: dict, settings: dict, micro: int, layers: int = LAYERS):
    """(loss, gradients and auxiliary values by name in model order) of one batch."""
    fields = {"num_layers": layers, **MODELS[model], **settings}
    config = tiny(fields, {"z_loss": 1e-3, "micro_batch_size": micro}, **parallel)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    function = jax.jit(make_gradients(config, mesh, abstract.model))
    with reporting_mlps():
        actual, sums = function(state.model, tiny_batch(config, mesh), state.key)
    layout = abstract.model.stack.layout
    arrays = {name: np.asarray(rows) for name, rows in by_layer(sums).items()}
    for name, array in to_arrays(actual).items():
        array = np.asarray(array)
        if name.startswith("stack."):
            group = int(name.split(".")[2])
            skipped = np.array(layout.orders[group]) < 0
            assert not array[skipped].any(), name
            array = array[layout.places(group)]
        arrays[name] = array
    return float(sums["loss_sum"] / sums["tokens"]), arrays


@functools.cache
def one_device(model: str, layers: int = LAYERS):
    return run(model, {"fsdp": 1}, {}, 0, layers)


def check_equal(actual, expected) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert actual[1].keys() == expected[1].keys()
    for name, a in actual[1].items():
        b = expected[1][name]
        rows = min(len(a), len(b))  # the padding of the vocabulary differs
        assert not a[rows:].any() and not b[rows:].any()
        error = np.abs(a[:rows] - b[:rows]).max()
        assert error <= TOLERANCE * np.abs(b).max() + FLOOR, name


@pytest.mark.parametrize(("model", "parallel", "settings", "micro"), grid())
def test_schedule_equals_one_device(model, parallel, settings, micro):
    check_equal(run(model, parallel, settings, micro), one_device(model))


def toy_unit(weight, x_B, given, prevent_cse):
    """x * weight, which reports its input."""
    aux = {"total": jnp.sum(x_B), "largest": Max(jnp.max(x_B))}
    return x_B * weight, [{"toy": aux}]


@pytest.mark.parametrize("layers", [pytest.param(4, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("order", [*ORDERS, "one stage"])
def test_auxiliary_values_are_combined_by_their_kind(order, layers):
    """Over microbatches, and over devices, in model order; stages that idle report nothing."""
    is_piped = order in ORDERS
    parallel = ParallelConfig(pipe=2, pad_layers=True, **ORDERS.get(order, {}))
    if not is_piped:
        parallel.pipe = 1
    layout = arrange(
        (layers,), parallel.pipe, units_of_chunks(ModelConfig(num_layers=layers), parallel)
    )
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
            (UNCUT,),
            x_MB,
            embed,
            lambda x_B: x_B,
            toy_unit,
            lambda outer: outer,
            head,
        )
        table = SCHEDULES[parallel.schedule.value](4, parallel.pipe, parallel.chunks)
        _, _, aux = run_pipeline(program, table, layout)
        return {"stack_aux": over_devices(aux, MESH_AXES)}

    run = jax.jit(spmd(local, mesh, (P("pipe"), P(None, BATCH_AXES)), P()))
    places = weights_L[np.maximum(layout.orders[0], 0)]
    actual = by_layer(run(jnp.float32(places), jnp.float32(x_MB)))
    inputs = np.cumprod([1, *weights_L[:-1]])[:, None, None] * x_MB
    np.testing.assert_allclose(actual["total"], inputs.sum((1, 2)), rtol=TOLERANCE)
    np.testing.assert_allclose(actual["largest"], inputs.max((1, 2)), rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "order"),
    [
        ("convolutions", "gpipe"),
        ("hybrid", "zero_bubble"),
    ],
)
def test_units_of_several_layers_equal_one_device(model, order):
    """Three units, the last shorter and a group of its own, on two stages."""
    mesh = {"pipe": 2, "fsdp": 2, "tensor": 2, "chunk_layers": (2, 1)} | ORDERS[order]
    check_equal(run(model, mesh, {}, 2), one_device(model))


@pytest.mark.parametrize(("model", "parallel", "settings", "micro"), layer_by_layer())
def test_what_zero1_cuts_layer_by_layer_equals_one_device(model, parallel, settings, micro):
    """Gathered in the first tick and scattered in the last, which may be the same."""
    check_equal(run(model, {"data": 2} | parallel, settings, micro), one_device(model))


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "micro"), MIXED)
def test_everything_equals_one_device(parallel, micro):
    layers = 10 if parallel.get("pad_layers") else LAYERS
    check_equal(run("everything", parallel, {}, micro, layers), one_device("everything", layers))


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_evaluation_and_learning(chunks):
    """Losses fall, one compilation; validation runs forwards alone and agrees."""
    train = {"micro_batch_size": 1}
    config = tiny({"num_layers": 4}, train, pipe=2, fsdp=2, tensor=2, chunks=chunks)
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    evaluate = make_eval_step(config, mesh, abstract.model)
    batch, losses = tiny_batch(config, mesh), []
    for _ in range(4):
        sums = evaluate(state.model, batch)
        state, metrics = step(state, batch, controls(mesh))
        losses.append(float(metrics["loss"]))
        assert float(sums["loss_sum"] / sums["tokens"]) == pytest.approx(losses[-1], rel=TOLERANCE)
    assert losses == sorted(losses, reverse=True)
    assert step._cache_size() == evaluate._cache_size() == 1


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


def temporary(schedule: dict, microbatches: int) -> int:
    step = compiled({"pipe": 4, "fsdp": 1, **schedule}, microbatches)[1]
    return step.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("order", ["1f1b", "zero_bubble"])
def test_memory_does_not_grow_with_microbatches(order):
    sizes = [temporary(ORDERS[order], rounds * 4) for rounds in (4, 64)]
    assert max(sizes) < 1.01 * min(sizes)


@pytest.mark.slow
def test_ticks_of_zero1_do_not_overlap():
    """Two microbatches have no loop: forward of the second must wait for backward of the first."""
    two, four = (compiled({"data": 2, "fsdp": 1}, microbatches)[1] for microbatches in (2, 4))
    sizes = [step.memory_analysis().temp_size_in_bytes for step in (two, four)]
    assert max(sizes) < 1.01 * min(sizes)


@pytest.mark.slow
def test_memory_of_gpipe_grows():
    few, many = (temporary(ORDERS["gpipe"], rounds * 4) for rounds in (4, 16))
    assert many > 2 * few


@pytest.mark.slow
@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zero_bubble"])
def test_flops_are_the_models_times_the_ticks(order):
    """No product is made twice, and a bubble costs its ticks alone."""
    config, step = compiled({"pipe": 4, "fsdp": 1, **ORDERS[order]}, 16)
    counted = hlo.matrix_flops(hlo.parse(step.as_text())) * 4
    expected = sum(expected_flops(config, 16))
    assert expected <= counted <= 1.02 * expected


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


@pytest.mark.parametrize("zero1", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_are_reduced_once(zero1):
    """Over the replicas: one collective for every set of axes, outside of loops. Under ZeRO-1 what
    the planner says: the gradients of layers in the last tick."""
    parallel = {"pipe": 2, "data": 2, "fsdp": 1, "tensor": 2, "zero1": zero1}
    config, step = compiled(parallel, 8)
    sizes = {"pipe": 2, "data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    actual = [
        c
        for c in hlo.collectives(hlo.parse(step.as_text()), sizes)
        if "data" in c.axes and c.volume > 64 and c.kind != "all-gather"
    ]
    if zero1:
        rows = traffic(workload(config, 8), parse_cluster("h100x8"))
        sent = [r.volume for r in rows if (r.kind, r.axis) == ("reduce-scatter", "data")]
        found = [row.volume for row in actual if row.kind == "reduce-scatter"]
        assert (
            sum(found) == sum(sent) > 0
        )  # of two devices each sends the half that it does not keep
    else:
        assert actual and all(c.runs == c.instructions for c in actual)
        assert {c.kind for c in actual} == {"all-reduce"}
        # by sets of axes: what pipe and tensor shard, what one of them, what neither; the sums of
        # losses and tokens go with one of these, or alone
        assert len({c.axes for c in actual}) == len(actual)
        assert sum(c.instructions for c in actual) <= len(actual) + 1


def test_every_schedule_of_the_settings_has_a_table():
    assert SCHEDULES.keys() == {schedule.value for schedule in Schedule}
