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
from maxmeg.ops.chunk_scan import chunk_scan, chunk_scan_step
from maxmeg.ops.norm import norm
from maxmeg.ops.random import split, uniform
from maxmeg.parallel.collectives import axis_size, stored
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.rules import set_kv_heads

LARGEST_DECAY = 16.0  # initial decay rates are uniform in [1, this]
CONVOLVED = ("value", "key", "query")
STORED = {"gate": "ssm_gate", "step": "ssm_step"}  # names of the others are those of attention
FEW = 4  # tokens that decoding takes one by one
FIRST_STEPS, FLOOR = (1e-3, 1e-1), 1e-4  # initial steps are log-uniform, and at least FLOOR


@dataclasses.dataclass(frozen=True)
class MambaSpec(MixerSpec):
    """bias: of the projections. conv_bias: of the convolution. norm_eps: of the norm before the
    output projection; None: no norm. chunk: tokens that the scan multiplies at once. steps: limits
    of the step sizes. scales: factors of gate, value, key, query and step. std, out_std: standard
    deviations of the initial input and output weights."""

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
    steps: tuple[float, float] = (0.0, float("inf"))
    scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    std: float = 0.02
    out_std: float = 0.02

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def projected(self) -> dict[str, tuple[int, str]]:
        """Width and logical axis of each projection of the input."""
        keys = self.num_groups * self.state_size, "kv_heads"
        values = self.inner, "heads"
        steps = self.num_heads, "heads"
        return {"gate": values, "value": values, "key": keys, "query": keys, "step": steps}

    def make(self, key: jax.Array) -> "Mamba":
        return Mamba(key, self)

    def weights(self) -> int:
        """The projections, and the scan as 3.5 multiplications of each element of the state."""
        widths = self.inner + sum(width for width, _ in self.projected.values())
        return self.hidden_size * widths + 7 * self.inner * self.state_size // 2

    def widths(self, tensor: int = 1) -> Widths:
        keys = max(self.num_groups, tensor) * self.state_size
        stored = {"ssm_gate": self.inner, "value": self.inner, "key": keys, "query": keys}
        stored |= {"ssm_step": self.num_heads, "scan_output": self.inner}
        inputs = sum(stored.values()) - self.inner
        return Widths(stored=stored, queries_keys_values=inputs, last_input=self.inner)


