"""The feed-forward sublayer, plain or gated."""

import dataclasses

import jax
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear, project
from maxmeg.layers.mixer import Mixer, MixerSpec, Widths
from maxmeg.ops.activation import GATED, activate
from maxmeg.ops.random import split
from maxmeg.parallel.collectives import stored


@dataclasses.dataclass(frozen=True)
class MlpSpec(MixerSpec):
    """clamp, offset: as in `activate`. gate_scale: factor of the gate branch before its
    activation."""

    name = "mlp"

    ffn_size: int
    activation: str = "swiglu"
    bias: bool = False
    clamp: float = 0.0
    offset: float = 0.0
    gate_scale: float = 1.0

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        mlp, base = config.mlp, super().settings(config, parallel, mixer)
        limits = {"clamp": mlp.activation_clamp, "offset": mlp.glu_offset}
        return base | {"ffn_size": config.ffn * (2 if mixer == "wide_mlp" else 1)} | limits

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    def make(self, key: jax.Array) -> "Mlp":
        return Mlp(key, self)

    def weights(self) -> int:
        return (2 + self.is_gated) * self.hidden_size * self.ffn_size

    def widths(self, tensor: int = 1) -> Widths:
        names = ("mlp_up", "mlp_gate") if self.is_gated else ("mlp_up",)
        return Widths(stored=dict.fromkeys(names, self.ffn_size), last_input=self.ffn_size)


class Mlp(Mixer):
    """out(act(gate x) * up x), or out(act(up x)) if the activation is not gated."""

    def __init__(self, key: jax.Array, spec: MlpSpec):
        keys = split(key, 3)
        D, F = spec.hidden_size, spec.ffn_size
        self.spec = spec
        inward = (D, F), ("embed", "mlp"), spec.std, spec.bias
        self.up = Linear(keys[0], *inward)
        self.gate = Linear(keys[1], *inward) if spec.is_gated else None
        self.out = Linear(keys[2], (F, D), ("mlp", "embed"), spec.out_std, spec.bias)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: None = None
    ) -> tuple[Float[Array, "B L D"], None, dict]:
        """(partial sums over tensor, no cache, no auxiliary values)."""
        linears = (self.up,) if self.gate is None else (self.up, self.gate)
        up_BLF, *gate_BLF = project(linears, h_BLD, ctx)
        spec = self.spec
        inputs = [stored(h, "mlp_gate") for h in gate_BLF]
        inputs = [h if spec.gate_scale == 1 else h * spec.gate_scale for h in inputs]
        inputs.append(stored(up_BLF, "mlp_up"))
        h_BLF = activate(spec.activation, *inputs, clamp=spec.clamp, offset=spec.offset)
        return self.out(h_BLF, ctx), cache, {}
