"""Activations and optimizer state in pinned host memory: the same numbers as on the device."""

import jax
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_batch, tiny_state

from maxmeg.config.parallel import Schedule
from maxmeg.state import to_arrays
from maxmeg.step import make_gradients

PIPED = {"fsdp": 1, "pipe": 2}
ACTIVATIONS = {
    "alone": ("minimal,offload:mlp_up,offload:attention_lse", {"fsdp": 1}),
    "padded stages": ("selective,offload:mlp_gate", PIPED | {"pad_layers": True}),
    "weight lane": ("offload:minimal", PIPED | {"schedule": Schedule.zero_bubble}),
    "sharded": ("offload:selective", {"fsdp": 2, "tensor": 2}),
}


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


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.slow] * (i > 0)) for i, name in enumerate(ACTIVATIONS)],
)
def test_offloaded_activations_change_no_gradient(case):
    recompute, parallel = ACTIVATIONS[case]
    (found, text), (wanted, other) = (
        gradients(words, parallel) for words in (recompute, recompute.replace("offload:", ""))
    )
    assert "<host>" in text and "<host>" not in other
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
