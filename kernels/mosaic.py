"""Pallas Mosaic-GPU for jax 0.10 to 0.12, and constants and helpers that our kernels share."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its refs behave like arrays, which its types do not say
WARPGROUP_AXIS = "warpgroup"
WARPGROUP_ROWS = 64  # M of a WGMMA instruction
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}  # by consumers; a multiprocessor has 65,536
LOG2E = math.log2(math.e)
MATRIX = plgpu.Layout.WGMMA  # layout of a matrix in registers
ROWS, COLUMNS = MATRIX.reduce(1), MATRIX.reduce(0)  # one number per row, or per column, of a matrix
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

    grid: name -> size, slowest first. reduction_bytes: shared memory for reductions across warps;
    reductions of rows need none.
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
            approx_math=True,  # exp2 and log by the special function unit
            reduction_scratch_bytes=reduction_bytes,
            # We set the layouts of registers; since jax 0.11 the default is to infer them.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )


def split_warpgroups(
    consumers: int, consume: Callable[[jax.Array], None], produce: Callable[[], None]
) -> None:
    """Run `consume(warpgroup)` in each consumer warpgroup and `produce()` in the one after them."""
    warpgroup = jax.lax.axis_index(WARPGROUP_AXIS)

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS[consumers], action="increase")
        consume(warpgroup)

    @pl.when(warpgroup == consumers)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce()


def transposed(ref: Any) -> Any:
    """The transpose of a matrix in shared memory, as an operand of wgmma."""
    return ref.transpose((1, 0))


def load(ref: Any, layout: Any) -> jax.Array:
    """Load shared or global memory into registers in `layout`."""
    return plgpu.load(ref, *_LOAD_ARGUMENTS, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Store registers to unswizzled rows of shared memory, in spite of bank conflicts."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def matrix_buffer(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for [..., rows, columns], swizzled as TMA and wgmma require."""
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def add_products(*sums: tuple[Any, ...]) -> list[jax.Array]:
    """Of each (matrix in registers, (left, right), ...) the sum of the matrix and the products,
    all of which run at the same time."""

    def multiply(refs: Any) -> None:
        for ref, (_, *operands) in zip(refs, sums, strict=True):
            for left, right in operands:
                plgpu.wgmma(ref, left, right)

    return list(pl.run_state(multiply)(tuple(plgpu.ACC.init(start) for start, *_ in sums)))


def constant(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """A float32 constant in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def spread(numbers: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number per row, broadcast to a matrix."""
    return jax.lax.broadcast_in_dim(numbers, shape, [0])


def spread_columns(numbers: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number per column, broadcast to a matrix."""
    return jax.lax.broadcast_in_dim(numbers, shape, [1])


def ring_slot(step: jax.Array, slots: int) -> jax.Array:
    return jax.lax.rem(step, jnp.asarray(slots, step.dtype))
