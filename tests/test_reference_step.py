"""The training step against the one that maxmeg/reference_step.py spells out."""

import functools

import jax
import numpy as np
import pytest
from layouts import DROPOUT, controls, mesh_of, tiny, tiny_batch, tiny_state

from maxmeg.checkpoint.names import to_arrays
from maxmeg.config.mixers import ExpertBackend
from maxmeg.reference_step import reference_step
from maxmeg.step import make_train_step

TOLERANCE = 1e-5  # of an array's largest number, float32: the order of sums differs
MTP = "experts that predict two tokens"
MODELS = {
    "dropout": DROPOUT,
    MTP: {
        "layers": "*(attention,moe)",
        "moe.bias_balancing": True,
        "moe.backend": ExpertBackend.xla,
        "mtp.num_layers": 1,
    },
}


@pytest.mark.parametrize("name", ["dropout", pytest.param(MTP, marks=pytest.mark.slow)])
def test_a_step_is_that_of_the_reference(name):
    config = tiny(MODELS[name], {"micro_batch_size": 2}, fsdp=1)
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    batch, given = tiny_batch(config, mesh), controls(mesh)
    rates = {rate: given[rate] for rate in ("learning_rate", "weight_decay")}
    reference = jax.jit(functools.partial(reference_step, config, optimizer))
    wanted = reference(state, batch, **rates)
    state, metrics = make_train_step(config, mesh, optimizer, abstract)(state, batch, given)
    found = to_arrays(state), {metric: metrics[metric] for metric in wanted[1]}
    for array, other in zip(
        jax.tree.leaves(found), jax.tree.leaves((to_arrays(wanted[0]), wanted[1])), strict=True
    ):
        limit = TOLERANCE * np.abs(np.asarray(other)).max()
        np.testing.assert_allclose(array, other, rtol=0, atol=limit)
