"""RMSNorm and LayerNorm against float64 NumPy."""

import numpy as np
import pytest
from ops.norm_cases import CASES, TOLERANCE, arrays_of, error, expected, run

BFLOAT16 = 2**-8  # of each value: one rounding of the result
ROUNDED = ("rms", "layer")


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_equal_the_reference(name):
    arrays = arrays_of(CASES[name], "float32")
    actual, wanted = run(CASES[name], *arrays, "xla"), expected(CASES[name], *arrays)
    assert actual.keys() == wanted.keys()
    errors = {key: error(actual[key], wanted[key]) for key in wanted}
    assert all(e <= TOLERANCE["float32"] for e in errors.values()), errors


@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_computes_in_float32(name):
    arrays = arrays_of(CASES[name], "bfloat16")
    out = run(CASES[name], *arrays, "xla")["out"]
    wanted = expected(CASES[name], *arrays)["out"]
    assert out.dtype == "bfloat16"
    assert (np.abs(np.float64(out) - wanted) <= BFLOAT16 * np.abs(wanted) + 1e-6).all()
