"""The gated short convolution of LFM2 (Liquid AI, 2025): y = out(c * conv(b * x)).

b, c and x are projections of the input. The convolution is causal and depthwise along the sequence.
There are D channels X, sharded over tensor.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.layers.conv import Depthwise
from maxmeg.layers.linear import Linear
from maxmeg.layers.mixer import Mixer, MixerSpec, Widths
from maxmeg.ops.cache import CacheSize
from maxmeg.ops.random import split
from maxmeg.parallel.collectives import stored


@dataclasses.dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """kernel_size: number of tokens that the convolution reads, including the current one. bias: of
    all projections and of the convolution."""

    name = "conv"

    kernel_size: int = 3
    bias: bool = False

    def make(self, key: jax.Array) -> "ShortConv":
        return ShortConv(key, self)

    def weights(self) -> int:
        return (4 * self.hidden_size + self.kernel_size) * self.hidden_size

    def halos(self, tensor: int = 1) -> tuple[int, ...]:
        return ((self.kernel_size - 1) * self.hidden_size // tensor,)

    def widths(self, tensor: int = 1) -> Widths:
        names = ("conv_input_gate", "conv_output_gate", "conv_value")
        return Widths(stored=dict.fromkeys(names, self.hidden_size), last_input=self.hidden_size)


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
            y_BLX = self.kernel.convolved(x_BLX, ctx.segments_BL)
        else:
            y_BLX, cache = self.kernel.continued(x_BLX, cache, ctx)
        return self.out(output_BLX * y_BLX, ctx), cache, {}

    def init_cache(self, size: CacheSize) -> jax.Array:
        """The convolution's last W - 1 inputs of each lane."""
        return self.kernel.init_cache(size)
