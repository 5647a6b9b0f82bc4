"""Grouped matrix product, each row times the matrix of its group (expert): call and backends.

A backend (ops/backend.py) has `refuses(x, w, sizes, fp8, device)`, the reason why it cannot run a
call, and two products: `rows(x, w, sizes, scales, order)`, each row times its group's matrix, and
`weights(x, y, sizes)`, x^T y over each group's rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmeg.ops.backend import pick
from maxmeg.ops.experts import grouped_matmul_mosaic, grouped_matmul_xla

BACKENDS = {"mosaic": grouped_matmul_mosaic, "xla": grouped_matmul_xla}
ORDER = ("xla",)  # for "auto": mosaic has not been measured
FP8 = jnp.float8_e4m3fn
FP8_MAX = float(jnp.finfo(FP8).max)
TINY = float(jnp.finfo(jnp.float32).tiny)  # devices flush smaller numbers to zero


def grouped_matmul(
    x_TD: Float[Array, "T D"],
    w_EDF: Float[Array, "E D F"],
    sizes_E: Int[Array, " E"],
    *,
    fp8: bool = False,
    backend: str = "auto",
) -> Float[Array, "T F"]:
    """y[t] = x[t] @ w[group of t], in the dtype of x, accumulated in float32.

    Rows are sorted by group; group e has sizes_E[e] rows, possibly 0. Rows after the last group
    give zeros and take part in no gradient, even if they are NaN.

    fp8: forward and input gradient multiply float8_e4m3fn, with a scale per row of x or of the
    gradient, and per column of each matrix. Scales per row leave enough range for gradients, so
    float8_e5m2 is not needed. The gradient of w sums over rows, which have different scales: it
    uses unrounded x and gradients. Hopper's tensor cores accumulate float8 products with fewer bits
    than float32 (DeepSeek-V3, section 3.3.2); beside roundings to 2^-4 this does not show.

    backend: a key of BACKENDS, or "auto". ValueError if shapes do not fit or the backend cannot run
    the call.
    """
    check_shapes(x_TD, w_EDF, sizes_E)
    call = (x_TD, w_EDF, sizes_E, fp8)
    chosen = pick("grouped_matmul", BACKENDS, ORDER, backend, call)
    return product(x_TD, w_EDF, sizes_E, chosen, fp8)


def check_shapes(x_TD: Any, w_EDF: Any, sizes_E: Any) -> None:
    shapes = f"x {x_TD.shape}, w {w_EDF.shape} and sizes {sizes_E.shape}"
    fits = (x_TD.ndim, w_EDF.ndim, sizes_E.ndim) == (2, 3, 1)
    if not fits or w_EDF.shape[:2] != (sizes_E.shape[0], x_TD.shape[1]):
        raise ValueError(f"{shapes} must be [T, D], [E, D, F] and [E]")
    if x_TD.dtype != w_EDF.dtype or not jnp.issubdtype(x_TD.dtype, jnp.floating):
        raise ValueError(f"x is {x_TD.dtype} and w {w_EDF.dtype}: cast both to one float dtype")
    if not jnp.issubdtype(sizes_E.dtype, jnp.integer):
        raise ValueError(f"sizes are {sizes_E.dtype}: they must be integers")


def multiply(x_TK: Array, w: Array, sizes_E: Array, order: str, backend: str, fp8: bool) -> Array:
    """Rows times matrices [E, K, N] (order "KN") or [E, N, K] ("NK")."""
    rows = BACKENDS[backend].rows
    if not fp8:
        return rows(x_TK, w, sizes_E, (), order)
    live_T = jnp.arange(x_TK.shape[0]) < jnp.sum(sizes_E)
    x_fp8, scale_T = quantize(x_TK)
    w_fp8, scale_EN = quantize(w if order == "NK" else w.swapaxes(1, 2))
    scales = (jnp.where(live_T, scale_T, 0.0), scale_EN)
    return rows(x_fp8, w_fp8, sizes_E, scales, "NK").astype(x_TK.dtype)


def quantize(x: Float[Array, "*N K"]) -> tuple[Float[Array, "*N K"], Float[Array, "*N"]]:
    """(x / scale in float8, float32 scale of each vector along the last dimension)."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.maximum(largest / FP8_MAX, TINY)
    # The quotient can round to just above FP8_MAX, which would become NaN.
    return jnp.clip(x / scale[..., None], -FP8_MAX, FP8_MAX).astype(FP8), scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def product(x_TD: Array, w_EDF: Array, sizes_E: Array, backend: str, fp8: bool) -> Array:
    return multiply(x_TD, w_EDF, sizes_E, "KN", backend, fp8)


def product_forward(x_TD, w_EDF, sizes_E, backend, fp8):
    return product(x_TD, w_EDF, sizes_E, backend, fp8), (x_TD, w_EDF, sizes_E)


def product_backward(backend, fp8, residuals, slope_TF):
    x_TD, w_EDF, sizes_E = residuals
    x_slope_TD = multiply(slope_TF, w_EDF, sizes_E, "NK", backend, fp8)
    w_slope_EDF = BACKENDS[backend].weights(x_TD, slope_TF, sizes_E)
    return x_slope_TD, w_slope_EDF, np.zeros(sizes_E.shape, jax.dtypes.float0)


product.defvjp(product_forward, product_backward)
