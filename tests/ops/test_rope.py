"""Rotary positions against multiplication by complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.ops.rope import rotate

TOLERANCE = 1e-5  # absolute, of values near 1: float32 angles up to 100
SETTINGS = {
    "halves": (10000.0, 1.0, False),
    "pairs": (10000.0, 1.0, True),
    "base": (500000.0, 1.0, False),
    "partial": (10000.0, 0.5, False),
    "partial pairs": (10000.0, 0.25, True),
    "odd part": (10000.0, 0.4, False),  # 16 x 0.4 = 6.4: 6 rotate
}
TABLE = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
SHAPE = (2, 5, 3, 16)
turn = jax.jit(rotate, static_argnums=(2, 3, 4))


def normal(shape=SHAPE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def reference(x, positions, base, fraction, interleaved):
    size = int(x.shape[-1] * fraction) // 2 * 2
    turned, kept = x[..., :size].astype(np.float64), x[..., size:]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., : size // 2], turned[..., size // 2 :]
    angle = positions[..., None, None] * base ** (-2 * np.arange(size // 2) / size)
    out = (first + 1j * second) * np.exp(1j * angle)
    if interleaved:
        whole = np.stack([out.real, out.imag], axis=-1).reshape(turned.shape)
    else:
        whole = np.concatenate([out.real, out.imag], axis=-1)
    return np.concatenate([whole, kept], axis=-1)


@TABLE
def test_rotation_is_a_complex_product(setting):
    x, positions = normal(), np.random.default_rng(1).integers(0, 100, SHAPE[:2])
    out = turn(x, positions, *setting)
    np.testing.assert_allclose(out, reference(x, positions, *setting), rtol=0, atol=TOLERANCE)


@TABLE
def test_products_depend_on_the_distance_only(setting):
    q, k = normal(seed=2), normal(seed=3)

    def products(shift):
        positions = np.broadcast_to(np.arange(SHAPE[1]) + shift, SHAPE[:2])
        turned = (turn(x, positions, *setting) for x in (q, k))
        return np.einsum("BLHK,BMHK->BHLM", *turned)

    np.testing.assert_allclose(products(0), products(37), rtol=0, atol=10 * TOLERANCE)
    assert np.abs(products(0) - np.einsum("BLHK,BMHK->BHLM", q, k)).max() > 0.1


@TABLE
def test_the_transpose_rotates_back(setting):
    """A rotation keeps lengths, and its gradient is the rotation by the opposite angle."""
    x, positions = normal(), np.broadcast_to(np.arange(SHAPE[1]), SHAPE[:2])
    out, transpose = jax.vjp(lambda x: turn(x, positions, *setting), x)
    np.testing.assert_allclose(transpose(out)[0], x, rtol=0, atol=TOLERANCE)
    assert np.linalg.norm(out) == pytest.approx(np.linalg.norm(x), rel=1e-6)


def test_bfloat16_rounds_once():
    x = np.asarray(jnp.bfloat16(normal()))
    positions = np.broadcast_to(np.arange(1000, 1005), SHAPE[:2])
    out = turn(x, positions)
    expected = reference(x.astype(np.float64), positions, 10000.0, 1.0, False)
    assert out.dtype == jnp.bfloat16
    assert (np.abs(np.float64(out) - expected) <= 2**-8 * np.abs(expected) + 1e-3).all()
