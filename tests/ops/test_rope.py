"""Rotary positions against multiplication by complex numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.ops.rope import RotaryScaling, RotarySpec, frequencies, rotate, rotation

TOLERANCE = 1e-5  # absolute, of values near 1: float32 angles up to 100
SETTINGS = {
    "halves": (10000.0, 1.0, False),
    "pairs": (10000.0, 1.0, True),
    "base": (500000.0, 1.0, False),
    "partial": (10000.0, 0.5, False),
    "partial pairs": (10000.0, 0.25, True),
    "odd part": (10000.0, 0.4, False),  # 16 x 0.4 = 6.4: 6 rotate
}
SHAPE = (2, 5, 3, 16)


@functools.partial(jax.jit, static_argnums=2)
def compiled(x, positions, spec):
    return rotate(x, rotation(positions, x.shape[-1], spec), spec.interleaved)


def turn(x, positions, *setting):
    return compiled(x, positions, RotarySpec(*setting))


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


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_rotation_is_a_complex_product(setting):
    x, positions = normal(), np.random.default_rng(1).integers(0, 100, SHAPE[:2])
    out = turn(x, positions, *setting)
    np.testing.assert_allclose(out, reference(x, positions, *setting), rtol=0, atol=TOLERANCE)


def test_bfloat16_rounds_once():
    x = np.asarray(jnp.bfloat16(normal()))
    positions = np.broadcast_to(np.arange(1000, 1005), SHAPE[:2])
    out = turn(x, positions)
    expected = reference(x.astype(np.float64), positions, 10000.0, 1.0, False)
    assert out.dtype == jnp.bfloat16
    assert (np.abs(np.float64(out) - expected) <= 2**-8 * np.abs(expected) + 1e-3).all()


# original length, factor, and rotated size of all; expected frequencies over the unscaled ones
ORIGINAL, FACTOR, SIZE, BASE = 64, 8.0, 16, 10000.0


def scaled(kind: str, **options) -> np.ndarray:
    spec = RotarySpec(BASE, scaling=RotaryScaling(kind, FACTOR, ORIGINAL, **options))
    return np.asarray(frequencies(spec, SIZE, jnp.ones(1, int)), np.float64)


def plain() -> np.ndarray:
    return BASE ** (-np.arange(0, SIZE, 2) / SIZE)


def test_linear_and_ntk_scaling():
    np.testing.assert_allclose(scaled("linear"), plain() / FACTOR, rtol=1e-6)
    actual = scaled("ntk") / plain()
    assert actual[0] == pytest.approx(1) and actual[-1] == pytest.approx(1 / FACTOR)
    np.testing.assert_allclose(np.diff(np.log(actual)), np.log(actual[1]), rtol=1e-4)


def test_llama3_keeps_short_waves_divides_long_ones_and_mixes_by_turns():
    turns = ORIGINAL * plain() / (2 * np.pi)
    kept = np.clip((turns - 0.1) / 3.9, 0, 1)
    assert {0, 1} < {*kept}
    expected = plain() * (kept + (1 - kept) / FACTOR)
    np.testing.assert_allclose(scaled("llama3", low=0.1, high=4.0), expected, rtol=1e-6)


def test_yarn_keeps_short_waves_and_divides_long_ones():
    """Between them, by dimension: monotonic. The bounds are rounded to whole dimensions."""
    turns = ORIGINAL * plain() / (2 * np.pi)
    actual = scaled("yarn", low=0.1, high=4.0) / plain()
    np.testing.assert_allclose(actual[turns > 4.0], 1, rtol=1e-6)
    np.testing.assert_allclose(actual[turns < 0.03], 1 / FACTOR, rtol=1e-6)
    assert (np.diff(actual) <= 1e-6).all() and ((actual > 0.13) & (actual < 0.99)).any()


def test_dynamic_scaling_is_ntk_with_what_each_row_needs():
    spec = RotarySpec(BASE, scaling=RotaryScaling("dynamic", 2.0, ORIGINAL))
    actual = np.asarray(frequencies(spec, SIZE, jnp.array([64, 128])), np.float64)[:, 0, 0]
    np.testing.assert_allclose(actual[0], plain(), rtol=1e-6)
    expected = RotarySpec(BASE, scaling=RotaryScaling("ntk", 3.0))  # 2 x 128 / 64 - 1
    np.testing.assert_allclose(actual[1], frequencies(expected, SIZE, jnp.ones(1, int)), rtol=1e-5)


def test_longrope_takes_its_factors_by_the_length_of_the_row():
    short, long = (tuple(np.linspace(1, end, SIZE // 2)) for end in (2, 20))
    scaling = RotaryScaling("longrope", 4.0, ORIGINAL, short_factors=short, long_factors=long)
    spec = RotarySpec(BASE, scaling=scaling)
    actual = np.asarray(frequencies(spec, SIZE, jnp.array([64, 65])))
    np.testing.assert_allclose(actual[0, 0, 0], plain() / short, rtol=1e-6)
    np.testing.assert_allclose(actual[1, 0, 0], plain() / long, rtol=1e-6)
    assert scaling.amplitude == pytest.approx(np.sqrt(1 + np.log(4) / np.log(64)))


@pytest.mark.parametrize(
    ("scaling", "amplitude"),
    [
        (RotaryScaling("yarn", 4.0, 64), 0.1 * np.log(4) + 1),
        (RotaryScaling("yarn", 4.0, 64, attention_factor=0.5), 0.5),
        (RotaryScaling("longrope", 1.0, 64), 1.0),
        (RotaryScaling("llama3", 8.0, 64), 1.0),
    ],
)
def test_the_amplitude_is_the_length_of_what_was_rotated(scaling, amplitude):
    assert scaling.amplitude == pytest.approx(amplitude)
    if scaling.kind == "longrope":
        return
    x, positions = normal(), np.broadcast_to(np.arange(SHAPE[1]), SHAPE[:2])
    out = compiled(x, positions, RotarySpec(scaling=scaling))
    norms = np.linalg.norm(out, axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(norms, amplitude, rtol=1e-5)
