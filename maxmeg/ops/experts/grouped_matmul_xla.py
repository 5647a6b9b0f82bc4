"""The reference for grouped_matmul, with jax.lax.ragged_dot.

On NVIDIA GPUs XLA makes it dense: memory of rows times groups, and each row multiplied with every
matrix. Many experts need another backend there.
"""

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.ops.backend import Device

SUPPORTS = "any device, any sizes and float dtypes"
WEIGHT_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def refuses(x_TD, w_EDF, sizes_E, fp8: bool, device: Device) -> str:
    return ""


def live_rows(x: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """x with zeros after the last group."""
    live_T1 = jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes_E)
    return jnp.where(live_T1, x, jnp.zeros_like(x))


def rows(x_TK: jax.Array, w: jax.Array, sizes_E: jax.Array, scales: tuple, order: str) -> jax.Array:
    """Each row times its group's matrix; scales: of rows and columns, for fp8."""
    dtype = jnp.float32 if scales else x_TK.dtype
    if scales:  # float8 numbers are exact in bfloat16
        x_TK, w = x_TK.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    w_EKN = w if order == "KN" else w.swapaxes(1, 2)
    sizes_E = sizes_E.astype(jnp.int32)
    y_TN = lax.ragged_dot(
        live_rows(x_TK, sizes_E), w_EKN, sizes_E, preferred_element_type=jnp.float32
    )
    if scales:
        scale_T, scale_EN = scales
        groups = jnp.arange(scale_EN.shape[0])
        groups_T = jnp.repeat(groups, sizes_E, total_repeat_length=y_TN.shape[0])
        y_TN = y_TN * scale_T[:, None] * scale_EN[groups_T]
    return y_TN.astype(dtype)


def weights(x_TD: jax.Array, y_TF: jax.Array, sizes_E: jax.Array, scales: tuple) -> jax.Array:
    """x^T y of each group's rows, in the dtype of x; zeros for an empty group. scales: of the
    columns of both, for fp8, whose product is float32."""
    dtype = jnp.float32 if scales else x_TD.dtype
    if scales:
        x_TD, y_TF = x_TD.astype(jnp.bfloat16), y_TF.astype(jnp.bfloat16)
    x_TD, y_TF = live_rows(x_TD, sizes_E), live_rows(y_TF, sizes_E)
    sums_EDF = lax.ragged_dot_general(
        x_TD,
        y_TF,
        sizes_E.astype(jnp.int32),
        WEIGHT_DIMENSIONS,
        preferred_element_type=jnp.float32,
    )
    if scales:
        scale_D, scale_F = scales
        sums_EDF = sums_EDF * scale_D[:, None] * scale_F
    return sums_EDF.astype(dtype)
