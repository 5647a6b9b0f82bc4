"""The executor: every schedule gives one device's loss and gradients; memory, FLOPs, reductions."""

import functools

import jax
import numpy as np
import pytest
from layouts import (
    ALTERNATING,
    BATCH,
    EVERYTHING,
    controls,
    mesh_of,
    tiny,
    tiny_batch,
    tiny_state,
)

from maxmeg.config.model import Recompute
from maxmeg.config.schema import Schedule
from maxmeg.pipeline.schedule import SCHEDULES
from maxmeg.planning import hlo
from maxmeg.planning.flops import training_flops
from maxmeg.state import to_arrays
from maxmeg.step import make_eval_step, make_gradients, make_train_step

TOLERANCE = 5e-6  # relative, float32: the order of sums differs
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
LAYERS = 8

MODELS = {
    "llama": {},
    "everything": EVERYTHING,
    "alternating": ALTERNATING,
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
    """Every schedule on every mesh of two stages and one of four; recompute modes and 1, 2 or 4
    microbatches a stage in turn."""
    cases = []
    for i, (order, settings) in enumerate(ORDERS.items()):
        for j, mesh in enumerate([*MESHES[:3], MESHES[3 + i % 3]]):
            recompute = list(Recompute)[(i + j) % 3]
            rounds = (1, 2, 4)[(i + j // 2) % 3]
            micro = BATCH // (mesh["pipe"] * rounds * mesh["fsdp"])
            if micro * mesh["pipe"] * rounds * mesh["fsdp"] == BATCH:
                kept = order == "zero_bubble" and j == 2  # the one among the quick tests
                case = ("llama", mesh | settings, {"recompute": recompute}, micro)
                cases.append(case if kept else pytest.param(*case, marks=pytest.mark.slow))
    return cases


MIXED = [
    ({"pipe": 2, "fsdp": 1, "data": 2, "tensor": 2, "schedule": Schedule.zero_bubble}, 2),
    ({"pipe": 2, "fsdp": 2, "tensor": 2, "chunks": 2}, 2),
    ({"pipe": 2, "data": 4, "fsdp": 1, "zero1": False, "chunk_layers": (3, 5)}, 1),
    ({"pipe": 4, "fsdp": 1, "chunks": 2, "pad_layers": True}, 1),
]


def run(model: str, parallel: dict, settings: dict, micro: int, layers: int = LAYERS):
    """(loss, gradients by name in model order) of one batch."""
    fields = {"num_layers": layers, **MODELS[model], **settings}
    config = tiny(fields, {"z_loss": 1e-3, "micro_batch_size": micro}, **parallel)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    function = jax.jit(make_gradients(config, mesh, abstract.model))
    found, sums = function(state.model, tiny_batch(config, mesh), state.key)
    layout = abstract.model.stack.layout
    arrays = {}
    for name, array in to_arrays(found).items():
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


def check_equal(found, expected) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert found[1].keys() == expected[1].keys()
    for name, a in found[1].items():
        b = expected[1][name]
        rows = min(len(a), len(b))  # the padding of the vocabulary differs
        assert not a[rows:].any() and not b[rows:].any()
        error = np.abs(a[:rows] - b[:rows]).max()
        assert error <= TOLERANCE * np.abs(b).max() + FLOOR, name


@pytest.mark.parametrize(("model", "parallel", "settings", "micro"), grid())
def test_schedule_equals_one_device(model, parallel, settings, micro):
    check_equal(run(model, parallel, settings, micro), one_device(model))


@pytest.mark.slow
def test_units_of_several_layers_equal_one_device():
    """Three units, the last shorter and a group of its own, on two stages."""
    mesh = {"pipe": 2, "fsdp": 1, "tensor": 2, "chunk_layers": (2, 1)}
    check_equal(run("alternating", mesh, {}, 2), one_device("alternating"))


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "micro"), MIXED)
def test_everything_equals_one_device(parallel, micro):
    layers = 10 if parallel.get("pad_layers") else LAYERS
    check_equal(run("everything", parallel, {}, micro, layers), one_device("everything", layers))


@pytest.mark.parametrize("chunks", [1, 2])
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
    optimizer, abstract, _ = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    lowered = step.lower(abstract, tiny_batch(config, mesh), controls(mesh))
    return config, lowered.compile()


def temporary(schedule: dict, microbatches: int) -> int:
    step = compiled({"pipe": 4, "fsdp": 1, **schedule}, microbatches)[1]
    return step.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zero_bubble"])
def test_memory_does_not_grow_with_microbatches(order):
    sizes = [temporary(ORDERS[order], rounds * 4) for rounds in (4, 64)]
    assert max(sizes) < 1.01 * min(sizes)


@pytest.mark.slow
def test_memory_of_gpipe_grows():
    few, many = (temporary(ORDERS["gpipe"], rounds * 4) for rounds in (4, 16))
    assert many > 2 * few


@pytest.mark.slow
@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zero_bubble"])
def test_flops_are_the_models_times_the_ticks(order):
    """No product is made twice, and a bubble costs its ticks alone."""
    microbatches, stages = 16, 4
    parallel = {"pipe": stages, "fsdp": 1, **ORDERS[order]}
    config, step = compiled(parallel, microbatches)
    counted = hlo.matrix_flops(hlo.parse(step.as_text())) * stages
    size = (config.model, config.data.sequence_length, microbatches)
    model = training_flops(*size, tensor=1, causal=False)
    head = 6 * microbatches * config.data.sequence_length
    head *= config.model.hidden_size * config.model.padded_vocab_size(1, stages)
    chunks = config.parallel.chunks
    ticks = microbatches * chunks + stages - 1  # in which a lane is on
    layers = (model - head) * ticks / (microbatches * chunks)
    if order == "zero_bubble":  # the weight lane has no bubble; its products: all but attention's
        scores = 12 * microbatches * config.data.sequence_length**2 * config.model.hidden_size
        weights = (model - head - scores * LAYERS) / 3
        layers -= weights * (ticks / microbatches - 1)
    assert layers + head <= counted <= 1.02 * (layers + head)


@pytest.mark.parametrize("zero1", [False, True])
def test_gradients_are_reduced_once(zero1):
    """Over the replicas: one collective for every set of axes, outside of loops."""
    parallel = {"pipe": 2, "data": 2, "fsdp": 1, "tensor": 2, "zero1": zero1}
    _, step = compiled(parallel, 8)
    sizes = {"pipe": 2, "data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    found = [
        c
        for c in hlo.collectives(hlo.parse(step.as_text()), sizes)
        if "data" in c.axes and c.volume > 64 and c.kind != "all-gather"
    ]
    assert found and all(c.runs == c.instructions for c in found)
    if not zero1:
        assert {c.kind for c in found} == {"all-reduce"}
        # by sets of axes: what pipe and tensor shard, what one of them, what neither; the sums of
        # losses and tokens go with one of these, or alone
        assert len({c.axes for c in found}) == len(found)
        assert sum(c.instructions for c in found) <= len(found) + 1


def test_every_schedule_of_the_settings_has_a_table():
    assert SCHEDULES.keys() == {schedule.value for schedule in Schedule}
