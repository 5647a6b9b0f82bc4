"""Activations and optimizer state in pinned host memory: the same numbers as on the device."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from layouts import (
    MLP_ONLY,
    controls,
    mesh_of,
    named_gradients,
    of,
    tiny,
    tiny_batch,
    tiny_state,
)

from maxmeg.checkpoint.names import to_arrays
from maxmeg.config.model import DType
from maxmeg.config.optimizers import EmaConfig, QkClipConfig
from maxmeg.config.parallel import Schedule
from maxmeg.config.schema import Masters, Moments, OptimConfig, Optimizer
from maxmeg.config.setting import with_fields
from maxmeg.optim import update
from maxmeg.planning.analytic import analyze
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.search import search
from maxmeg.processes.host import HOST, check_host_memory, is_on_host
from maxmeg.state import TrainState, evaluated_model
from maxmeg.step import make_gradients, make_train_step

PIPED = {"fsdp": 1, "pipe": 2}
ACTIVATIONS = {
    "alone": ("minimal,offload:mlp_up,offload:query", {"fsdp": 1}),
    "padded stages": ("selective,offload:mlp_gate", PIPED | {"pad_layers": True}),
    "weight lane": ("offload:minimal", PIPED | {"schedule": Schedule.zero_bubble}),
    "sharded": ("offload:selective", {"fsdp": 2, "tensor": 2}),
}


def quick_first(cases: dict) -> list:
    """Only the first is among the quick tests."""
    first, *others = cases
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


def gradients(recompute: str, parallel: dict) -> tuple[dict[str, np.ndarray], str]:
    """(gradients by name, text of the traced program) of one batch."""
    layers = 3 if "pad_layers" in parallel else 2 * parallel.get("pipe", 1)
    micro = 4 * ("pipe" in parallel)
    model, train = {"recompute": recompute, "num_layers": layers}, {"micro_batch_size": micro}
    config = tiny(model, train, **parallel)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    step = jax.jit(make_gradients(config, mesh, abstract.model))
    batch = tiny_batch(config, mesh)
    traced = step.trace(state.model, batch, state.key)
    found, _ = step(state.model, batch, state.key)
    return named_gradients(found), str(traced.jaxpr)


@pytest.mark.parametrize("case", quick_first(ACTIVATIONS))
def test_offloaded_activations_change_no_gradient(case):
    recompute, parallel = ACTIVATIONS[case]
    (found, text), (wanted, other) = (
        gradients(words, parallel) for words in (recompute, recompute.replace("offload:", ""))
    )
    assert "<host>" in text and "<host>" not in other
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


STATES = {
    "adamw": ({}, {"fsdp": 1}),  # of a model without attention: it is compiled faster
    "piped": ({"masters": Masters.remainders, "moments": Moments.float8}, PIPED | {"data": 2}),
    "muon": ({"optimizer": Optimizer.muon, "ema": EmaConfig(0.9)}, {"fsdp": 2, "tensor": 2}),
    "soap": ({"optimizer": Optimizer.soap}, {"fsdp": 2, "tensor": 2}),
    "clipped": (
        {"qk_clip": QkClipConfig(1e-3), "ema": EmaConfig(0.9), "masters": Masters.remainders},
        PIPED | {"fsdp": 2},
    ),
    "sgd": (
        {"optimizer": Optimizer.sgd, "groups": ("embedding.*:2:1",), "ema": EmaConfig(0.9)},
        {"fsdp": 1},
    ),
}


def steps(optim: dict, parallel: dict, offload: bool) -> tuple[TrainState, TrainState]:
    """(the state after two steps, the abstract state)."""
    model = {"num_layers": 2 * parallel.get("pipe", 1), "dtype": DType.bfloat16}
    model |= {} if optim else MLP_ONLY
    config = tiny(model, {"micro_batch_size": 4}, **parallel)
    config.optim = OptimConfig(offload=offload, **optim)
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    for seed in range(2):
        before = state
        state, metrics = step(state, tiny_batch(config, mesh, seed), controls(mesh))
        assert all(array.is_deleted() for array in jax.tree.leaves(before))
    assert not metrics["skipped"]
    return state, abstract


@pytest.mark.parametrize("case", quick_first(STATES))
def test_offloaded_state_changes_no_bit_of_a_step(case, monkeypatch):
    optim, parallel = STATES[case]
    found, abstract = steps(optim, parallel, True)
    monkeypatch.setattr(update, "IN_LOOP", ())  # all layers at once
    wanted, _ = steps(optim, parallel, False)
    kinds = {name: array.sharding.memory_kind for name, array in to_arrays(found).items()}
    on_host = {name for name, kind in kinds.items() if kind == HOST}
    moved = ["optimizer", "remainders", "ema", *(["model"] if found.remainders is None else [])]
    assert on_host == {
        name
        for name, array in to_arrays(abstract).items()
        if name.startswith(tuple(moved)) and array.ndim
    }
    for name, array in to_arrays(wanted).items():
        np.testing.assert_array_equal(to_arrays(found)[name], array, err_msg=name)
    (read, expected) = (evaluated_model(state, bool(found.ema)) for state in (found, wanted))
    assert not any(map(is_on_host, jax.tree.leaves(read)))
    jax.tree.map(np.testing.assert_array_equal, read, expected)


def test_offloading_what_no_layer_stores_is_an_error():
    with pytest.raises(ValueError, match=r"offloads ssm_gate, which no layer .* key, .*mlp_up"):
        gradients("minimal,offload:ssm_gate", {"fsdp": 1})


def test_devices_without_pinned_host_memory_are_named():
    kinds = [SimpleNamespace(kind="device"), SimpleNamespace(kind="unpinned_host")]
    device = SimpleNamespace(platform="tpu", addressable_memories=lambda: kinds)
    mesh = SimpleNamespace(devices=np.array([device], object))
    with pytest.raises(ValueError, match=r"tpu devices have only device, unpinned_host: set optim"):
        check_host_memory(mesh)  # pyright: ignore[reportArgumentType]


def test_a_plan_moves_bytes_from_the_device_to_the_host():
    """All of what is offloaded, and nothing else."""
    whole, cluster = of("llama3-8b", 8, 1, 1, fsdp=8), parse_cluster("h100x8")
    whole.optim.ema.decay = 0.9
    before, model = analyze(whole, cluster), whole.model
    tokens, layers = whole.data.sequence_length, model.num_layers
    sizes = {"activations": layers * tokens * model.ffn * 2}
    masters = before.memory["master weights"]
    sizes["optimizer state"] = masters + before.memory["optimizer"]
    for path, value, name in (
        ("model.recompute", "minimal,offload:mlp_up", "activations"),
        ("optim.offload", True, "optimizer state"),
    ):
        after = analyze(with_fields(whole, {path: value}), cluster)
        assert before.host_memory == {} and after.host_memory == {name: sizes[name]}
        assert before.total - after.total == sizes[name]
        added = after.step_seconds - before.step_seconds
        assert added == pytest.approx(after.offload_seconds)
    moved = masters + 2 * sizes["optimizer state"]  # masters are also read at the step's start
    assert added == pytest.approx(moved / cluster.host_rate)


@pytest.mark.parametrize(("count", "offload"), [(4, False), (2, True)])
def test_a_search_offloads_only_where_nothing_fits_otherwise(count, offload):
    found = search(of("llama3-8b", count, 1, 8, fsdp=count), parse_cluster(f"h100x{count}"))
    assert {one.settings["optim.offload"] for one in found} == {offload}
