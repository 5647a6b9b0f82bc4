"""Which tokens may be chosen, for any logits, against a plain NumPy account."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmeg.inference.sampling import Sampling, sample

DRAWS = 64
VOCAB = 9
ROUNDING = 1e-5  # of a sum of probabilities: a token at the limit may be in or out

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.integers(-4, 4).map(lambda n: n / 2), min_size=VOCAB, max_size=VOCAB)


@functools.partial(jax.jit, static_argnums=2)
def draw(logits_V, seed, sampling):
    rows_BV = jnp.broadcast_to(logits_V, (DRAWS, VOCAB))
    return sample(rows_BV, jax.random.key(seed), sampling)


def allowed(logits: list[float], sampling: Sampling) -> set[int]:
    """Tokens at least as likely as the last one that top-k, then top-p, still takes."""
    scaled = np.asarray(logits) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        order = order[scaled[order] >= scaled[order[min(sampling.top_k, VOCAB) - 1]]]
    chances = np.exp(scaled[order] - scaled.max())
    before = np.cumsum(chances) / chances.sum() - chances / chances.sum()
    last = order[before < sampling.top_p + ROUNDING][-1]
    return {int(i) for i in order if scaled[i] >= scaled[last]}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.3),
        Sampling(top_k=1),
        Sampling(top_k=4),
        Sampling(top_k=50),
        Sampling(top_p=0.5),
        Sampling(top_p=1e-6),
        Sampling(temperature=2.0, top_k=5, top_p=0.8),
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


def test_tokens_do_not_depend_on_a_shift_of_the_logits():
    logits = np.linspace(-2, 2, VOCAB, dtype=np.float32)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.7)):
        a, b = (draw(logits + shift, 0, sampling) for shift in (0.0, 16.0))
        np.testing.assert_array_equal(a, b)


def test_rows_are_drawn_independently():
    assert len(np.unique(draw(np.zeros(VOCAB, np.float32), 0, Sampling()))) > 3
