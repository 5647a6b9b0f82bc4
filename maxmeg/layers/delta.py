"""Linear attention by the delta rule: Gated DeltaNet (Yang et al., 2024) as in Qwen3-Next, and Kimi
Delta Attention (KDA, Moonshot AI, 2025), which decays every channel of the keys by itself.

Queries, keys and values are projections of the input that pass a short causal convolution and a
SiLU; queries and keys then have length 1. A head's state is a matrix N x P:

    state <- (1 - beta key key^T) exp(g) state + beta key value^T,   y = state^T query / sqrt(N)

with beta = sigmoid(projection) and g = -exp(decay_log) softplus(step + step_bias). The output is
out(norm(y) act(gate)). Heads H are sharded over tensor; groups G of heads share queries and keys.
Letters: N size of a key, P of a value, X channels.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.cache import CacheSize
from maxmeg.layers.context import Context
from maxmeg.layers.conv import Depthwise
from maxmeg.layers.linear import Linear, project
from maxmeg.layers.mixer import Mixer, MixerSpec, Widths
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.layers.scan import Scan, ScanInputs, between, first_step_biases
from maxmeg.ops.chunk_scan import ScanSpec
from maxmeg.ops.random import split
from maxmeg.parallel.collectives import stored
from maxmeg.parallel.rules import set_kv_heads

CONVOLVED = ("query", "key", "value")
STORED = {"gate": "ssm_gate", "step": "ssm_step", "beta": "ssm_beta"}  # others: own names
LENGTH_EPS = 1e-6  # added to the squared length of queries and keys
DECAYS = 0.01, 16.0  # initial decay rates are uniform between these; of KDA from 1 on


@dataclasses.dataclass(frozen=True)
class DeltaSpec(MixerSpec):
    """Gated DeltaNet. key_size, value_size: N and P. kernel_size: tokens that the convolution
    reads. norm_eps: of the norm before the gate. chunk: tokens that the scan multiplies at once.
    std, out_std: standard deviations of the initial input and output weights."""

    name = "gated_delta"

    num_heads: int
    num_key_heads: int
    key_size: int = 128
    value_size: int = 128
    kernel_size: int = 4
    norm_eps: float = 1e-6
    chunk: int = 64
    std: float = 0.02
    out_std: float = 0.02

    @property
    def projected(self) -> dict[str, tuple[int, str]]:
        """Width and logical axis of each projection."""
        values = self.num_heads * self.value_size, "heads"
        keys, scalars = (self.num_key_heads * self.key_size, "kv_heads"), (self.num_heads, "heads")
        widths = {"gate": values, "value": values, "key": keys, "query": keys}
        return widths | {"step": scalars, "beta": scalars}

    def make(self, key: jax.Array) -> "Delta":
        return Delta(key, self)

    def weights(self) -> int:
        """The projections, and the scan as 4 multiplications of each element of the state."""
        widths = sum(width for width, _ in self.projected.values())
        state = self.num_heads * self.key_size * self.value_size
        return self.hidden_size * (widths + self.num_heads * self.value_size) + 4 * state

    def halos(self, tensor: int = 1) -> tuple[int, ...]:
        stored = self.widths(tensor).stored
        return tuple((self.kernel_size - 1) * stored[name] // tensor for name in CONVOLVED)

    def state(self, tensor: int = 1) -> int:
        return self.num_heads // tensor * self.key_size * (self.value_size + self.key_size)

    def widths(self, tensor: int = 1) -> Widths:
        copies = max(self.num_key_heads, tensor) // self.num_key_heads
        stored = {
            STORED.get(name) or name: width * (copies if axis == "kv_heads" else 1)
            for name, (width, axis) in self.projected.items()
        }
        inputs, output = sum(stored.values()), self.num_heads * self.value_size
        stored["scan_output"] = output
        return Widths(stored=stored, queries_keys_values=inputs, last_input=output)


@dataclasses.dataclass(frozen=True)
class KdaSpec(DeltaSpec):
    """Kimi Delta Attention. rank: of the projections to the gate and to the steps."""

    name = "kda"

    rank: int = 128

    @property
    def projected(self) -> dict[str, tuple[int, str]]:
        return super().projected | {"step": (self.num_heads * self.key_size, "heads")}

    def make(self, key: jax.Array) -> "Kda":
        return Kda(key, self)

    def weights(self) -> int:
        low = sum(self.projected[name][0] for name in Kda.low_rank)
        low_rank = self.rank * (low + len(Kda.low_rank) * self.hidden_size)
        return super().weights() + low_rank - self.hidden_size * low


class Delta(Mixer):
    """With fewer groups than devices along tensor, each device has one of them
    (parallel.rules.KvSlice)."""

    fused_projections = (("gate", "value", "key", "query", "step", "beta"),)
    low_rank: tuple[str, ...] = ()  # projections of a projection to `rank` elements

    def __init__(self, key: jax.Array, spec: DeltaSpec):
        keys = split(key, 16)
        self.spec = spec
        for name, (width, axis) in spec.projected.items():
            source, into = (spec.hidden_size, "embed"), spec.std
            if isinstance(spec, KdaSpec) and name in self.low_rank:
                source = spec.rank, "latent"
                down = (spec.hidden_size, spec.rank), ("embed", "latent"), spec.std
                setattr(self, f"{name}_down", Linear(keys.pop(), *down))
            linear = Linear(keys.pop(), (source[0], width), (source[1], axis), into)
            setattr(self, name, linear)
        for name in CONVOLVED:
            width, axis = spec.projected[name]
            conv = Depthwise(keys.pop(), width, spec.kernel_size, False, axis)
            setattr(self, f"{name}_conv", conv)
        for name in ("key", "query", "key_conv", "query_conv"):
            set_kv_heads(getattr(self, name), spec.num_key_heads)
        decay_log_H, step_bias_I = self.initial_steps(keys.pop(), keys.pop())
        self.decay_log = nnx.Param(decay_log_H, axes=("heads",), exact=True)
        self.step_bias = nnx.Param(step_bias_I, axes=("heads",), exact=True)
        self.gated_norm = Norm(spec.value_size, NormSpec("rmsnorm", spec.norm_eps), "head_dim")
        sizes = spec.num_heads * spec.value_size, spec.hidden_size
        self.out = Linear(keys.pop(), sizes, ("heads", "embed"), spec.out_std)

    def initial_steps(self, *keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(logarithms of the decay rates, biases of the steps)."""
        H = self.spec.num_heads
        rates_H = between(keys[0], H, *DECAYS)
        return jnp.log(rates_H), jnp.ones(H)

    def projections(self, h_BLD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
        """Outputs of all projections, by name."""
        direct = [name for name in self.spec.projected if name not in self.low_rank]
        outputs = project([getattr(self, name) for name in direct], h_BLD, ctx)
        found = dict(zip(direct, outputs, strict=True))
        for name in self.low_rank:
            down = getattr(self, f"{name}_down")(h_BLD, ctx)
            found[name] = getattr(self, name)(down, ctx)
        return {name: stored(y, STORED.get(name) or name) for name, y in found.items()}

    def log_decay(self, step_BLI: jax.Array) -> jax.Array:
        """[B, L, H], or [B, L, H, N] with a decay for each channel; float32."""
        steps = jax.nn.softplus(step_BLI.astype(jnp.float32) + self.step_bias[...])
        return -jnp.exp(self.decay_log[...]) * steps

    def activate_gate(self, gate: jax.Array) -> jax.Array:
        return jax.nn.silu(gate)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: dict | None = None
    ) -> tuple[Float[Array, "B L D"], dict | None, dict]:
        """(partial sums over tensor, new cache, no auxiliary values)."""
        spec, tokens, new = self.spec, h_BLD.shape[:2], {}
        parts = self.projections(h_BLD, ctx)
        for name in CONVOLVED:
            conv = getattr(self, f"{name}_conv")
            if cache is None:
                y_BLX = conv.convolved(parts[name], ctx.segments_BL)
            else:
                y_BLX, new[name] = conv.continued(parts[name], cache[name], ctx)
            size = spec.value_size if name == "value" else spec.key_size
            parts[name] = jax.nn.silu(y_BLX).reshape(*tokens, -1, size)
        query_BLGN = unit(parts["query"], spec.key_size**-0.5)
        inputs = ScanInputs(
            *(query_BLGN, unit(parts["key"]), parts["value"], self.log_decay(parts["step"])),
            jax.nn.sigmoid(parts["beta"].astype(jnp.float32)),
        )
        states = None if cache is None else cache["state"]
        y_BLHP, new["state"] = Scan(ScanSpec(spec.chunk))(inputs, ctx, states)
        y_BLHP = self.gated_norm(stored(y_BLHP, "scan_output").astype(jnp.float32))
        gate_BLX = parts["gate"].astype(jnp.float32)
        y_BLX = y_BLHP.reshape(gate_BLX.shape) * self.activate_gate(gate_BLX)
        y_BLD = self.out(y_BLX.astype(h_BLD.dtype), ctx)
        return y_BLD, None if cache is None else new, {}

    def init_cache(self, size: CacheSize) -> dict[str, jax.Array]:
        """Of each lane, the last inputs of the convolutions and the float32 state of the scan."""
        states = {name: getattr(self, f"{name}_conv").init_cache(size) for name in CONVOLVED}
        shape = self.decay_log.shape[0], self.spec.key_size, self.spec.value_size
        return states | {"state": jnp.zeros((size.lanes, *shape), jnp.float32)}


class Kda(Delta):
    """Gate and steps are low-rank projections; the gate is a sigmoid."""

    fused_projections = (("value", "key", "query", "beta"),)
    low_rank = ("gate", "step")

    def initial_steps(self, *keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        H, N = self.spec.num_heads, self.spec.key_size
        rates_H = between(keys[0], H, 1.0, DECAYS[1])
        return jnp.log(rates_H), first_step_biases(keys[1], H * N)

    def log_decay(self, step_BLI: jax.Array) -> jax.Array:
        steps = jax.nn.softplus(step_BLI.astype(jnp.float32) + self.step_bias[...])
        steps_BLHN = steps.reshape(*steps.shape[:2], -1, self.spec.key_size)
        return -jnp.exp(self.decay_log[...])[:, None] * steps_BLHN

    def activate_gate(self, gate: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(gate)


def unit(x_BLGN: jax.Array, scale: float = 1.0) -> jax.Array:
    """Vectors of this length, computed in float32."""
    x = x_BLGN.astype(jnp.float32)
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    return (x * (scale * jax.lax.rsqrt(squares + LENGTH_EPS))).astype(x_BLGN.dtype)
