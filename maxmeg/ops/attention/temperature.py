"""Attention temperature: queries scaled by position keep attention sharp in long contexts."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Multiply a query at position p by 1 + scale log(1 + floor((p + offset) / length)).

    Positions count from 0 in each document. Scalable-Softmax (Nakanishi, 2025), as Llama 4
    (offset=1) and Ministral 3 (offset=0) use it.
    """

    scale: float
    length: int
    offset: int = 0

    def scaled(
        self, q_BLHK: Float[Array, "B L H K"], positions_BL: Int[Array, "B L"]
    ) -> Float[Array, "B L H K"]:
        steps_BL = (positions_BL + self.offset) // self.length
        factors_BL = 1 + self.scale * jnp.log1p(steps_BL.astype(jnp.float32))
        return (q_BLHK * jax.lax.stop_gradient(factors_BL)[..., None, None]).astype(q_BLHK.dtype)
