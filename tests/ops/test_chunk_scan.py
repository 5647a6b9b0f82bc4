"""The chunked scan against its recurrence in float64: values and every gradient."""

import dataclasses

import jax
import numpy as np
import pytest
from ops.chunk_scan_cases import NAMES, TOLERANCE, Case, arrays_of, error, expected, run

from maxmeg.ops import chunk_scan as module
from maxmeg.ops import chunk_tile
from maxmeg.ops.chunk_scan import ScanSpec, chunk_scan, chunk_scan_step

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


def results(case: Case, dtype: str = "float32") -> tuple[dict, dict[str, float]]:
    """(what the op gives, its errors by name)."""
    arrays, segments = arrays_of(case, dtype)
    actual, wanted = run(case, arrays, segments, "auto"), expected(case, arrays, segments)
    return actual, {name: error(actual[name], wanted[name]) for name in wanted}


@pytest.mark.parametrize(
    "case", [*QUICK.values(), *(pytest.param(case, marks=pytest.mark.slow) for case in LONG)]
)
def test_values_and_gradients_are_those_of_the_recurrence(case: Case, monkeypatch):
    """Documents, groups, an initial state, lengths that chunks do not divide, several tiles."""
    if case.documents:
        monkeypatch.setattr(module, "WORKSPACE", SMALL)
    errors = results(case)[1]
    assert all(e <= TOLERANCE["float32"] for e in errors.values()), errors


@pytest.mark.parametrize(
    ("case", "tile"),  # tile: heads, chunks
    [
        (Case("delta", length=47, chunk=2), (4, 24)),
        (Case("kda", length=52, chunk=2), (2, 10)),
    ],
)
def test_on_gpus_the_chunks_of_the_delta_rule_run_at_once(case: Case, tile, monkeypatch):
    """Chunks composed 3 times and once, an odd number of them, and several tiles."""
    plan = module.Plan(case.chunk, *tile, case.heads // case.groups, in_parallel=True)
    monkeypatch.setattr(module, "plan_of", lambda *_, **__: plan)
    errors = results(case)[1]
    assert all(e <= TOLERANCE["float32"] for e in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba", "delta", "kda", "channels"])
def test_strong_decays_overflow_nowhere(kind):
    """exp(-200 x 16) and its inverse are not float32 numbers. Gradients nearly vanish."""
    case = Case(kind, groups=2, heads=2, chunk=16, length=40, decay=200.0)
    actual, errors = results(case)
    assert all(errors[name] <= TOLERANCE["float32"] for name in ("y", "state"))
    assert all(np.isfinite(array).all() for array in actual.values())


@pytest.mark.slow
def test_bfloat16_inputs_are_scanned_in_float32():
    actual, errors = results(QUICK["delta"], "bfloat16")
    assert actual["y"].dtype == "bfloat16" and actual["state"].dtype == "float32"
    assert errors["y"] <= 2**-8 and errors["state"] <= TOLERANCE["float32"]


def of_names(case: Case) -> tuple[list, dict]:
    """(operands in order, what the recurrence gives)."""
    arrays, _ = arrays_of(case, "float32")
    return [arrays.get(name) for name in NAMES], expected(case, arrays, None)


@pytest.mark.parametrize("name", QUICK)
def test_token_by_token_equals_the_recurrence(name):
    operands, wanted = of_names(dataclasses.replace(QUICK[name], documents=False, length=3))
    y, state = jax.jit(chunk_scan_step)(*operands)
    assert error(y, wanted["y"]) <= TOLERANCE["float32"]
    assert error(state, wanted["state"]) <= TOLERANCE["float32"]


@pytest.mark.slow
def test_a_state_without_queries():
    (_, *rest), wanted = of_names(dataclasses.replace(QUICK["delta"], documents=False))
    y, last = jax.jit(lambda *a: chunk_scan(None, *a[:4], None, a[4], ScanSpec(4)))(*rest)
    assert y is None and error(last, wanted["state"]) <= TOLERANCE["float32"]


def test_the_inverse_keeps_its_digits_where_keys_repeat():
    """All entries 1 below the diagonal: the powers of the matrix reach 1e18."""
    lower_ST = np.tril(np.ones((64, 64), np.float32), -1)
    inverse_ST = jax.jit(chunk_tile.inverse)(lower_ST)
    assert error(inverse_ST, np.linalg.inv(np.eye(64) + lower_ST)) <= 1e-6


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
