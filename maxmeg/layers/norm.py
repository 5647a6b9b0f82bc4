"""RMSNorm and LayerNorm as modules."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.ops.norm import norm
from maxmeg.parallel.collectives import axis_size
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.parameter import parameter


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """kind: "rmsnorm" or "layernorm"; one_plus: weights are stored as w - 1; bias: of layernorm."""

    kind: str = "rmsnorm"
    eps: float = 1e-5
    one_plus: bool = False
    bias: bool = True

    @classmethod
    def of(cls, config: ModelConfig) -> "NormSpec":
        return cls(config.norm.value, config.norm_eps, config.norm_one_plus, config.norm_bias)


class Norm(nnx.Module):
    """Normalization of the last dimension in float32; over: mesh axes that shard it."""

    def __init__(
        self,
        dim: int,
        spec: NormSpec,
        axis: str = "norm",
        weighted: bool = True,
        over: tuple[str, ...] = (),
    ):
        self.spec, self.over = spec, over
        initial = jnp.zeros if spec.one_plus else jnp.ones
        self.weight = parameter(initial(dim), axis) if weighted else None
        biased = weighted and spec.bias and spec.kind == "layernorm"
        self.bias = parameter(jnp.zeros(dim), axis) if biased else None

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        weight = None if self.weight is None else self.weight[...]
        if weight is not None and self.spec.one_plus:
            weight = weight.astype(jnp.float32) + 1  # in bfloat16, 1 + w would lose digits of w
        bias = None if self.bias is None else self.bias[...]
        centred = self.spec.kind == "layernorm"
        return norm(x, weight, bias, self.spec.eps, centred, self.over)


class GroupedNorm(nnx.Module):
    """RMSNorm over the channels of each group, which several devices along tensor may share."""

    def __init__(self, width: int, groups: int, eps: float):
        self.groups, self.eps = groups, eps
        self.weight = parameter(jnp.ones(width), "heads")

    @jax.named_scope("norm")
    def __call__(self, x_BLX: Float[Array, "B L X"]) -> Float[Array, "B L X"]:
        here = max(self.groups // axis_size(TENSOR_AXES), 1)
        over = TENSOR_AXES if self.groups < axis_size(TENSOR_AXES) else ()
        x_BLGX = x_BLX.reshape(*x_BLX.shape[:2], here, -1)
        groups = self.groups if over else 1
        unit_BLGX = norm(x_BLGX, None, None, self.eps, False, over, groups)
        return unit_BLGX.reshape(x_BLX.shape) * self.weight[...]
