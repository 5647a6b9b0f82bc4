"""The scan of a layer over its tokens: a whole sequence, or the next tokens of rows in a cache;
and initial values of its decays and steps.

Letters beside the legend's: N state, P channels of a head.
"""

import math
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.distributed.chunk_context import chunk_scan_over_context
from maxmeg.layers.context import Context
from maxmeg.ops.cache import lane_states, with_lane_states
from maxmeg.ops.chunk_scan import ScanSpec, chunk_scan, chunk_scan_step
from maxmeg.ops.random import uniform

FEW = 4  # tokens that decoding takes one by one
STEPS, FLOOR = (1e-3, 1e-1), 1e-4  # of Mamba's initial steps


class ScanInputs(typing.NamedTuple):
    """As of `ops.chunk_scan.chunk_scan`. beta_BLH None: without the delta rule."""

    q_BLGN: jax.Array
    k_BLGN: jax.Array
    v_BLHP: jax.Array
    log_decay: jax.Array
    beta_BLH: jax.Array | None = None


def scan(
    inputs: ScanInputs, ctx: Context, states: jax.Array | None, spec: ScanSpec
) -> tuple[Float[Array, "B L H P"], jax.Array | None]:
    """(output, new states). states: [layers, lanes, H, N, P] of a cache in float32; None: the whole
    sequence, whose parts other devices along context may hold. spec: how a sequence is scanned."""
    if states is None:
        return chunk_scan_over_context(*inputs, ctx.segments_BL, spec), None
    places = ctx.cache_places
    assert places is not None and ctx.segments_BL is None
    length = inputs.v_BLHP.shape[1]
    inputs = without_padding(inputs, places.is_token(length))
    before_BHNP = lane_states(states, places)
    if length <= FEW:
        y_BLHP, after_BHNP = chunk_scan_step(*inputs, before_BHNP)
    else:
        y_BLHP, after_BHNP = chunk_scan(*inputs, None, before_BHNP, spec)
    return y_BLHP, with_lane_states(states, after_BHNP, places)


def without_padding(inputs: ScanInputs, is_token_BL: jax.Array) -> ScanInputs:
    """Inputs whose padding does not change the state."""

    def zero_padding(x):
        return jnp.where(is_token_BL.reshape(*is_token_BL.shape, *(1,) * (x.ndim - 2)), x, 0)

    inputs = inputs._replace(log_decay=zero_padding(inputs.log_decay))
    if inputs.beta_BLH is not None:
        return inputs._replace(beta_BLH=zero_padding(inputs.beta_BLH))
    return inputs._replace(v_BLHP=zero_padding(inputs.v_BLHP))


def between(key: jax.Array, count: int, least: float, most: float) -> jax.Array:
    """`count` numbers uniform in (least, most)."""
    return least + (most - least) * (uniform(key, (count,)) + 1) / 2


def first_step_biases(key: jax.Array, count: int) -> jax.Array:
    """What softplus maps to Mamba's initial steps: log-uniform numbers, at least FLOOR."""
    steps = jnp.maximum(jnp.exp(between(key, count, *map(math.log, STEPS))), FLOOR)
    return steps + jnp.log(-jnp.expm1(-steps))
