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
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.layers.recurrent import Recurrent, RecurrentSpec
from maxmeg.layers.scan import ScanInputs

LENGTH_EPS = 1e-6  # added to the squared length of queries and keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaSpec(RecurrentSpec):
    """Gated DeltaNet. key_size, value_size: N and P. norm_eps: of the norm before the gate."""

    name = "gated_delta"

    num_key_heads: int
    key_size: int = 128
    value_size: int = 128
    norm_eps: float = 1e-6

    @property
    def groups(self) -> int:
        return self.num_key_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.key_size, self.value_size

    @property
    def projections(self) -> dict[str, tuple[int, str]]:
        return super().projections | {"beta": (self.num_heads, "heads")}

    def parts(self, name: str) -> tuple[int, ...]:
        sizes = {"query": self.key_size, "key": self.key_size, "value": self.value_size}
        return (sizes[name],) if name in sizes else ()

    def make(self, key: jax.Array) -> "Delta":
        return Delta(key, self)

    def weights(self) -> int:
        """The projections, and the scan as 4 multiplications of each element of the state."""
        return super().weights() + 4 * self.width * self.key_size

    def state(self, tensor: int = 1) -> int:
        return self.num_heads // tensor * self.key_size * (self.value_size + self.key_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaSpec(DeltaSpec):
    """Kimi Delta Attention. rank: of the projections to the gate and to the steps."""

    name = "kda"

    rank: int = 128

    @property
    def projections(self) -> dict[str, tuple[int, str]]:
        return super().projections | {"step": (self.num_heads * self.key_size, "heads")}

    def make(self, key: jax.Array) -> "Kda":
        return Kda(key, self)

    def weights(self) -> int:
        low = sum(self.projections[name][0] for name in Kda.low_rank)
        low_rank = self.rank * (low + len(Kda.low_rank) * self.hidden_size)
        return super().weights() + low_rank - self.hidden_size * low


class Delta(Recurrent):
    num_keys = 16
    decays, constant_steps = (0.01, 16.0), True
    fused_projections = (("gate", "value", "key", "query", "step", "beta"),)
    activate_gate = staticmethod(jax.nn.silu)

    def __init__(self, key: jax.Array, spec: DeltaSpec):
        super().__init__(key, spec)
        self.gated_norm = Norm(spec.value_size, NormSpec("rmsnorm", spec.norm_eps), "head_dim")

    def log_decay(self, step_BLI: jax.Array) -> jax.Array:
        """[B, L, H], or [B, L, H, N] with a decay for each channel; float32."""
        return -jnp.exp(self.decay_log[...]) * self.steps(step_BLI)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: dict | None = None
    ) -> tuple[Float[Array, "B L D"], dict | None, dict]:
        """(partial sums over tensor, new cache, no auxiliary values)."""
        parts, new = self.convolved(self.projected(h_BLD, ctx), ctx, cache)
        query_BLGN = unit(parts["query"], self.spec.key_size**-0.5)
        inputs = ScanInputs(
            *(query_BLGN, unit(parts["key"]), parts["value"], self.log_decay(parts["step"])),
            jax.nn.sigmoid(parts["beta"].astype(jnp.float32)),
        )
        y_BLHP, new["state"] = self.scanned(inputs, ctx, cache)
        gate_BLX = parts["gate"].astype(jnp.float32)
        y_BLX = self.gated_norm(y_BLHP.astype(jnp.float32)).reshape(gate_BLX.shape)
        y_BLX = y_BLX * self.activate_gate(gate_BLX)
        y_BLD = self.out(y_BLX.astype(h_BLD.dtype), ctx)
        return y_BLD, None if cache is None else new, {}


class Kda(Delta):
    """Gate and steps are low-rank projections; the gate is a sigmoid."""

    decays, constant_steps = (1.0, 16.0), False
    fused_projections = (("value", "key", "query", "beta"),)
    low_rank = ("gate", "step")
    activate_gate = staticmethod(jax.nn.sigmoid)

    def log_decay(self, step_BLI: jax.Array) -> jax.Array:
        steps_BLI = self.steps(step_BLI)
        steps_BLHN = steps_BLI.reshape(*steps_BLI.shape[:2], -1, self.spec.key_size)
        return -jnp.exp(self.decay_log[...])[:, None] * steps_BLHN


def unit(x_BLGN: jax.Array, scale: float = 1.0) -> jax.Array:
    """Vectors of this length, computed in float32."""
    x = x_BLGN.astype(jnp.float32)
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    return (x * (scale * jax.lax.rsqrt(squares + LENGTH_EPS))).astype(x_BLGN.dtype)
