"""Products of 8-bit matrices with scales of blocks of 128 numbers: backends, and our kernel's call.

The backend xla, which `Recipe.multiply` (ops/quantized.py) is, multiplies dequantized 16-bit
numbers on any device. The backend mosaic (kernels/fp8_blockwise.py) multiplies the codes on Hopper
GPUs, and so do experts' grouped products (ops/experts/grouped_matmul.py) in their backend mosaic.
It has not been measured, so "auto" does not choose it before choices.json names it.
"""

import functools
import types

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.ops.backend import (
    Device,
    choose,
    kernel_module,
    log_choice,
    refuses_hopper_kernels,
)

XLA, MOSAIC = "xla", "mosaic"
BACKENDS = {
    MOSAIC: types.SimpleNamespace(SUPPORTS="Hopper GPUs", refuses=refuses_hopper_kernels),
    XLA: types.SimpleNamespace(SUPPORTS="any device", refuses=lambda device: ""),
}
ORDER = (XLA,)  # for "auto": mosaic has not been measured
OP = "block_matmul"
MANTISSA_BITS = 23  # of float32


def backend_of(named: str, device: Device) -> str:
    """The backend for a device, logged for "auto". ValueError if it cannot run the named one."""
    name, reason = choose(OP, BACKENDS, ORDER, named, (), device)
    if named == "auto":
        log_choice(OP, name, reason)
    return name


def in_rows(x: jax.Array, dim: int) -> jax.Array:
    """Matrices [.., R, C] as [matrices, rows, numbers that a product over `dim` sums]."""
    x = x if dim == -1 else x.swapaxes(-1, -2)
    return x.reshape(-1, *x.shape[-2:])


def power_of_two(biased: jax.Array) -> jax.Array:
    """The float32 numbers with these biased exponents, integers."""
    return lax.bitcast_convert_type(biased.astype(jnp.int32) << MANTISSA_BITS, jnp.float32)


@functools.partial(jax.jit, static_argnames=("dims", "dtype"))  # calls of a shape share a kernel
def multiply(
    a: tuple[jax.Array, jax.Array],
    b: tuple[jax.Array, jax.Array],
    dims: tuple[int, int],
    dtype: jnp.dtype,
) -> jax.Array:
    """As `ops.quantized.multiply`, by the kernel, with the biased exponents of the scales of blocks
    along these dimensions. Tensor cores need 8-bit operands contiguous along the sum: those of
    dimension -2 are transposed here, which XLA joins with their quantization if it can."""
    codes, exponents = zip(a, b, strict=True)
    operands = [in_rows(array, dim) for array, dim in zip(codes, dims, strict=True)]
    for array, dim in zip(exponents, dims, strict=True):
        operands.append(power_of_two(in_rows(array, dim)))
    product = kernel_module("fp8_blockwise").block_matmul(*operands, out_dtype=dtype)
    return product.reshape(*codes[0].shape[:-2], *product.shape[1:])
