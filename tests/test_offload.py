"""Activations and optimizer state in pinned host memory: the same numbers as on the device."""

import jax
import numpy as np
import pytest
from layouts import controls, mesh_of, tiny, tiny_batch, tiny_state

from maxmeg.config.model import DType
from maxmeg.config.parallel import Schedule
from maxmeg.config.schema import Masters, Moments, OptimConfig, Optimizer
from maxmeg.parallel.host import HOST
from maxmeg.state import TrainState, to_arrays
from maxmeg.step import make_gradients, make_train_step

PIPED = {"fsdp": 1, "pipe": 2}
ACTIVATIONS = {
    "alone": ("minimal,offload:mlp_up,offload:attention_lse", {"fsdp": 1}),
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
    model, train = {"recompute": recompute, "num_layers": layers}, {"micro_batch_size": 4}
    config = tiny(model, train, **parallel)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    step = jax.jit(make_gradients(config, mesh, abstract.model))
    traced = step.trace(state.model, tiny_batch(config, mesh), state.key)
    found, _ = step(state.model, tiny_batch(config, mesh), state.key)
    named = {name: np.asarray(array) for name, array in to_arrays(found).items()}
    return named, str(traced.jaxpr)


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
    "adamw": ({}, {"fsdp": 1}),
    "piped": ({"masters": Masters.remainders, "moments": Moments.float8}, PIPED | {"data": 2}),
    "lion": ({"optimizer": Optimizer.lion, "moments": Moments.bfloat16}, {"fsdp": 2, "tensor": 2}),
    "sgd": ({"optimizer": Optimizer.sgd, "groups": ("embedding.*:2:1",)}, {"fsdp": 1}),
}


def steps(optim: dict, parallel: dict, offload: bool) -> tuple[TrainState, TrainState]:
    """(the state after two steps, the abstract state)."""
    model = {"num_layers": 2 * parallel.get("pipe", 1), "dtype": DType.bfloat16}
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
def test_offloaded_state_changes_no_bit_of_a_step(case):
    (found, abstract), (wanted, _) = (steps(*STATES[case], offload) for offload in (True, False))
    kinds = {name: array.sharding.memory_kind for name, array in to_arrays(found).items()}
    on_host = {name for name, kind in kinds.items() if kind == HOST}
    assert on_host == {
        name
        for name, array in to_arrays(abstract).items()
        if name.startswith(("optimizer", "remainders")) and array.ndim
    }
    assert on_host
    for name, array in to_arrays(wanted).items():
        np.testing.assert_array_equal(to_arrays(found)[name], array, err_msg=name)
