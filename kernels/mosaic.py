"""Pallas Mosaic-GPU under one set of names, for jax 0.10 to 0.12."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its references act as arrays, which its types do not say
WARPGROUP_AXIS = "warpgroup"
_index = inspect.signature(plgpu.load).parameters.get("idx")
_LOAD_ARGUMENTS = ((),) if _index and _index.default is inspect.Parameter.empty else ()


def launch(
    body: Callable[..., None],
    out_type: Any,
    grid: dict[str, int],
    warpgroups: int,
    scratch_types: Sequence[Any],
    reduction_bytes: int = 2048,
) -> Callable[..., Any]:
    """A function of arrays that runs `body(*inputs, *outputs, *scratch)` on every point of `grid`.

    grid: name -> size, slowest first. approx_math: exp2 and log by the special function unit.
    reduction_bytes: shared memory for reductions across warps, of which those of rows need none.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name=WARPGROUP_AXIS,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=reduction_bytes,
            # Registers' layouts are ours to say; since jax 0.11 the default is to infer them.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )


def transposed(ref: Any) -> Any:
    """The transpose of a matrix in shared memory, as an operand of wgmma."""
    return ref.transpose((1, 0))


def load(ref: Any, layout: Any) -> jax.Array:
    """An array of registers in `layout`, from shared or global memory."""
    return plgpu.load(ref, *_LOAD_ARGUMENTS, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Registers to plain rows of shared memory, although threads then meet in its banks."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def matrix_buffer(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for [..., rows, columns], swizzled as TMA writes it and wgmma reads it."""
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def constant(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """A float32 constant in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def ring_slot(step: jax.Array, slots: int) -> jax.Array:
    return jax.lax.rem(step, jnp.asarray(slots, step.dtype))


__all__ = [
    "WARPGROUP_AXIS",
    "constant",
    "launch",
    "load",
    "matrix_buffer",
    "pl",
    "plgpu",
    "ring_slot",
    "store",
    "transposed",
]
