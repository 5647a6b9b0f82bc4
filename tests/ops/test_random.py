"""The generator of dropout masks and of initial weights: even, independent, and normal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.ops.random import fold, normal, random_bits, uniform_of

KEY = jax.random.key(3)
LAYERS, SIZE = 4, 512  # a million normal numbers


def bits(key=KEY, rows=512, first=0) -> np.ndarray:
    """[bit, row, position, feature] of 0 and 1."""
    places = jnp.arange(rows)[:, None], jnp.arange(8)[None]
    words = np.asarray(random_bits((rows, 8, 64), key, *places, first=first))
    return np.stack([((words >> bit) & 1).astype(np.uint8) for bit in range(32)])


@pytest.mark.parametrize("axis", ["row", "position", "feature", "key"])
def test_bits_are_even_and_neighbours_do_not_tell_of_each_other(axis):
    """Of each of the 32 bits, in steps of 1, 2 and 4 along one coordinate or of the key."""
    actual, places = bits(), {"row": 1, "position": 2, "feature": 3}
    limit = 5 * actual[0].size ** -0.5
    assert np.abs(2 * actual.mean((1, 2, 3)) - 1).max() < limit
    for step in (1, 2, 4):
        other = bits(fold(KEY, step)) if axis == "key" else np.roll(actual, step, places[axis])
        agreement = 2 * (actual == other).mean((1, 2, 3)) - 1
        assert np.abs(agreement).max() < limit, step


def test_a_changed_bit_of_a_coordinate_changes_half_of_the_bits():
    rows = jnp.arange(4096, dtype=jnp.uint32)
    plain = np.asarray(random_bits((4096, 1), KEY, rows))
    for bit in range(32):
        other = np.asarray(random_bits((4096, 1), KEY, rows ^ np.uint32(1 << bit)))
        changed = np.unpackbits((plain ^ other).view(np.uint8)).mean()
        assert abs(changed - 0.5) < 0.01, bit


def test_a_part_of_a_vector_has_its_part_of_the_bits():
    np.testing.assert_array_equal(bits(first=3)[..., :-3], bits()[..., 3:])


def test_uniform_numbers_are_odd_multiples_of_the_step_without_the_ends():
    words = jnp.array([0, 127, 2**31 - 1, 2**31, 2**32 - 1], jnp.uint32)
    steps = np.asarray(uniform_of(words), np.float64) * 2**24
    np.testing.assert_array_equal(steps, [1, 1, 2**24 - 1, 1 - 2**24, -1])
    assert np.isfinite(jax.lax.erf_inv(uniform_of(words))).all()


def test_normal_numbers_are_normal_and_independent():
    """Of layers' keys, rows and columns: moments, tails, correlations and singular values."""
    draw = jax.jit(jax.vmap(lambda layer: normal(fold(KEY, layer), (SIZE, SIZE))))
    x = np.asarray(draw(np.arange(LAYERS)))
    limit = 5 * x.size**-0.5
    moments = [np.mean(x**power, dtype=np.float64) for power in (1, 2, 3, 4)]
    deviations = [1, 2**0.5, 15**0.5, 96**0.5]
    np.testing.assert_array_less(np.abs(np.subtract(moments, [0, 1, 0, 3])) / deviations, limit)
    assert 4.2 < -x.min() < 6 and 4.2 < x.max() < 6
    for axis in range(3):
        for step in (1, 2):
            assert abs(np.mean(x * np.roll(x, step, axis), dtype=np.float64)) < limit, (axis, step)
    largest = np.linalg.norm(x[0], 2)
    assert abs(largest / (2 * SIZE**0.5) - 1) < 0.03
    cross = x[:, :8].reshape(LAYERS, -1) @ x[:, :8].reshape(LAYERS, -1).T / (8 * SIZE)
    np.testing.assert_allclose(cross, np.eye(LAYERS), atol=6 * (8 * SIZE) ** -0.5)