class GatedNorm(nnx.Module):
    """RMSNorm of x silu(gate) over the channels of each group, which several devices may share."""

    def __init__(self, width: int, groups: int, eps: float):
        self.groups, self.eps = groups, eps
        self.weight = nnx.Param(jnp.ones(width), axes=("heads",))

    def __call__(self, x_BLX: Float[Array, "B L X"]) -> Float[Array, "B L X"]:
        devices = axis_size(TENSOR_AXES)
        here = max(self.groups // devices, 1)
        shared = (TENSOR_AXES, self.groups) if self.groups < devices else ()
        x_BLGX = x_BLX.reshape(*x_BLX.shape[:2], here, -1)
        unit_BLGX = norm(x_BLGX, None, None, self.eps, False, *shared)
        return unit_BLGX.reshape(x_BLX.shape) * self.weight[...]


class Mamba(Mixer):
    """With fewer groups than devices along tensor, each device has one of them
    (parallel.rules.KvSlice)."""

    fused_projections = (("gate", "value", "key", "query", "step"),)

    def __init__(self, key: jax.Array, spec: MambaSpec):
        keys = split(key, 11)
        self.spec, H = spec, spec.num_heads
        for name, (width, axis) in spec.projected.items():
            sizes, axes = (spec.hidden_size, width), ("embed", axis)
            setattr(self, name, Linear(keys.pop(), sizes, axes, spec.std, spec.bias))
        for name in CONVOLVED:
            width, axis = spec.projected[name]
            conv = Depthwise(keys.pop(), width, spec.kernel_size, spec.conv_bias, axis)
            setattr(self, f"{name}_conv", conv)
        for keyed in (self.key, self.query, self.key_conv, self.query_conv):
            set_kv_heads(keyed, spec.num_groups)
        exact = {"axes": ("heads",), "exact": True}
        between_H = (uniform(keys.pop(), (H,)) + 1) / 2
        self.decay_log = nnx.Param(jnp.log(1 + (LARGEST_DECAY - 1) * between_H), **exact)
        between_H, (least, most) = (uniform(keys.pop(), (H,)) + 1) / 2, map(math.log, FIRST_STEPS)
        step_H = jnp.maximum(jnp.exp(least + (most - least) * between_H), FLOOR)
        self.step_bias = nnx.Param(step_H + jnp.log(-jnp.expm1(-step_H)), **exact)
        self.skip = nnx.Param(jnp.ones(H), **exact)
        has_norm = spec.norm_eps is not None
        groups = spec.inner, spec.num_groups, spec.norm_eps
        self.gated_norm = GatedNorm(*groups) if has_norm else None
        sizes, axes = (spec.inner, spec.hidden_size), ("heads", "embed")
        self.out = Linear(keys.pop(), sizes, axes, spec.out_std, spec.bias)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: dict | None = None
    ) -> tuple[Float[Array, "B L D"], dict | None, dict]:
        """(partial sums over tensor, new cache, no auxiliary values)."""
        spec, names = self.spec, list(self.spec.projected)
        found = project([getattr(self, name) for name in names], h_BLD, ctx)
        found = [stored(y, STORED.get(n, n)) for n, y in zip(names, found, strict=True)]
        scaled = (
            y if scale == 1 else y * scale for y, scale in zip(found, spec.scales, strict=True)
        )
        parts, new = dict(zip(names, scaled, strict=True)), {}
        for name in CONVOLVED:
            conv = getattr(self, f"{name}_conv")
            if cache is None:
                y_BLX = conv.convolved(parts[name], ctx.segments_BL)
            else:
                y_BLX, new[name] = conv.continued(parts[name], cache[name], ctx)
            parts[name] = jax.nn.silu(y_BLX)
        tokens = h_BLD.shape[:2]
        value_BLHP = parts["value"].reshape(*tokens, -1, spec.head_dim)
        keyed = (parts[name].reshape(*tokens, -1, spec.state_size) for name in ("query", "key"))
        step_BLH = jax.nn.softplus(parts["step"].astype(jnp.float32) + self.step_bias[...])
        step_BLH = jnp.clip(step_BLH, *spec.steps)
        if cache is not None:  # padding does not change the state
            step_BLH = jnp.where(ctx.cache_places.is_token(tokens[1])[..., None], step_BLH, 0)
        steps_BLHP = (value_BLHP * step_BLH[..., None]).astype(value_BLHP.dtype)
        inputs = *keyed, steps_BLHP, -jnp.exp(self.decay_log[...]) * step_BLH, None
        if cache is not None:
            y_BLHP, new["state"] = self._continued(inputs, cache["state"], ctx)
        else:
            y_BLHP, _ = chunk_scan(*inputs, ctx.segments_BL, None, spec.chunk)
        y_BLHP = stored(y_BLHP, "scan_output").astype(jnp.float32)
        y_BLHP += self.skip[...][:, None] * value_BLHP
        y_BLX = y_BLHP.reshape(*tokens, -1) * jax.nn.silu(parts["gate"].astype(jnp.float32))
        y_BLX = y_BLX if self.gated_norm is None else self.gated_norm(y_BLX)
        return self.out(y_BLX.astype(h_BLD.dtype), ctx), new or None, {}

    def _continued(self, inputs: tuple, state: jax.Array, ctx: Context):
        """(output, state of all layers after the tokens)."""
        places = ctx.cache_places
        before_BHNP = state[places.layer, places.lanes_B]
        before_BHNP = jnp.where(places.starts_B[:, None, None, None] > 0, before_BHNP, 0)
        if inputs[0].shape[1] <= FEW:
            y_BLHP, after_BHNP = chunk_scan_step(*inputs, before_BHNP)
        else:
            y_BLHP, after_BHNP = chunk_scan(*inputs, None, before_BHNP, self.spec.chunk)
        used_B = jnp.where(places.counts_B > 0, places.lanes_B, state.shape[1])
        return y_BLHP, state.at[places.layer, used_B].set(after_BHNP, mode="drop")

    def init_cache(self, size: CacheSize) -> dict[str, jax.Array]:
        """Of each lane, the last inputs of the convolutions and the float32 state of the scan."""
        states = {name: getattr(self, f"{name}_conv").init_cache(size) for name in CONVOLVED}
        shape = self.decay_log.shape[0], self.spec.state_size, self.spec.head_dim
        return states | {"state": jnp.zeros((size.lanes, *shape), jnp.float32)}
