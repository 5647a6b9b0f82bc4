"""RMSNorm and LayerNorm as modules."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.ops.norm import layer_norm, rms_norm


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """kind: "rmsnorm" or "layernorm"; one_plus: the weight is stored as w - 1."""

    kind: str = "rmsnorm"
    eps: float = 1e-5
    one_plus: bool = False


class Norm(nnx.Module):
    """Normalizes the last dimension, in float32."""

    def __init__(self, dim: int, spec: NormSpec, axis: str = "norm"):
        self.spec = spec
        start = jnp.zeros if spec.one_plus else jnp.ones
        self.weight = nnx.Param(start(dim), axes=(axis,))
        layernorm = spec.kind == "layernorm"
        self.bias = nnx.Param(jnp.zeros(dim), axes=(axis,)) if layernorm else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        weight = self.weight[...]
        if self.spec.one_plus:
            weight = weight.astype(jnp.float32) + 1  # 1 + w would lose w's digits in bfloat16
        if self.bias is None:
            return rms_norm(x, weight, self.spec.eps)
        return layer_norm(x, weight, self.bias[...], self.spec.eps)
