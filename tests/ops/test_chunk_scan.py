"""The chunked scan against its recurrence in float64: values and every gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.chunk_scan_cases import (
    NAMES,
    Case,
    derivative,
    float32,
    inputs_of,
    recurrence,
    slopes_of,
    with_gradients,
)

from maxmeg.ops import chunk_scan as module
from maxmeg.ops import chunk_tile
from maxmeg.ops.chunk_scan import ScanSpec, chunk_scan, chunk_scan_step

TOLERANCE = 1e-5  # of the largest value, float32
SMALL = 6000  # bytes: several tiles of few heads in these small cases
QUICK = {
    "mamba": Case("mamba"),
    "delta": Case("delta", groups=4, length=19),
    "kda": Case("kda", length=16, groups=4),
}
LONG = [
    Case("mamba", groups=1, heads=6, chunk=8, length=64, documents=False),
    Case("mamba", groups=6, heads=6, chunk=2, length=7, initial=False),
    Case("mamba", groups=3, heads=6, chunk=16, length=50, decay=20.0),
    Case("delta", groups=1, heads=4, chunk=16, length=33),
    Case("delta", groups=2, heads=2, chunk=8, length=64, documents=False, initial=False),
    Case("delta", rows=3, groups=2, heads=4, chunk=2, length=9, decay=20.0),
    Case("kda", groups=2, heads=4, chunk=8, length=30, decay=20.0),
    Case("channels", groups=2, heads=4, chunk=8, length=27),
    Case("channels", groups=3, heads=3, chunk=4, length=12, documents=False, initial=False),
]


def scanned(case: Case):
    def scan(arrays, segments):
        *inputs, state = (arrays.get(name) for name in NAMES)
        return chunk_scan(*inputs, segments, state, ScanSpec(case.chunk))

    return scan


def check(found, wanted, tolerance: float = TOLERANCE) -> None:
    assert np.abs(np.float64(found) - wanted).max() <= tolerance * max(np.abs(wanted).max(), 1e-3)


def check_slope(slope, direction: np.ndarray, wanted: float) -> None:
    """A gradient's product with a direction; its errors add up like random numbers."""
    slope = np.float64(slope)
    assert abs(np.vdot(slope, direction) - wanted) <= TOLERANCE * np.linalg.norm(slope)


def check_case(case: Case) -> None:
    arrays, segments = inputs_of(case)
    given = float32(arrays), segments, *float32(slopes_of(case))
    y, state, slopes = with_gradients(scanned(case))(*given)
    wanted_y, wanted_state = recurrence(**arrays, segments=segments)
    check(y, wanted_y)
    check(state, wanted_state)
    rng = np.random.default_rng(7)
    for name, slope in slopes.items():
        for _ in range(3):
            direction = rng.normal(size=slope.shape)
            wanted = derivative(name, direction, arrays, segments, slopes_of(case))
            check_slope(slope, direction, wanted)


@pytest.mark.parametrize("name", QUICK)
def test_values_and_gradients_are_those_of_the_recurrence(name, monkeypatch):
    """Documents, groups, an initial state, a length that chunks do not divide, several tiles."""
    monkeypatch.setattr(module, "WORKSPACE", SMALL)
    check_case(QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LONG)))
def test_other_sizes(number, monkeypatch):
    if number % 2:
        monkeypatch.setattr(module, "WORKSPACE", SMALL)
    check_case(dataclasses.replace(LONG[number], seed=number))


@pytest.mark.parametrize("name", QUICK)
def test_token_by_token_equals_the_recurrence(name):
    case = dataclasses.replace(QUICK[name], documents=False, length=3)
    arrays, _ = inputs_of(case)
    given = [float32(arrays).get(one) for one in NAMES]
    wanted_y, wanted_state = recurrence(**arrays)
    y, state = jax.jit(chunk_scan_step)(*given)
    check(y, wanted_y)
    check(state, wanted_state)


