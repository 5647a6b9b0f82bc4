"""Kernels of ours by Mosaic-GPU's interpreter on the CPU, which looks for races.

What runs is the kernel's own program: grid, items, copies, rings, barriers, masks, stores. That
copies move whole atoms (kernels/matmul.py) is not modelled. The
interpreter of jax 0.10 has no code for transposed operands and register layouts: there products
are made by plain ones of the same tiles. It also drops a copy to global memory that is partly past
the end: WRITES_PAST_THE_END tells.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params

from maxmeg.kernels import matmul, mosaic
from maxmeg.kernels.mosaic import plgpu

COMPLETE = hasattr(plgpu, "InterpretGPUParams")
WRITES_PAST_THE_END = COMPLETE
# Zeros are what TMA reads past the end.
PARAMS = params.InterpretGPUParams(
    detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="zero"
)


real_accumulate = matmul.accumulate


def accumulate(always, tiling, ring, span, warpgroup, prepare):
    """As the kernels' own, but for the way in which operands are multiplied."""
    if not always and (tiling.left, tiling.right) == ("MK", "KN"):
        return real_accumulate(tiling, ring, span, warpgroup, prepare)
    position, steps = span

    def add(step, sums):
        slot = mosaic.ring_slot(position + step, tiling.stages)
        left, right = matmul.tiles_at(tiling, ring, position + step, warpgroup)
        plgpu.barrier_wait(ring.ready.at[slot])
        prepare(step, warpgroup, left, right)
        left = left[...] if tiling.left == "MK" else left[...].T
        right = right[...] if tiling.right == "KN" else right[...].T
        plgpu.commit_smem()  # unlike those of wgmma, these reads are not of the copies' kind
        plgpu.barrier_arrive(ring.free.at[slot])
        return sums + jnp.dot(left, right, preferred_element_type=jnp.float32)

    shape = (matmul.WARPGROUP_ROWS, tiling.columns)
    return lax.fori_loop(0, steps, add, jnp.zeros(shape, jnp.float32))


def iota(dtype, shape, dim, layout=None):
    return lax.broadcasted_iota(dtype, shape, dim)


def fill_gaps(monkeypatch, always: bool) -> None:
    monkeypatch.setattr(matmul, "accumulate", functools.partial(accumulate, always))
    monkeypatch.setattr(mosaic, "load", lambda ref, layout: ref[...])
    monkeypatch.setattr(plgpu, "broadcasted_iota", iota)


def interpret(call, monkeypatch, plainly: bool = False):
    """(call(), or None of a call with a race, whether a race was found).

    plainly: all products are made plainly, whose reads jax 0.10 looks at for races too.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(interpret_pallas_call.reset_gpu_interpret_mode_state)
        patch = stack.enter_context(monkeypatch.context())
        if plainly or not COMPLETE:
            fill_gaps(patch, plainly)
        stack.enter_context(params.force_gpu_interpret_mode(PARAMS))
        try:
            actual = jax.block_until_ready(call())
        except jax.errors.JaxRuntimeError as error:  # how jax 0.12 reports a race
            if "RACE DETECTED" not in str(error):
                raise
            return None, True
        return actual, bool(interpret_pallas_call.get_races().races_found)
