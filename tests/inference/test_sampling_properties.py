"""Which tokens may be chosen, for any logits, against a plain NumPy account."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmeg.inference.sampling import Rows, Sampling, sample

DRAWS, MANY = 64, 2000
VOCAB = 9
ROUNDING = 1e-5  # of a sum of probabilities: a token at the limit may be in or out

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.integers(-4, 4).map(lambda n: n / 2), min_size=VOCAB, max_size=VOCAB)


@functools.partial(jax.jit, static_argnums=2)
def drawn(logits_V, rows: Rows, count: int):
    rows = Rows(*(jnp.broadcast_to(setting, count) for setting in rows))
    return sample(jnp.broadcast_to(logits_V, (count, len(logits_V))), rows)


def draw(logits_V, seed: int, sampling: Sampling, count: int = DRAWS) -> np.ndarray:
    chances = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    rows = (np.float32(x) if isinstance(x, float) else np.int32(x) for x in (*chances, seed, 0))
    return np.asarray(drawn(np.float32(logits_V), Rows(*rows, np.arange(count)), count))


def allowed(logits: list[float], sampling: Sampling) -> set[int]:
    """Tokens at least as likely as the last one that top-k, then top-p, still takes."""
    scaled = np.asarray(logits) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.min_p:
        order = order[scaled[order] >= scaled.max() + np.log(sampling.min_p) - ROUNDING]
    if sampling.top_k:
        order = order[scaled[order] >= scaled[order[min(sampling.top_k, VOCAB) - 1]]]
    chances = np.exp(scaled[order] - scaled.max())
    before = np.cumsum(chances) / chances.sum() - chances / chances.sum()
    last = order[before < sampling.top_p + ROUNDING][-1]
    return {int(i) for i in order if scaled[i] >= scaled[last]}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.3, top_k=1),
        Sampling(top_k=50, top_p=0.5),
        Sampling(top_p=1e-6, min_p=0.3),
        Sampling(temperature=2.0, top_k=5, top_p=0.8, min_p=0.1),
    ],
    ids=str,
)
@settings(max_examples=40)
@given(LOGITS, st.integers(0, 1000))
def test_only_allowed_tokens_are_drawn(sampling, logits, seed):
    found = set(np.asarray(draw(np.float32(logits), seed, sampling)).tolist())
    assert found <= allowed(logits, sampling)


@settings(max_examples=40)
@given(LOGITS, st.integers(0, 1000))
def test_temperature_zero_takes_the_first_of_the_likeliest(logits, seed):
    for sampling in (Sampling(temperature=0), Sampling(temperature=0, top_k=3, top_p=0.1)):
        assert set(np.asarray(draw(np.float32(logits), seed, sampling))) == {np.argmax(logits)}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.1, 0.2, 0.4, 0.3]),
        (Sampling(temperature=0.5), np.array([1, 4, 16, 9]) / 30),
        (Sampling(top_p=0.39), [0, 0, 1, 0]),
        (Sampling(top_p=0.41), [0, 0, 4 / 7, 3 / 7]),
        (Sampling(top_k=3, top_p=0.5), [0, 0, 4 / 7, 3 / 7]),
        (Sampling(min_p=0.6), [0, 0, 4 / 7, 3 / 7]),
    ],
)
def test_samples_have_the_expected_frequencies(sampling, expected):
    ids = draw(np.log([0.1, 0.2, 0.4, 0.3]), 0, sampling, MANY)
    found = np.bincount(ids, minlength=4) / MANY
    assert not found[np.asarray(expected) == 0].any()
    np.testing.assert_allclose(found, expected, atol=0.04)


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        ({"temperature": -1}, r"top_p in \(0, 1\]"),
        ({"top_k": -1}, r"top_p in \(0, 1\]"),
        ({"top_p": 0}, r"top_p in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p in \(0, 1\]"),
        ({"min_p": 2}, r"min_p must be in \[0, 1\]"),
        ({"top_logprobs": 21}, r"top_logprobs in 0..20"),
    ],
)
def test_bad_sampling_says_what_is_allowed(bad, rule):
    with pytest.raises(ValueError, match=rule):
        Sampling(**bad)
