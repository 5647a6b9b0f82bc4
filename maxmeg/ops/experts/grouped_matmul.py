"""Grouped matrix product, each row times the matrix of its group (expert): call and backends.

A backend (ops/backend.py) has `refuses(x, w, sizes, fp8, device)`, the reason why it cannot run a
call, and two products: `rows(x, w, sizes, scales, order)`, each row times its group's matrix, and
`weights(x, y, sizes, scales)`, x^T y over each group's rows. With scales, operands are 8-bit codes;
only mosaic takes scales of blocks.

In 8 bits (ops/quantized.py) each product quantizes its operands along the dimension it sums over:
forward and input gradient along rows, the gradient of w along the tokens of a group.

- One scale per tensor (tensorwise): w has one scale, rows of x and of gradients one each; for the
  gradient of w, columns have one each. That leaves enough range for gradients, so float8_e5m2 is
  not needed. Backends multiply codes. Hopper's tensor cores accumulate them with fewer bits than
  float32 (DeepSeek-V3, section 3.3.2), which beside roundings to 2^-4 does not show in sums over
  features; sums over tokens are added up in float32 every 128 tokens.
- Scales of blocks (blockwise, mxfp8): for the gradient of w every group is padded with zeros to
  whole blocks, so that no block has rows of two groups. The backend mosaic multiplies the codes of
  blockwise where dense layers do (ops/block_matmul.py). Else they are dequantized, and products are
  of 16 bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmeg.ops.backend import pick, target_device
from maxmeg.ops.experts import grouped_matmul_mosaic, grouped_matmul_xla
from maxmeg.ops.experts.aligned_groups import align_groups, aligned_sizes
from maxmeg.ops.quantized import (
    BLOCK,
    E4M3,
    Quantized,
    Recipe,
    no_gradient,
    power_of_two,
    quantize,
    quantize_blocks,
    scale_of,
)

BACKENDS = {"mosaic": grouped_matmul_mosaic, "xla": grouped_matmul_xla}
ORDER = ("xla",)  # for "auto": mosaic has not been measured


def grouped_matmul(
    x_TD: Float[Array, "T D"],
    w_EDF: Float[Array, "E D F"],
    sizes_E: Int[Array, " E"],
    *,
    codes: list[Quantized] | None = None,
    recipe: Recipe | None = None,
    x_codes: Quantized | None = None,
    backend: str = "auto",
) -> Float[Array, "T F"]:
    """y[t] = x[t] @ w[group of t], in the dtype of x, accumulated in float32.

    Rows are sorted by group; group e has sizes_E[e] rows, possibly 0. Rows after the last group
    give zeros and take part in no gradient, even if they are NaN.

    codes: w quantized by `recipe` (Recipe.weights), in place of w, which is then not read and only
    gets the gradient. recipe: of all three products; None: they are in the dtype of x. x_codes: x
    by `in_rows`, if it is there already; None: it is quantized here.

    backend: a key of BACKENDS, or "auto". ValueError if shapes do not fit or the backend cannot run
    the call.
    """
    check_shapes(x_TD, w_EDF, sizes_E)
    call = (x_TD, w_EDF, sizes_E, recipe is not None and not recipe.block)
    chosen = pick("grouped_matmul", BACKENDS, ORDER, backend, call)
    return product(x_TD, w_EDF, sizes_E, codes, x_codes, recipe, chosen)


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
    x: Quantized, w: Quantized, sizes_E: Array, order: str, recipe: Recipe, backend: str, dtype
) -> Array:
    """Rows by `in_rows` times matrices [E, K, N] (order "KN") or [E, N, K] ("NK")."""
    rows, (x_codes_TK, exponents), (w_codes, scale) = BACKENDS[backend].rows, x, w
    if not multiplies_codes(recipe, backend):
        left, right = (recipe.wide(each, exact(dtype)) for each in (x, w))
        return rows(left, right, sizes_E, (), order).astype(dtype)
    live_T1 = jnp.arange(x_codes_TK.shape[0])[:, None] < jnp.sum(sizes_E)
    scale_TK = jnp.where(live_T1, power_of_two(exponents), 0.0)
    w_codes = w_codes if order == "NK" else w_codes.swapaxes(1, 2)
    if recipe.block:
        blocks = power_of_two(scale if order == "NK" else scale.swapaxes(1, 2))
        scales = scale_TK, blocks
    else:
        scales = scale_TK[:, 0], jnp.broadcast_to(scale, w_codes.shape[:2])
    return rows(x_codes_TK, w_codes, sizes_E, scales, "NK").astype(dtype)


def multiplies_codes(recipe: Recipe, backend: str) -> bool:
    """Whether a backend's products are of codes, not of dequantized numbers."""
    if not recipe.block:
        return True
    on_kernel = backend == "mosaic" and recipe.block == BLOCK
    return on_kernel and recipe.multiplies_codes_on(target_device())


