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
from maxmeg.ops.quantized import quantize, scale_of

BACKENDS = {"mosaic": grouped_matmul_mosaic, "xla": grouped_matmul_xla}
ORDER = ("xla",)  # for "auto": mosaic has not been measured
FP8 = "float8_e4m3fn"
Quantized = tuple[Float[Array, "E D F"], Float[Array, ""]]  # codes and their scale


def grouped_matmul(
    x_TD: Float[Array, "T D"],
    w_EDF: Float[Array, "E D F"],
    sizes_E: Int[Array, " E"],
    *,
    codes: Quantized | None = None,
    backend: str = "auto",
) -> Float[Array, "T F"]:
    """y[t] = x[t] @ w[group of t], in the dtype of x, accumulated in float32.

    Rows are sorted by group; group e has sizes_E[e] rows, possibly 0. Rows after the last group
    give zeros and take part in no gradient, even if they are NaN.

    codes: w in float8_e4m3fn, and its scale (ops/quantized.py). Forward and input gradient multiply
    them, and rows of x or of the gradient with a scale for each row. That leaves enough range for
    gradients, so float8_e5m2 is not needed. The gradient of w sums over rows, which have different
    scales: it uses unrounded x and gradients. Hopper's tensor cores accumulate float8 products with
    fewer bits than float32 (DeepSeek-V3, section 3.3.2); beside roundings to 2^-4 this does not
    show.

    backend: a key of BACKENDS, or "auto". ValueError if shapes do not fit or the backend cannot run
    the call.
    """
    check_shapes(x_TD, w_EDF, sizes_E)
    call = (x_TD, w_EDF, sizes_E, codes is not None)
    chosen = pick("grouped_matmul", BACKENDS, ORDER, backend, call)
    return product(x_TD, w_EDF, sizes_E, codes, chosen)


def check_shapes(x_TD: Any, w_EDF: Any, sizes_E: Any) -> None:
    shapes = f"x {x_TD.shape}, w {w_EDF.shape} and sizes {sizes_E.shape}"
    fits = (x_TD.ndim, w_EDF.ndim, sizes_E.ndim) == (2, 3, 1)
    if not fits or w_EDF.shape[:2] != (sizes_E.shape[0], x_TD.shape[1]):
        raise ValueError(f"{shapes} must be [T, D], [E, D, F] and [E]")
    if x_TD.dtype != w_EDF.dtype or not jnp.issubdtype(x_TD.dtype, jnp.floating):
        raise ValueError(f"x is {x_TD.dtype} and w {w_EDF.dtype}: cast both to one float dtype")
    if not jnp.issubdtype(sizes_E.dtype, jnp.integer):
        raise ValueError(f"sizes are {sizes_E.dtype}: they must be integers")


def multiply(
    x_TK: Array, w: Array | None, sizes_E: Array, codes: Quantized | None, order: str, backend: str
) -> Array:
    """Rows times matrices [E, K, N] (order "KN") or [E, N, K] ("NK"): `w`, or codes of them."""
    rows = BACKENDS[backend].rows
    if codes is None:
        return rows(x_TK, w, sizes_E, (), order)
    live_T = jnp.arange(x_TK.shape[0]) < jnp.sum(sizes_E)
    scale_T = scale_of(jnp.max(jnp.abs(x_TK), axis=-1), FP8)
    x_codes_TK, _ = quantize(x_TK, FP8, scale_T[:, None])
    w_codes, scale = codes
    w_codes = w_codes if order == "NK" else w_codes.swapaxes(1, 2)
    scales = jnp.where(live_T, scale_T, 0.0), jnp.broadcast_to(scale, w_codes.shape[:2])
    return rows(x_codes_TK, w_codes, sizes_E, scales, "NK").astype(x_TK.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def product(
    x_TD: Array, w_EDF: Array, sizes_E: Array, codes: Quantized | None, backend: str
) -> Array:
    return multiply(x_TD, w_EDF, sizes_E, codes, "KN", backend)


def product_forward(x_TD, w_EDF, sizes_E, codes, backend):
    weights = w_EDF if codes is None else None
    return product(x_TD, w_EDF, sizes_E, codes, backend), (x_TD, weights, sizes_E, codes)


def product_backward(backend, residuals, slope_TF):
    x_TD, w_EDF, sizes_E, codes = residuals
    x_slope_TD = multiply(slope_TF, w_EDF, sizes_E, codes, "NK", backend)
    w_slope_EDF = BACKENDS[backend].weights(x_TD, slope_TF, sizes_E)
    rest = np.zeros(sizes_E.shape, jax.dtypes.float0), jax.tree.map(jnp.zeros_like, codes)
    return x_slope_TD, w_slope_EDF, *rest


product.defvjp(product_forward, product_backward)
