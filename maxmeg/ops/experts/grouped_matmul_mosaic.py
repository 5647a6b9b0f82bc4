"""grouped_matmul by our kernels for Hopper (kernels/grouped_matmul.py). Not yet run on a GPU.

Not chosen by "auto" until it has been measured. JAX traces and lowers a kernel at each call; the
products are jitted so that calls of the same shapes share one kernel.
"""

import functools

import jax
import jax.numpy as jnp

from maxmeg.ops.backend import Device, kernel_module, refuses_hopper_kernels
from maxmeg.ops.experts.aligned_groups import align_groups, aligned_sizes

SUPPORTS = (
    "bfloat16 and float16 on Hopper GPUs, groups of any size, up to 256 of them, dimensions that "
    "are multiples of 64, or of 128 for fp8"
)


def refuses(x_TD, w_EDF, sizes_E, fp8: bool, device: Device) -> str:
    """Why the kernels cannot run this call; empty if they can."""
    if reason := refuses_hopper_kernels(device):
        return reason
    return kernel_module("grouped_matmul").operands_refuse(x_TD, w_EDF, fp8)


@functools.partial(jax.jit, static_argnames="order")
def rows(x_TK: jax.Array, w: jax.Array, sizes_E: jax.Array, scales: tuple, order: str) -> jax.Array:
    """Each row times its group's matrix; scales: of rows and columns or of blocks, for fp8."""
    dtype = jnp.bfloat16 if scales else x_TK.dtype
    grouped_rows = kernel_module("grouped_matmul").grouped_rows
    return grouped_rows(x_TK, w, sizes_E, scales, right=order, out_dtype=dtype)


@jax.jit
def weights(x_TD: jax.Array, y_TF: jax.Array, sizes_E: jax.Array, scales: tuple) -> jax.Array:
    """x^T y of each group's rows, in the dtype of x; zeros for an empty group. scales: of the
    columns of both, for fp8, or of blocks of groups that begin at whole ones. Tensor cores read
    8-bit operands along the dimension that is summed: codes are transposed, and groups padded to
    whole steps of the kernel."""
    kernels = kernel_module("grouped_matmul")
    if not scales:
        return kernels.grouped_weights(x_TD, y_TF, sizes_E, out_dtype=x_TD.dtype)
    if not kernels.of_blocks(scales):
        depth = kernels.FP8_WEIGHTS_TILING.depth
        x_TD, y_TF = (align_groups(codes, sizes_E, depth) for codes in (x_TD, y_TF))
        sizes_E = aligned_sizes(sizes_E, depth)
    return kernels.grouped_weights(x_TD.T, y_TF.T, sizes_E, scales)
