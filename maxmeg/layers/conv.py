"""The causal depthwise convolution of short convolutions, Mamba-2 and linear attention.

Letter beside the legend's: W width of the kernel. Channels X are sharded over tensor.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.distributed.halves import halos, stacked_halves
from maxmeg.layers.context import Context
from maxmeg.ops.cache import CacheSize, lane_states, with_lane_states
from maxmeg.ops.random import uniform
from maxmeg.parallel import ordering
from maxmeg.parallel.collectives import axis_size
from maxmeg.parallel.mesh import CONTEXT_AXES
from maxmeg.parallel.parameter import parameter


class Depthwise(nnx.Module):
    """A depthwise convolution, initialized uniformly as in PyTorch. axis: logical axis of the
    channels."""

    def __init__(
        self, key: jax.Array, channels: int, width: int, bias: bool, axis: str = "channels"
    ):
        weight_W1X = width**-0.5 * uniform(key, (width, 1, channels))
        self.weight = parameter(weight_W1X, None, None, axis)
        self.bias = parameter(jnp.zeros(channels), axis) if bias else None

    def __call__(
        self, x_BLX: Float[Array, "B L X"], before_BWX: jax.Array, segments_BM: jax.Array | None
    ) -> Float[Array, "B L X"]:
        """The convolution of x_BLX, which continues before_BWX, accumulated in float32.
        segments_BM: documents of both; tokens of other documents count as zeros."""
        L, width = x_BLX.shape[1], self.weight.shape[0]
        all_BMX = jnp.concatenate((before_BWX, x_BLX), axis=1)
        y_BLX = jnp.zeros(x_BLX.shape, jnp.float32)
        for tap, weight_X in enumerate(self.weight[...][:, 0].astype(jnp.float32)):
            earlier_BLX = all_BMX[:, tap : tap + L].astype(jnp.float32)
            if segments_BM is not None:
                is_same_BL = segments_BM[:, tap : tap + L] == segments_BM[:, width - 1 :]
                earlier_BLX = jnp.where(is_same_BL[..., None], earlier_BLX, 0)
            y_BLX += earlier_BLX * weight_X
        if self.bias is not None:
            y_BLX += self.bias[...].astype(jnp.float32)
        return y_BLX.astype(x_BLX.dtype)

    def convolved(
        self, x_BLX: Float[Array, "B L X"], segments_BL: jax.Array | None
    ) -> Float[Array, "B L X"]:
        """The convolution of the whole sequence: of each half of this device's piece if it is cut
        over context."""
        before = self.weight.shape[0] - 1
        if axis_size(CONTEXT_AXES) == 1 or before == 0:
            before_BWX = jnp.zeros((len(x_BLX), before, x_BLX.shape[-1]), x_BLX.dtype)
            if segments_BL is not None:
                segments_BL = jnp.pad(segments_BL, ((0, 0), (before, 0)), constant_values=-1)
            return self(x_BLX, before_BWX, segments_BL)
        parts, halos_BWX = (stacked_halves(x) for x in (x_BLX, halos(x_BLX, before)))
        if segments_BL is not None:
            # Zeros are before the sequence: 1 more than every id is no id of theirs.
            ids = halos(ordering.after(segments_BL + 1, halos_BWX), before), segments_BL + 1
            segments_BL = jnp.concatenate([stacked_halves(x) for x in ids], axis=1)
        y_NLX = self(parts, halos_BWX, segments_BL)
        return jnp.concatenate(jnp.split(y_NLX, 2), axis=1)

    def continued(
        self, x_BLX: Float[Array, "B L X"], state: jax.Array, ctx: Context
    ) -> tuple[Float[Array, "B L X"], jax.Array]:
        """The convolution in decoding, and the state: each row's last W - 1 inputs (`init_cache`,
        stacked over layers)."""
        places = ctx.cache_places
        assert places is not None and ctx.segments_BL is None
        before_BWX = lane_states(state, places)
        all_BMX = jnp.concatenate((before_BWX, x_BLX), axis=1)
        places_BW = places.counts_B[:, None] + jnp.arange(before_BWX.shape[1])
        last_BWX = jnp.take_along_axis(all_BMX, places_BW[..., None], axis=1)
        return self(x_BLX, before_BWX, None), with_lane_states(state, last_BWX, places)

    def init_cache(self, size: CacheSize) -> jax.Array:
        """The convolution's last W - 1 inputs of each lane."""
        weight_W1X = self.weight[...]
        width, _, channels = weight_W1X.shape
        return jnp.zeros((size.lanes, width - 1, channels), weight_W1X.dtype)
