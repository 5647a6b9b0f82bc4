"""The gated short convolution of LFM2 (Liquid AI, 2025): y = out(c * conv(b * x)).

b, c and x are projections of the input. The convolution is causal and depthwise along the sequence.
There are D channels X, sharded over tensor. Letter beside the legend's: W width of the kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.cache import CacheSize
from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.layers.mixer import Mixer, MixerSpec, Widths
from maxmeg.ops.random import split, uniform
from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import axis_size, stored
from maxmeg.parallel.context import halos, stacked_halves
from maxmeg.parallel.mesh import CONTEXT_AXES


@dataclasses.dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """kernel_size: number of tokens that the convolution reads, including the current one. bias: of
    all projections and of the convolution. std, out_std: standard deviations of the initial input
    and output weights."""

    name = "conv"

    kernel_size: int = 3
    bias: bool = False
    std: float = 0.02
    out_std: float = 0.02

    def make(self, key: jax.Array) -> "ShortConv":
        return ShortConv(key, self)

    def weights(self) -> int:
        return (4 * self.hidden_size + self.kernel_size) * self.hidden_size

    def widths(self, kv_copies: int = 1) -> Widths:
        names = ("conv_input_gate", "conv_output_gate", "conv_value")
        return Widths(stored=dict.fromkeys(names, self.hidden_size), last_input=self.hidden_size)


class Depthwise(nnx.Module):
    """A depthwise convolution, initialized uniformly as in PyTorch."""

    def __init__(self, key: jax.Array, channels: int, width: int, bias: bool):
        bound, axes = width**-0.5, (None, None, "channels")
        weight_W1X = bound * uniform(key, (width, 1, channels))
        self.weight = nnx.Param(weight_W1X, axes=axes)
        self.bias = nnx.Param(jnp.zeros(channels), axes=("channels",)) if bias else None

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


class ShortConv(Mixer):
    """out(output_gate(h) * kernel(input_gate(h) * value(h))); channels are sharded over tensor."""

    def __init__(self, key: jax.Array, spec: ShortConvSpec):
        keys = split(key, 5)
        self.spec, D = spec, spec.hidden_size
        inward = (D, D), ("embed", "channels"), spec.std, spec.bias
        self.input_gate = Linear(keys[0], *inward)
        self.output_gate = Linear(keys[1], *inward)
        self.value = Linear(keys[2], *inward)
        self.kernel = Depthwise(keys[3], D, spec.kernel_size, spec.bias)
        self.out = Linear(keys[4], (D, D), ("channels", "embed"), spec.out_std, spec.bias)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: jax.Array | None = None
    ) -> tuple[Float[Array, "B L D"], jax.Array | None, dict]:
        """(partial sums over tensor, new cache, no auxiliary values)."""
        gate_BLX = stored(self.input_gate(h_BLD, ctx), "conv_input_gate")
        output_BLX = stored(self.output_gate(h_BLD, ctx), "conv_output_gate")
        x_BLX = gate_BLX * stored(self.value(h_BLD, ctx), "conv_value")
        if cache is None:
            y_BLX = self._convolved(x_BLX, ctx.segments_BL)
        else:
            before_BWX, cache = self._continued(x_BLX, cache, ctx)
            y_BLX = self.kernel(x_BLX, before_BWX, None)
        return self.out(output_BLX * y_BLX, ctx), cache, {}

    def _convolved(self, x_BLX: jax.Array, segments_BL: jax.Array | None) -> jax.Array:
        """The convolution of the whole sequence: of each half of this device's piece if it is cut
        over context."""
        before = self.kernel.weight.shape[0] - 1
        if axis_size(CONTEXT_AXES) == 1 or before == 0:
            before_BWX = jnp.zeros((len(x_BLX), before, x_BLX.shape[-1]), x_BLX.dtype)
            if segments_BL is not None:
                segments_BL = jnp.pad(segments_BL, ((0, 0), (before, 0)), constant_values=-1)
            return self.kernel(x_BLX, before_BWX, segments_BL)
        parts, halos_BWX = (stacked_halves(x) for x in (x_BLX, halos(x_BLX, before)))
        if segments_BL is not None:
            # Zeros are before the sequence: 1 more than every id is no id of theirs.
            ids = halos(collectives.after(segments_BL + 1, halos_BWX), before), segments_BL + 1
            segments_BL = jnp.concatenate([stacked_halves(x) for x in ids], axis=1)
        y_NLX = self.kernel(parts, halos_BWX, segments_BL)
        return jnp.concatenate(jnp.split(y_NLX, 2), axis=1)

    def _continued(self, x_BLX: jax.Array, state: jax.Array, ctx: Context):
        """(each row's last W - 1 inputs before x, the state with those of its tokens in x)."""
        places = ctx.cache_places
        assert places is not None and ctx.segments_BL is None
        before_BWX = state[places.layer, places.lanes_B]
        before_BWX = jnp.where(places.starts_B[:, None, None] > 0, before_BWX, 0)
        all_BMX = jnp.concatenate((before_BWX, x_BLX), axis=1)
        places_BW = places.counts_B[:, None] + jnp.arange(before_BWX.shape[1])
        last_BWX = jnp.take_along_axis(all_BMX, places_BW[..., None], axis=1)
        used_B = jnp.where(places.counts_B > 0, places.lanes_B, state.shape[1])
        return before_BWX, state.at[places.layer, used_B].set(last_BWX, mode="drop")

    def init_cache(self, size: CacheSize) -> jax.Array:
        """The convolution's last W - 1 inputs of each lane."""
        weight_W1X = self.kernel.weight[...]
        width, _, channels = weight_W1X.shape
        return jnp.zeros((size.lanes, width - 1, channels), weight_W1X.dtype)
