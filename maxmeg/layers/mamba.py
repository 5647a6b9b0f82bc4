"""Mamba-2 (Dao and Gu, 2024): a linear recurrence whose state decays by a scalar per head.

Queries (C), keys (B), values (x), a gate (z) and step sizes (dt) are projections of the input. The
first three pass a short causal convolution. With decay exp(A dt) and steps dt,
state <- decay state + key (dt value)^T,   y = query^T state + D value,
and the output is out(norm(y silu(gate))). Heads H are sharded over tensor, groups G of heads share
keys and queries. Letters: N state, P channels of a head, X channels.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.layers.context import Context
from maxmeg.layers.mixer import Widths
from maxmeg.layers.norm import GroupedNorm
from maxmeg.layers.recurrent import Recurrent, RecurrentSpec
from maxmeg.layers.scan import ScanInputs
from maxmeg.parallel.parameter import parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaSpec(RecurrentSpec):
    """norm_eps: of the norm before the output projection; None: no norm. steps: limits of the step
    sizes. scales: factors of gate, value, key, query and step."""

    name = "mamba"
    convolved = ("value", "key", "query")

    head_dim: int = 64
    num_groups: int = 8
    state_size: int = 128
    conv_bias: bool = True
    norm_eps: float | None = 1e-5
    chunk: int = 128
    steps: tuple[float, float] = (0.0, math.inf)
    scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        mamba, base = config.mamba, super().settings(config, parallel, mixer)
        return base | {
            "norm_eps": config.norm_eps if mamba.norm else None,
            "steps": (mamba.min_step, mamba.max_step or math.inf),
            "scales": mamba.scales or (1.0,) * 5,
        }

    @property
    def groups(self) -> int:
        return self.num_groups

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.state_size, self.head_dim

    def make(self, key: jax.Array) -> "Mamba":
        return Mamba(key, self)

    def weights(self) -> int:
        """The projections, and the scan as 3.5 multiplications of each element of the state."""
        return super().weights() + 7 * self.width * self.state_size // 2

    def state(self, tensor: int = 1) -> int:
        return self.num_heads // tensor * (self.state_size * self.head_dim + 1)

    def widths(self, tensor: int = 1) -> Widths:
        return dataclasses.replace(super().widths(tensor), scanned=self.width)


class Mamba(Recurrent):
    num_keys = 11
    fused_projections = (("gate", "value", "key", "query", "step"),)

    def __init__(self, key: jax.Array, spec: MambaSpec):
        super().__init__(key, spec)
        self.skip = parameter(jnp.ones(spec.num_heads), "heads", exact=True)
        norm = spec.width, spec.num_groups
        self.gated_norm = None if spec.norm_eps is None else GroupedNorm(*norm, spec.norm_eps)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: dict | None = None
    ) -> tuple[Float[Array, "B L D"], dict | None, dict]:
        """(partial sums over tensor, new cache, no auxiliary values)."""
        spec, parts = self.spec, self.projected(h_BLD, ctx)
        for name, scale in zip(spec.projections, spec.scales, strict=True):
            parts[name] = parts[name] if scale == 1 else parts[name] * scale
        parts, new = self.convolved(parts, ctx, cache)
        value_BLHP, gate_BLX = parts["value"], parts["gate"].astype(jnp.float32)
        step_BLH = jnp.clip(self.steps(parts["step"]), *spec.steps)
        stepped_BLHP = (value_BLHP * step_BLH[..., None]).astype(value_BLHP.dtype)
        log_decay_BLH = -jnp.exp(self.decay_log[...]) * step_BLH
        inputs = ScanInputs(parts["query"], parts["key"], stepped_BLHP, log_decay_BLH)
        y_BLHP, new["state"] = self.scanned(inputs, ctx, cache)
        y_BLHP = y_BLHP + self.skip[...][:, None] * value_BLHP
        y_BLX = y_BLHP.reshape(gate_BLX.shape) * jax.nn.silu(gate_BLX)
        y_BLX = y_BLX if self.gated_norm is None else self.gated_norm(y_BLX)
        return self.out(y_BLX.astype(h_BLD.dtype), ctx), None if cache is None else new, {}