@pytest.mark.slow
def test_a_state_without_queries():
    case = dataclasses.replace(QUICK["delta"], documents=False)
    arrays, _ = inputs_of(case)
    given = [float32(arrays).get(name) for name in NAMES[1:]]
    y, state = jax.jit(lambda *a: chunk_scan(None, *a[:4], None, a[4], ScanSpec(4)))(*given)
    assert y is None
    check(state, recurrence(**arrays)[1])


def test_the_inverse_keeps_its_digits_where_keys_repeat():
    """All entries 1 below the diagonal: the powers of the matrix reach 1e18."""
    lower_ST = np.tril(np.ones((64, 64), np.float32), -1)
    found_ST = jax.jit(chunk_tile.inverse)(lower_ST)
    check(found_ST, np.linalg.inv(np.eye(64) + lower_ST), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba", "delta", "kda", "channels"])
def test_strong_decays_overflow_nowhere(kind):
    """exp(-200 x 16) and its inverse are not float32 numbers."""
    case = Case(kind, groups=2, heads=2, chunk=16, length=40, decay=200.0)
    arrays, segments = inputs_of(case)
    given = float32(arrays), segments, *float32(slopes_of(case))
    y, state, slopes = with_gradients(scanned(case))(*given)
    wanted_y, wanted_state = recurrence(**arrays, segments=segments)
    check(y, wanted_y)
    check(state, wanted_state)
    assert all(np.isfinite(slope).all() for slope in slopes.values())


@pytest.mark.slow
def test_bfloat16_inputs_are_scanned_in_float32():
    case = QUICK["delta"]
    arrays, segments = inputs_of(case)
    rounded = {
        name: np.asarray(jnp.bfloat16(x)) if name in ("q", "k", "v") else np.float32(x)
        for name, x in arrays.items()
    }
    wanted, state = recurrence(
        **{name: x.astype(np.float64) for name, x in rounded.items()}, segments=segments
    )
    y, last = jax.jit(scanned(case))(rounded, segments)
    assert y.dtype == jnp.bfloat16 and last.dtype == jnp.float32
    check(y.astype(jnp.float32), wanted, 2**-8)
    check(last, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "groups", "delta"), [(128, 1, False), (128, 128, True)], ids=["mamba", "delta"]
)
def test_temporaries_are_small(heads, groups, delta):
    """At 8192 tokens, with 512 MB for the decays between tokens of chunks alone."""
    B, L, N, P, limit = 1, 8192, 128, 64, 16 << 20

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    beta = array(B, L, heads) if delta else None
    keys, y, state = array(B, L, groups, N), array(B, L, heads, P), array(B, heads, N, P)
    inputs = keys, keys, y, array(B, L, heads), beta, None, state

    def scan(*inputs):
        return chunk_scan(*inputs, spec=ScanSpec(64 if delta else 128))

    def gradients(inputs, slopes):
        return jax.vjp(scan, *inputs)[1](slopes)

    for function, given in ((scan, inputs), (gradients, (inputs, (y, state)))):
        compiled = jax.jit(function).lower(*given).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= limit


SIZES = {"q": (1, 8, 2, 4), "k": (1, 8, 2, 4), "v": (1, 8, 4, 3), "g": (1, 8, 4)}


@pytest.mark.parametrize(
    ("changed", "chunk", "words"),
    [
        ({"v": (1, 8, 3, 3)}, 4, "3 heads are not divisible by 2 groups"),
        ({}, 12, "chunk=12 must be a power of 2: choose 64 or 128"),
        ({"q": (1, 8, 1, 4)}, 4, r"q has shape \(1, 8, 1, 4\)"),
        ({"g": (1, 8, 4, 5)}, 4, r"log_decay has shape \(1, 8, 4, 5\)"),
    ],
)
def test_sizes_that_do_not_fit_are_reported(changed, chunk, words):
    q, k, v, g = (np.zeros(shape, np.float32) for shape in (SIZES | changed).values())
    with pytest.raises(ValueError, match=words):
        module.check_sizes(q, k, v, g, None, None, chunk)