def in_rows(x_TK: Array, recipe: Recipe, dtype: str) -> Quantized:
    """x for sums over features: codes, and exponents of the scales of rows or of their blocks."""
    if recipe.block:
        return recipe.quantize(x_TK, dtype, -1)
    return quantize_blocks(x_TK, E4M3, (1, x_TK.shape[1]))


def in_columns(x_TD: Array, sizes_E: Array, recipe: Recipe, dtype: str) -> Quantized:
    """x for sums over the tokens of each group: codes, and scales [D] or exponents of blocks."""
    if recipe.block:
        return recipe.quantize(align_groups(x_TD, sizes_E, recipe.block), dtype, -2)
    live_T1 = jnp.arange(x_TD.shape[0])[:, None] < jnp.sum(sizes_E)
    scale_D = scale_of(jnp.max(jnp.where(live_T1, jnp.abs(x_TD), 0), axis=0), E4M3)
    return quantize(x_TD, E4M3, scale_D)


def multiply_columns(
    x: Quantized, y: Quantized, sizes_E: Array, recipe: Recipe, backend: str, dtype
) -> Array:
    """x^T y over the rows of each group, of operands by `in_columns`."""
    weights = BACKENDS[backend].weights
    if not recipe.block:
        return weights(x[0], y[0], sizes_E, (x[1], y[1])).astype(dtype)
    left, right, scales = x[0], y[0], (power_of_two(x[1]), power_of_two(y[1]))
    if not multiplies_codes(recipe, backend):
        left, right, scales = recipe.wide(x, exact(dtype)), recipe.wide(y, exact(dtype)), ()
    return weights(left, right, aligned_sizes(sizes_E, recipe.block), scales).astype(dtype)


def exact(dtype) -> jnp.dtype:
    """A dtype that backends multiply and that holds codes times their scales exactly."""
    return jnp.dtype(jnp.bfloat16 if jnp.dtype(dtype).itemsize == 2 else jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def product(
    x_TD: Array,
    w_EDF: Array,
    sizes_E: Array,
    codes: list[Quantized] | None,
    x_codes: Quantized | None,
    recipe: Recipe | None,
    backend: str,
) -> Array:
    if recipe is None or codes is None:
        return BACKENDS[backend].rows(x_TD, w_EDF, sizes_E, (), "KN")
    rows = x_codes or in_rows(x_TD, recipe, recipe.forward)
    return multiply(rows, codes[0], sizes_E, "KN", recipe, backend, x_TD.dtype)


def product_forward(x_TD, w_EDF, sizes_E, codes, x_codes, recipe, backend):
    y_TF = product(x_TD, w_EDF, sizes_E, codes, x_codes, recipe, backend)
    if recipe is None:
        return y_TF, (x_TD, w_EDF, sizes_E, codes, x_codes)
    return y_TF, (in_columns(x_TD, sizes_E, recipe, recipe.forward), None, sizes_E, codes, x_codes)


def product_backward(recipe, backend, residuals, slope_TF):
    x, w_EDF, *others = residuals
    sizes_E, codes, _ = others
    rest = jax.tree.map(no_gradient, tuple(others))
    if recipe is None:
        x_slope_TD = BACKENDS[backend].rows(slope_TF, w_EDF, sizes_E, (), "NK")
        return x_slope_TD, BACKENDS[backend].weights(x, slope_TF, sizes_E, ()), *rest
    settings = recipe, backend, slope_TF.dtype
    rows = in_rows(slope_TF, recipe, recipe.backward)
    x_slope_TD = multiply(rows, codes[-1], sizes_E, "NK", *settings)
    columns = in_columns(slope_TF, sizes_E, recipe, recipe.backward)
    return x_slope_TD, multiply_columns(x, columns, sizes_E, *settings), *rest


product.defvjp(product_forward, product_backward)
