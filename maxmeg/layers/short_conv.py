"""The gated short convolution of LFM2 (Liquid AI, 2025): y = out(c * conv(b * x)).

b, c and x are projections of the input. The convolution is causal and depthwise along the sequence.
There are D channels X, sharded over tensor. Letter beside the legend's: W width of the kernel.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.layers.mixer import Mixer, MixerSpec, Widths
from maxmeg.ops.random import split, uniform
from maxmeg.parallel.collectives import stored


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


class Cache(typing.NamedTuple):
    """The convolution's last W - 1 inputs of each row."""

    x_BWX: jax.Array


class Depthwise(nnx.Module):
    """A depthwise convolution, initialized uniformly as in PyTorch."""

    def __init__(self, key: jax.Array, channels: int, width: int, bias: bool):
        bound, axes = width**-0.5, (None, None, "channels")
        weight_W1X = bound * uniform(key, (width, 1, channels))
        self.weight = nnx.Param(weight_W1X, axes=axes)
        self.bias = nnx.Param(jnp.zeros(channels), axes=("channels",)) if bias else None

    def __call__(
        self, x_BLX: Float[Array, "B L X"], before_BWX: jax.Array, ctx: Context
    ) -> Float[Array, "B L X"]:
        """The convolution of x_BLX, which continues before_BWX, accumulated in float32. Tokens of
        other documents count as zeros."""
        L, width = x_BLX.shape[1], self.weight.shape[0]
        all_BMX = jnp.concatenate((before_BWX, x_BLX), axis=1)
        y_BLX = jnp.zeros(x_BLX.shape, jnp.float32)
        for tap, weight_X in enumerate(self.weight[...][:, 0].astype(jnp.float32)):
            earlier_BLX = all_BMX[:, tap : tap + L].astype(jnp.float32)
            if ctx.segments_BL is not None:
                ago = width - 1 - tap
                segments_BL = jnp.pad(ctx.segments_BL, ((0, 0), (ago, 0)), constant_values=-1)
                is_same_BL = segments_BL[:, :L] == ctx.segments_BL
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
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: Cache | None = None
    ) -> tuple[Float[Array, "B L D"], Cache | None, dict]:
        """(partial sums over tensor, new cache, no auxiliary values)."""
        gate_BLX = stored(self.input_gate(h_BLD, ctx), "conv_input_gate")
        output_BLX = stored(self.output_gate(h_BLD, ctx), "conv_output_gate")
        x_BLX = gate_BLX * stored(self.value(h_BLD, ctx), "conv_value")
        before_BWX = self.init_cache(len(h_BLD), 0).x_BWX
        if cache is not None:
            assert ctx.cache_offset is not None and ctx.segments_BL is None
            is_prefill = isinstance(ctx.cache_offset, int)  # of an empty cache
            before_BWX = before_BWX if is_prefill else cache.x_BWX
            cache = self._last(jnp.concatenate((before_BWX, x_BLX), axis=1), is_prefill, ctx)
        y_BLX = output_BLX * self.kernel(x_BLX, before_BWX, ctx)
        return self.out(y_BLX, ctx), cache, {}

    def _last(self, x_BMX: jax.Array, is_prefill: bool, ctx: Context) -> Cache:
        """The last W - 1 inputs of each row. In a prefill, rows are padded with tokens that repeat
        the position of the last token."""
        count = self.spec.kernel_size - 1
        if not is_prefill:
            return Cache(x_BMX[:, x_BMX.shape[1] - count :])
        places_BW = ctx.positions_BL[:, -1:] + 1 + jnp.arange(count)
        return Cache(jnp.take_along_axis(x_BMX, places_BW[..., None], axis=1))

    def init_cache(self, batch: int, length: int) -> Cache:
        weight_W1X = self.kernel.weight[...]
        width, _, channels = weight_W1X.shape
        return Cache(jnp.zeros((batch, width - 1, channels), weight_W1X.dtype))
