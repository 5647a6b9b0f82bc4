"""Dropout: its rate and scale, and that only the place of an element decides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmeg.ops.dropout import dropout

SHAPE = (8, 32, 64)  # rows, positions, width
KEY = jax.random.key(3)


@jax.jit
def drop(x_BLD, rows_B, positions_L):
    return dropout(x_BLD, 0.25, KEY, rows_B[:, None], positions_L[None, :])


@functools.cache
def whole() -> np.ndarray:
    """What becomes of ones."""
    return np.asarray(drop(np.ones(SHAPE, np.float32), np.arange(SHAPE[0]), np.arange(SHAPE[1])))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_has_the_rate_and_scale(rate):
    size = 100_000
    out = np.asarray(dropout(jnp.ones((10, size // 10)), rate, KEY, jnp.arange(10)))
    deviation = (rate * (1 - rate) / size) ** 0.5
    assert abs((out == 0).mean() - rate) < 5 * deviation
    np.testing.assert_allclose(np.unique(out), [0, 1 / (1 - rate)], rtol=1e-6)


def test_rate_zero_is_the_identity():
    x = jnp.ones((2, 3))
    assert dropout(x, 0.0, KEY, jnp.arange(2)) is x


def test_every_vector_and_key_has_a_mask_of_its_own():
    places = jnp.arange(SHAPE[0])[:, None], jnp.arange(SHAPE[1])
    other = dropout(jnp.ones(SHAPE), 0.25, jax.random.key(4), *places)
    masks = np.concatenate([whole() == 0, np.asarray(other) == 0]).reshape(-1, SHAPE[-1])
    assert len(np.unique(masks, axis=0)) == len(masks)


@settings(max_examples=20)
@given(st.sampled_from([1, 4]), st.sampled_from([2, 8]), st.randoms())
def test_a_shard_is_a_slice_of_the_whole(row_shards, length_shards, random):
    rows, length = SHAPE[0] // row_shards, SHAPE[1] // length_shards
    row, start = random.randrange(row_shards) * rows, random.randrange(length_shards) * length
    part = drop(
        np.ones((rows, length, SHAPE[2]), np.float32),
        row + np.arange(rows),
        start + np.arange(length),
    )
    np.testing.assert_array_equal(part, whole()[row : row + rows, start : start + length])


def test_bfloat16_stays():
    out = dropout(jnp.ones((4, 8), jnp.bfloat16), 0.5, KEY, jnp.arange(4))
    assert out.dtype == jnp.bfloat16 and set(np.unique(np.float32(out))) == {0.0, 2.0}
