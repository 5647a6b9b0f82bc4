"""Muon's iterations against NumPy, and which columns are a matrix."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import tiny
from test_formulas import ITERATED, MUON, iterated

from maxmeg.config.optimizers import MuonConfig, NewtonSchulz
from maxmeg.layers.lora import linears
from maxmeg.models.lm import language_model
from maxmeg.ops.newton_schulz import COEFFICIENTS, coefficients, newton_schulz
from maxmeg.optim.muon import orthogonalized
from maxmeg.parallel.parameter import info, parameter

BFLOAT16 = 0.05  # of numbers up to 1: five iterations of products of three rounded matrices


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (3, 2, 7, 7)])
@pytest.mark.parametrize("name", NewtonSchulz)
def test_iterations_act_on_singular_values(name, shape):
    sets = COEFFICIENTS[name]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    actual = np.asarray(jax.jit(lambda x: newton_schulz(x, sets, "float32"))(x))
    expected = iterated(x, sets, len(sets))
    np.testing.assert_allclose(actual, expected, atol=ITERATED * np.abs(expected).max())
    assert 0.6 < np.linalg.svd(actual, compute_uv=False).mean() < 1.4


def test_bfloat16_is_close_and_zero_stays_zero():
    x = np.float32(np.random.default_rng(0).normal(size=(2, 16, 8)))
    x[1] = 0
    steps, dtypes = coefficients(NewtonSchulz.quintic, 5), ("bfloat16", "float32")
    rounded, exact = jax.jit(lambda x: [newton_schulz(x, steps, dtype) for dtype in dtypes])(x)
    assert rounded.dtype == jnp.float32
    np.testing.assert_allclose(rounded, exact, atol=BFLOAT16)
    assert not np.any(rounded[1])


@pytest.mark.parametrize("per_head", [False, True])
def test_each_part_of_a_head_is_a_matrix(per_head):
    """Two layers, three heads with parts of 4 and of 2 columns."""
    config = MuonConfig(per_head=per_head, **MUON)
    x = np.random.default_rng(0).normal(size=(2, 5, 18)).astype(np.float32)
    tree = {"stack": parameter(jnp.asarray(x), "embed", "heads", head_parts=(4, 2))}
    ends = [0, 4, 6, 10, 12, 16, 18] if per_head else [0, 18]
    sets = COEFFICIENTS[NewtonSchulz.quintic]
    blocks = [x[:, :, first:last] for first, last in itertools.pairwise(ends)]
    directions = [np.sqrt(block.shape[2] / 5) * iterated(block, sets, 5) for block in blocks]
    found = jax.jit(lambda tree: orthogonalized(tree, config, None, False))(tree)["stack"][...]
    np.testing.assert_allclose(found, np.concatenate(directions, axis=2), atol=ITERATED)


PARTS = {
    "attention gated_delta": {
        **{"attention.query": (4, 4), "attention.key": (4,), "attention.value": (4,)},
        **{"gated_delta.query": (5,), "gated_delta.key": (5,), "gated_delta.value": (7,)},
    },
    "mla mla": {"mla.query_up": (4, 2), "mla.kv_down": (6, 2), "mla.key_up": (4,)}
    | {"mla.value_up": (3,)},
}


@pytest.mark.parametrize("layers", PARTS)
def test_heads_of_projections_have_these_parts(layers):
    """With an output gate: a query and a gate; of latents, parts without and with rotation."""
    fields = {"layers": layers, "attention.head_dim": 4}
    if "mla" in layers:
        fields |= {
            "mla.kv_rank": 6,
            "mla.rotary_size": 2,
            "mla.query_rank": 10,
            "mla.value_size": 3,
        }
    else:
        fields |= {"attention.output_gate": True, "delta.num_heads": 2}
        fields |= {"delta.key_size": 5, "delta.value_size": 7}
    config, found = tiny(fields), {}
    model = jax.eval_shape(lambda key: language_model(key, config), jax.random.key(0))
    for path, linear in linears(model.stack).items():
        if parts := info(linear.weight).head_parts:
            assert linear.weight.shape[-1] % sum(parts) == 0
            found[".".join(path.split(".")[-2:])] = parts
    assert found == PARTS[layers]
