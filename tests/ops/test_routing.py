"""Choice and weights of experts, and losses of their balance, against loops in float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.ops.experts.dispatch import count_values
from maxmeg.ops.experts.routing import (
    RoutingSpec,
    Score,
    all_scores,
    balance_loss,
    balance_scores,
    jittered,
    route,
    sinkhorn,
    updated_bias,
    z_loss,
)

TOLERANCE = 2e-6  # relative, float32
EVEN = 2e-3  # how far rows and columns that Sinkhorn scaled are from their sums
TOKENS, EXPERTS = 96, 16
CASES = {
    "mixtral": RoutingSpec(EXPERTS, 2),
    "one": RoutingSpec(EXPERTS, 1),
    "all of them": RoutingSpec(EXPERTS, EXPERTS),
    "qwen2": RoutingSpec(EXPERTS, 4, softmax_before_topk=True),
    "qwen3": RoutingSpec(EXPERTS, 4, softmax_before_topk=True, normalize_weights=True),
    "deepseek v2": RoutingSpec(
        EXPERTS,
        6,
        softmax_before_topk=True,
        scale=16.0,
        num_groups=8,
        topk_groups=3,
        group_score_topk=1,
    ),
    "deepseek v3": RoutingSpec(
        EXPERTS, 4, Score.sigmoid, normalize_weights=True, scale=2.5, num_groups=4, topk_groups=2
    ),
    "one sigmoid": RoutingSpec(EXPERTS, 1, Score.sigmoid, normalize_weights=True),
    "sqrt softplus": RoutingSpec(EXPERTS, 3, Score.sqrt_softplus, normalize_weights=True),
}


def logits(seed: int = 0, tokens: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(tokens, EXPERTS)).astype(np.float32) * 2


def softmax(row: np.ndarray) -> np.ndarray:
    shares = np.exp(row - row.max())
    return shares / shares.sum()


def score(row: np.ndarray, kind: Score) -> np.ndarray:
    if kind is Score.softmax:
        return softmax(row)
    return 1 / (1 + np.exp(-row)) if kind is Score.sigmoid else np.sqrt(np.log1p(np.exp(row)))


def scores_of(row: np.ndarray, spec: RoutingSpec) -> np.ndarray:
    """What experts are chosen by: logits, if a softmax over the chosen ones follows."""
    late = spec.score is Score.softmax and not spec.softmax_before_topk
    return row.astype(np.float64) if late else score(row.astype(np.float64), spec.score)


def weights_of(row: np.ndarray, spec: RoutingSpec, experts) -> np.ndarray:
    weights = scores_of(row, spec)[experts]
    if spec.score is Score.softmax and not spec.softmax_before_topk:
        weights = softmax(weights)
    if spec.normalize_weights and spec.top_k > 1:
        weights = weights / weights.sum()
    return weights * spec.scale


def chosen_by(row: np.ndarray, spec: RoutingSpec, bias: np.ndarray) -> list[int]:
    """Experts of one token by decreasing score."""
    choice, size = scores_of(row, spec) + bias, len(row) // spec.num_groups
    groups = choice.reshape(spec.num_groups, size)
    values = np.sort(groups, axis=1)[:, -spec.scores_per_group :].sum(1)
    kept = np.argsort(-values)[: spec.topk_groups]
    allowed = [e for e in range(len(row)) if e // size in kept]
    return sorted(allowed, key=lambda e: -choice[e])[: spec.top_k]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_choice_and_weights_equal_the_reference(name, biased):
    spec, rows = CASES[name], logits()
    bias = np.random.default_rng(1).normal(size=EXPERTS).astype(np.float32) * biased
    actual = route(jnp.asarray(rows), spec, jnp.asarray(bias) if biased else None)
    for row, experts, weights in zip(rows, *map(np.asarray, actual), strict=True):
        assert experts.tolist() == chosen_by(row, spec, bias)
        np.testing.assert_allclose(weights, weights_of(row, spec, experts), rtol=TOLERANCE)


def test_low_precision_is_scored_in_float32():
    actual = route(jnp.asarray(logits(), jnp.bfloat16), CASES["qwen3"])
    assert actual.weights_TK.dtype == jnp.float32


def test_sinkhorn_evens_tokens_and_experts():
    rows = logits(3) / 4 + np.linspace(0, 4, EXPERTS, dtype=np.float32)  # one is everyone's
    shares = np.asarray(sinkhorn(jnp.asarray(rows)))
    np.testing.assert_allclose(shares.sum(1), 1 / TOKENS, rtol=EVEN)
    np.testing.assert_allclose(shares.sum(0), 1 / EXPERTS, rtol=EVEN)
    ratio = shares / np.exp(rows)  # rank one: scaled by rows and columns, nothing else
    np.testing.assert_allclose(ratio * ratio[0, 0], np.outer(ratio[:, 0], ratio[0]), rtol=1e-3)
    plain = RoutingSpec(EXPERTS, 1, softmax_before_topk=True)
    loads = [
        np.asarray(count_values(route(jnp.asarray(rows), spec).experts_TK, EXPERTS))
        for spec in (plain, dataclasses.replace(plain, sinkhorn=True))
    ]
    assert loads[1].max() < 0.7 * loads[0].max()


@pytest.mark.parametrize("chosen", [1, 3])
def test_sinkhorn_chooses_in_training_and_scores_weigh(chosen):
    rows = jnp.asarray(logits(5) + np.linspace(0, 4, EXPERTS, dtype=np.float32))
    score = Score.sigmoid if chosen == 1 else Score.softmax
    spec = RoutingSpec(EXPERTS, chosen, score, softmax_before_topk=True, sinkhorn=True)
    scores = np.asarray(all_scores(rows, score))
    for training, choice in ((True, np.asarray(sinkhorn(rows))), (False, scores)):
        actual = route(rows, spec, training=training)
        wanted = np.argsort(-choice, axis=1)[:, :chosen]
        np.testing.assert_array_equal(actual.experts_TK, wanted)
        weights = np.take_along_axis(scores, wanted, axis=1)
        np.testing.assert_allclose(actual.weights_TK, weights, rtol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_forced_balance_gives_every_expert_as_many(name):
    spec = dataclasses.replace(CASES[name], force_balance=True)
    rows = jnp.asarray(logits(6)).at[:, 0].add(8.0)
    experts, weights = map(np.asarray, route(rows, spec))
    counts = np.bincount(experts.reshape(-1), minlength=EXPERTS)
    assert np.ptp(counts) <= 1 and all(len({*row}) == spec.top_k for row in experts.tolist())
    for row, chosen, found in zip(np.asarray(rows), experts, weights, strict=True):
        np.testing.assert_allclose(found, weights_of(row, spec, chosen), rtol=1e-5, atol=1e-7)


def test_jitter_is_of_its_size_and_of_a_tokens_place():
    x_BLD, key = jnp.ones((4, 6, 32), jnp.bfloat16), jax.random.key(0)
    rows, positions = jnp.arange(4)[:, None], jnp.arange(6)[None]
    jitter = jax.jit(jittered, static_argnums=1)
    noise = np.asarray(jitter(x_BLD, 0.25, key, rows, positions))
    assert noise.dtype == np.float32 and 0.75 <= noise.min() < 0.8 and 1.2 < noise.max() <= 1.25
    assert noise.mean() == pytest.approx(1, abs=0.02)
    part = jitter(x_BLD[2:], 0.25, key, rows[2:], positions)
    np.testing.assert_array_equal(part, noise[2:])
    assert len(np.unique(noise.reshape(-1, 32), axis=0)) == 24


@pytest.mark.parametrize("large", [1e3, -1e3])
def test_sinkhorn_of_large_logits_is_finite(large):
    assert np.isfinite(sinkhorn(jnp.asarray(logits() + large))).all()


@pytest.mark.parametrize("name", CASES)
def test_losses_of_parts_add_up_to_that_of_the_batch(name):
    spec, rows = CASES[name], jnp.asarray(logits(4))
    experts = np.asarray(route(rows, spec).experts_TK)
    counts = np.bincount(experts.reshape(-1), minlength=EXPERTS).astype(np.float64)
    assert np.array_equal(count_values(jnp.asarray(experts), EXPERTS), counts)
    shares = np.stack([score(row, spec.score) for row in np.asarray(rows, np.float64)])
    shares /= shares.sum(1, keepdims=True)
    wanted = EXPERTS / (spec.top_k * TOKENS**2) * (shares.sum(0) * counts).sum()
    scores = balance_scores(rows, spec)
    parts = [
        balance_loss(part, jnp.asarray(counts, jnp.float32), spec.top_k, TOKENS)
        for part in jnp.split(scores, 3)
    ]
    assert sum(map(float, parts)) == pytest.approx(wanted, rel=TOLERANCE)
    squares = np.log(np.exp(np.asarray(rows, np.float64)).sum(1)) ** 2
    parts = [z_loss(part, TOKENS) for part in jnp.split(rows, 4)]
    assert sum(map(float, parts)) == pytest.approx(squares.mean(), rel=TOLERANCE)


def test_bias_goes_to_where_tokens_are_missing():
    actual = updated_bias(jnp.zeros(4), jnp.asarray([4.0, 0.0, 2.0, 2.0]), 0.5)
    assert actual.tolist() == [-0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 17}, "top_k=17 must lie in 1"),
        ({"top_k": 0}, "top_k=0 must lie in 1"),
        ({"num_groups": 3}, "num_groups=3 must divide num_experts=16"),
        ({"num_groups": 4, "topk_groups": 5}, r"topk_groups=5 must lie in 1\.\.4"),
        (
            {"num_groups": 8, "topk_groups": 1, "top_k": 3},
            "top_k=3 exceeds the experts",
        ),
        (
            {"num_groups": 8, "topk_groups": 8, "group_score_topk": 3},
            "score_topk=3 exceeds the 2",
        ),
        ({"num_groups": 4, "topk_groups": 2, "sinkhorn": True}, "sinkhorn chooses among all"),
        ({"force_balance": True, "sinkhorn": True}, "force_balance and sinkhorn exclude"),
    ],
)
def test_invalid_routing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RoutingSpec(**{"num_experts": EXPERTS, "top_k": 2, **fields})
