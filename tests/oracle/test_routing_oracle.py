"""Experts, weights and losses are those of megatron-core's router functions."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxmeg.ops.experts.dispatch import capacity_of, count_values, places_in_experts
from maxmeg.ops.experts.routing import (
    RoutingSpec,
    Score,
    balance_loss,
    balance_scores,
    route,
    sinkhorn,
    updated_bias,
    z_loss,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its imports say of optional packages
    from megatron.core.transformer.moe import moe_utils

TOLERANCE = 1e-6
TOKENS, EXPERTS = 200, 32
CASES = [
    ("softmax", RoutingSpec(EXPERTS, 2)),
    ("softmax", RoutingSpec(EXPERTS, 6, softmax_before_topk=True)),
    (
        "softmax",
        RoutingSpec(EXPERTS, 6, softmax_before_topk=True, scale=2.5, num_groups=8, topk_groups=3),
    ),
    ("sigmoid", RoutingSpec(EXPERTS, 1, Score.sigmoid, normalize_weights=True)),
    (
        "sigmoid",
        RoutingSpec(
            EXPERTS,
            8,
            Score.sigmoid,
            normalize_weights=True,
            scale=2.5,
            num_groups=8,
            topk_groups=4,
        ),
    ),
]


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(TOKENS, EXPERTS)).astype(np.float32)


def dense(experts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[T, E], zero where not chosen."""
    actual = np.zeros((TOKENS, EXPERTS), values.dtype)
    np.put_along_axis(actual, experts, values, axis=1)
    return actual


@pytest.mark.parametrize(("score", "spec"), CASES)
def test_choice_weights_and_loss_equal_megatrons(score, spec):
    rows = logits()
    bias = np.linspace(-0.1, 0.1, EXPERTS, dtype=np.float32) if score == "sigmoid" else None
    grouped = (spec.num_groups, spec.topk_groups) if spec.num_groups > 1 else (None, None)
    weights, chosen = moe_utils.topk_routing_with_score_function(
        torch.tensor(rows),
        spec.top_k,
        use_pre_softmax=spec.softmax_before_topk,
        num_groups=grouped[0],
        group_topk=grouped[1],
        scaling_factor=spec.scale,
        score_function=score,
        expert_bias=None if bias is None else torch.tensor(bias),
    )
    actual = route(jnp.asarray(rows), spec, None if bias is None else jnp.asarray(bias))
    experts = np.asarray(actual.experts_TK)
    assert np.array_equal(dense(experts, np.ones_like(experts)), chosen.numpy().astype(int))
    np.testing.assert_allclose(
        dense(experts, np.asarray(actual.weights_TK)), weights.numpy(), rtol=0, atol=TOLERANCE
    )
    counts = count_values(actual.experts_TK, EXPERTS, jnp.float32)
    scores = balance_scores(jnp.asarray(rows), spec)
    wanted = moe_utils.switch_load_balancing_loss_func(
        torch.tensor(np.asarray(scores)), chosen.sum(0), TOKENS, spec.top_k, EXPERTS, 1.0
    )
    loss = balance_loss(scores, counts, spec.top_k, TOKENS)
    assert float(loss) == pytest.approx(float(wanted), rel=TOLERANCE)
    _, plain = moe_utils.compute_routing_scores_for_aux_loss(torch.tensor(rows), spec.top_k, score)
    np.testing.assert_allclose(scores, plain.numpy(), rtol=0, atol=TOLERANCE)


def test_z_loss_and_sinkhorn_and_bias():
    rows = logits(1)
    wanted = moe_utils.z_loss_func(torch.tensor(rows), 1.0)
    assert float(z_loss(jnp.asarray(rows), TOKENS)) == pytest.approx(float(wanted), rel=TOLERANCE)
    shares = moe_utils.sinkhorn(torch.tensor(rows)).numpy()
    actual = np.asarray(sinkhorn(jnp.asarray(rows)))
    assert np.array_equal(actual.argmax(1), shares.argmax(1))
    spec = RoutingSpec(EXPERTS, 2, softmax_before_topk=True, sinkhorn=True)
    routing = route(jnp.asarray(rows), spec)
    experts, weights = map(np.asarray, routing)
    chosen = torch.topk(torch.tensor(shares), k=2, dim=1).indices.numpy()
    assert np.array_equal(np.sort(experts), np.sort(chosen))
    scores = torch.softmax(torch.tensor(rows), dim=-1).numpy()  # as TopKRouter weighs them
    wanted = np.take_along_axis(scores, experts, axis=1)
    np.testing.assert_allclose(weights, wanted, rtol=0, atol=TOLERANCE)
    counts = np.arange(EXPERTS, dtype=np.float32)
    ours = updated_bias(jnp.zeros(EXPERTS), jnp.asarray(counts), 1e-3)
    theirs = 1e-3 * np.sign(counts.mean() - counts)  # its own needs a process group
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_copies_that_a_capacity_keeps(factor):
    """By weight: by position Megatron-LM leaves it to torch.topk which of equal ones come first."""
    actual = route(jnp.asarray(logits(2)), RoutingSpec(EXPERTS, 4))
    experts, weights = np.asarray(actual.experts_TK), np.asarray(actual.weights_TK)
    chosen = torch.tensor(dense(experts, np.ones_like(experts)).astype(bool))
    _, kept = moe_utils.apply_router_token_dropping(
        torch.tensor(dense(experts, weights)), chosen, 4, factor, "probs"
    )
    capacity = capacity_of(TOKENS, 4, EXPERTS, factor)
    ours = np.asarray(places_in_experts(actual.experts_TK, EXPERTS, actual.weights_TK)) < capacity
    assert np.array_equal(dense(experts, ours.astype(np.int32)), kept.numpy().astype(np.int32))
