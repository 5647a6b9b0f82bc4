"""Mamba-2 (Dao and Gu, 2024): a linear recurrence whose state decays by a scalar per head.

Queries (C), keys (B), values (x), a gate (z) and step sizes (dt) are projections of the input. The
first three pass a short causal convolution. With decay exp(A dt) and steps dt,
state <- decay state + key (dt value)^T,   y = query^T state + D value,
and the output is out(norm(y silu(gate))). Heads H are sharded over tensor, groups G of heads share
keys and queries. Letters: N state, P channels of a head, X channels, W width of the convolution.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.cache import CacheSize
from maxmeg.layers.context import Context
from maxmeg.layers.conv import Depthwise
from maxmeg.layers.linear import Linear, project
from maxmeg.layers.mixer import Mixer, MixerSpec, Widths
from maxmeg.layers.norm import GroupedNorm
from maxmeg.layers.scan import Scan, ScanInputs, between, first_step_biases
from maxmeg.ops.chunk_scan import ScanSpec
from maxmeg.ops.random import split
from maxmeg.parallel.collectives import stored
from maxmeg.parallel.rules import set_kv_heads

CONVOLVED = ("value", "key", "query")
STORED = {"gate": "ssm_gate", "step": "ssm_step"}  # names of the others are those of attention
DECAYS = 1.0, 16.0  # range of initial decay rates


@dataclasses.dataclass(frozen=True)
class MambaSpec(MixerSpec):
    """bias: of the projections. conv_bias: of the convolution. norm_eps: of the norm before the
    output projection; None: no norm. chunk: tokens that the scan multiplies at once. backend: of
    the scan. steps: limits of the step sizes. scales: factors of gate, value, key, query and step.
    std, out_std: standard deviations of the initial input and output weights."""

    name = "mamba"

    num_heads: int
    head_dim: int = 64
    num_groups: int = 8
    state_size: int = 128
    kernel_size: int = 4
    bias: bool = False
    conv_bias: bool = True
    norm_eps: float | None = 1e-5
    chunk: int = 128
    backend: str = "auto"
    steps: tuple[float, float] = (0.0, math.inf)
    scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    std: float = 0.02
    out_std: float = 0.02

    @property
    def projections(self) -> dict[str, tuple[int, str]]:
        """Width and logical axis of each projection of the input."""
        values = self.num_heads * self.head_dim, "heads"
        keys, steps = (self.num_groups * self.state_size, "kv_heads"), (self.num_heads, "heads")
        return {"gate": values, "value": values, "key": keys, "query": keys, "step": steps}

    def make(self, key: jax.Array) -> "Mamba":
        return Mamba(key, self)

    def weights(self) -> int:
        """The projections, and the scan as 3.5 multiplications of each element of the state."""
        width = self.projections["value"][0]
        widths = width + sum(width for width, _ in self.projections.values())
        return self.hidden_size * widths + 7 * width * self.state_size // 2

    def halos(self, tensor: int = 1) -> tuple[int, ...]:
        stored = self.widths(tensor).stored
        return tuple((self.kernel_size - 1) * stored[name] // tensor for name in CONVOLVED)

    def state(self, tensor: int = 1) -> int:
        return self.num_heads // tensor * (self.state_size * self.head_dim + 1)

    def widths(self, tensor: int = 1) -> Widths:
        width, keys = self.projections["value"][0], max(self.num_groups, tensor) * self.state_size
        inputs = {"ssm_gate": width, "value": width, "key": keys, "query": keys}
        inputs |= {"ssm_step": self.num_heads}
        return Widths(
            stored=inputs | {"scan_output": width},
            queries_keys_values=sum(inputs.values()),
            last_input=width,
            scanned=width,
        )


class Mamba(Mixer):
    """With fewer groups than devices along tensor, each device has one of them
    (parallel.rules.KvSlice)."""

    fused_projections = (("gate", "value", "key", "query", "step"),)

    def __init__(self, key: jax.Array, spec: MambaSpec):
        keys = split(key, 11)
        self.spec, H, width = spec, spec.num_heads, spec.projections["value"][0]
        for name, (columns, axis) in spec.projections.items():
            sizes, axes = (spec.hidden_size, columns), ("embed", axis)
            setattr(self, name, Linear(keys.pop(), sizes, axes, spec.std, spec.bias))
        for name in CONVOLVED:
            channels, axis = spec.projections[name]
            conv = Depthwise(keys.pop(), channels, spec.kernel_size, spec.conv_bias, axis)
            setattr(self, f"{name}_conv", conv)
        for name in ("key", "query", "key_conv", "query_conv"):
            set_kv_heads(getattr(self, name), spec.num_groups)
        decay_H = jnp.log(between(keys.pop(), H, *DECAYS))
        step_H = first_step_biases(keys.pop(), H)
        self.decay_log, self.step_bias, self.skip = (
            nnx.Param(value_H, axes=("heads",), exact=True)
            for value_H in (decay_H, step_H, jnp.ones(H))
        )
        eps, groups = spec.norm_eps, spec.num_groups
        self.gated_norm = None if eps is None else GroupedNorm(width, groups, eps)
        sizes, axes = (width, spec.hidden_size), ("heads", "embed")
        self.out = Linear(keys.pop(), sizes, axes, spec.out_std, spec.bias)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: dict | None = None
    ) -> tuple[Float[Array, "B L D"], dict | None, dict]:
        """(partial sums over tensor, new cache, no auxiliary values)."""
        spec, tokens, parts, new = self.spec, h_BLD.shape[:2], {}, {}
        outputs = project([getattr(self, name) for name in spec.projections], h_BLD, ctx)
        for name, scale, y in zip(spec.projections, spec.scales, outputs, strict=True):
            y = stored(y, STORED.get(name) or name)
            parts[name] = y if scale == 1 else y * scale
        for name in CONVOLVED:
            conv = getattr(self, f"{name}_conv")
            if cache is None:
                y_BLX = conv.convolved(parts[name], ctx.segments_BL)
            else:
                y_BLX, new[name] = conv.continued(parts[name], cache[name], ctx)
            size = spec.head_dim if name == "value" else spec.state_size
            parts[name] = jax.nn.silu(y_BLX).reshape(*tokens, -1, size)
        value_BLHP, gate_BLX = parts["value"], parts["gate"].astype(jnp.float32)
        step_BLH = jax.nn.softplus(parts["step"].astype(jnp.float32) + self.step_bias[...])
        step_BLH = jnp.clip(step_BLH, *spec.steps)
        stepped_BLHP = (value_BLHP * step_BLH[..., None]).astype(value_BLHP.dtype)
        log_decay_BLH = -jnp.exp(self.decay_log[...]) * step_BLH
        inputs = ScanInputs(parts["query"], parts["key"], stepped_BLHP, log_decay_BLH)
        states = None if cache is None else cache["state"]
        y_BLHP, new["state"] = Scan(ScanSpec(spec.chunk, spec.backend))(inputs, ctx, states)
        y_BLHP = stored(y_BLHP, "scan_output") + self.skip[...][:, None] * value_BLHP
        y_BLX = y_BLHP.reshape(*tokens, -1) * jax.nn.silu(gate_BLX)
        y_BLX = y_BLX if self.gated_norm is None else self.gated_norm(y_BLX)
        return self.out(y_BLX.astype(h_BLD.dtype), ctx), None if cache is None else new, {}

    def init_cache(self, size: CacheSize) -> dict[str, jax.Array]:
        """Of each lane, the last inputs of the convolutions and the float32 state of the scan."""
        states = {name: getattr(self, f"{name}_conv").init_cache(size) for name in CONVOLVED}
        shape = self.decay_log.shape[0], self.spec.state_size, self.spec.head_dim
        return states | {"state": jnp.zeros((size.lanes, *shape), jnp.float32)}
