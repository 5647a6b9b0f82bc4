"""The auxiliary values of a layer with experts, against loops in float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_layers import drawn

from maxmeg.layers.balance import dropped
from maxmeg.layers.context import Context
from maxmeg.layers.moe import MoeSpec
from maxmeg.ops.experts.routing import RoutingSpec
from maxmeg.parallel.trainable import trained

TOLERANCE = 1e-5  # relative, float32: the order of sums differs
B, L, D, E, K = 4, 6, 16, 8, 2
SPEC = MoeSpec(
    *(D, 24),
    routing=RoutingSpec(E, K),
    bias_balancing=True,
    bias_rate=0.5,
    aux_loss=0.5,
    sequence_aux_loss=0.25,
    global_aux_loss=0.125,
    z_loss=2.0,
    capacity=0.5,
)
WEIGHT = 0.25  # of a microbatch
LOAD = np.arange(E) + 1.0


def uneven(shares, counts, tokens) -> float:
    return E / (K * tokens**2) * sum(shares[:, e].sum() * counts[e] for e in range(E))


def expected(x_TD, router_DE) -> dict:
    logits = np.asarray(x_TD, np.float64) @ np.asarray(router_DE, np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    chosen = np.argsort(-logits, axis=1)[:, :K]
    counts = np.bincount(chosen.reshape(-1), minlength=E)
    limit = math.ceil(B * L * K / E * SPEC.capacity)
    seen, beyond = np.zeros(E), 0
    for expert in chosen.reshape(-1):
        seen[expert] += 1
        beyond += seen[expert] > limit
    rows = [slice(row * L, (row + 1) * L) for row in range(B)]
    each = [uneven(shares[r], np.bincount(chosen[r].reshape(-1), minlength=E), L) for r in rows]
    actual = {
        "load_balancing_loss": uneven(shares, counts, B * L),
        "seq_load_balancing_loss": np.mean(each),
        "global_load_balancing_loss": E * (shares.mean(0) * LOAD / LOAD.sum()).sum(),
        "z_loss": np.mean(np.log(np.exp(logits).sum(1)) ** 2),
    }
    copies = {name: B * L * K * loss for name, loss in actual.items()}
    return copies | {"expert_tokens": counts, "expert_dropped": beyond}


def test_auxiliary_values_are_the_losses_without_coefficients():
    """Summed over copies of tokens, whatever the weight of the microbatch; they set the state."""
    moe, x_BLD = drawn(SPEC.make, 0.5), np.random.default_rng(0).normal(size=(B, L, D))
    x_BLD = jnp.float32(x_BLD)
    moe.bias[...] = jnp.zeros(E)
    moe.load[...] = jnp.asarray(LOAD, jnp.float32)
    ctx = Context(jnp.zeros((B, L), int), microbatch_weight=WEIGHT)
    _, _, aux = jax.jit(lambda moe: moe(x_BLD, ctx))(moe)
    wanted = expected(x_BLD.reshape(-1, D), moe.router[...])
    assert aux.keys() == wanted.keys() and wanted["expert_dropped"] > 0
    for name, value in wanted.items():
        np.testing.assert_allclose(aux[name], value, rtol=TOLERANCE)
    moe.update(aux)
    counts = wanted["expert_tokens"]
    np.testing.assert_array_equal(moe.load[...], counts)
    np.testing.assert_array_equal(moe.bias[...], 0.5 * np.sign(counts.mean() - counts))
    assert not jax.tree.leaves(trained([moe.bias, moe.load]))


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_each_piece_of_the_sequence_drops_by_itself(pieces):
    experts = np.random.default_rng(0).integers(0, E, (B, L, K))
    length, beyond = L // pieces, 0
    limit = math.ceil(B * length * K / E * SPEC.capacity)
    for piece in range(pieces):
        part = experts[:, piece * length : (piece + 1) * length].reshape(-1)
        beyond += np.maximum(np.bincount(part, minlength=E) - limit, 0).sum()
    found = jax.jit(lambda experts_TK: dropped(experts_TK, B, pieces, SPEC))
    assert float(found(jnp.asarray(experts.reshape(-1, K)))) == beyond
