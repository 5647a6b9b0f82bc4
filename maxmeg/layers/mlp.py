"""The feed-forward sublayer, plain or gated."""

import dataclasses

import jax
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.ops.activation import GATED, activate


@dataclasses.dataclass(frozen=True)
class MlpSpec:
    """Sizes, activation, and standard deviations of initial input and output weights; clamp and
    offset as `activate` has them."""

    hidden_size: int
    ffn_size: int
    activation: str = "swiglu"
    bias: bool = False
    std: float = 0.02
    out_std: float = 0.02
    clamp: float = 0.0
    offset: float = 0.0


class Mlp(nnx.Module):
    """out(act(gate x) * up x), or out(act(up x)) where the activation is not gated."""

    def __init__(self, key: jax.Array, spec: MlpSpec):
        keys = jax.random.split(key, 3)
        D, F = spec.hidden_size, spec.ffn_size
        self.spec = spec
        self.up = Linear(keys[0], (D, F), ("embed", "mlp"), spec.std, spec.bias)
        gated = spec.activation in GATED
        self.gate = (
            Linear(keys[1], (D, F), ("embed", "mlp"), spec.std, spec.bias) if gated else None
        )
        self.out = Linear(keys[2], (F, D), ("mlp", "embed"), spec.out_std, spec.bias)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: None = None
    ) -> tuple[Float[Array, "B L D"], None, dict]:
        """Partial sums over tensor; no cache, no auxiliary values."""
        up_BLF = self.up(h_BLD, ctx)
        inputs = (up_BLF,) if self.gate is None else (self.gate(h_BLD, ctx), up_BLF)
        spec = self.spec
        h_BLF = activate(spec.activation, *inputs, clamp=spec.clamp, offset=spec.offset)
        return self.out(h_BLF, ctx), cache, {}
