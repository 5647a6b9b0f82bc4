"""Choosing the next token from logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. temperature=0: greedy. top_k=0: all tokens. top_p: the smallest
    set of tokens with at least that probability mass."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"{self}: temperature and top_k must be at least 0 and top_p in (0, 1]"
            )


def sample(logits_BV: Float[Array, "B V"], key: jax.Array, sampling: Sampling) -> Int[Array, " B"]:
    """Sample one token id per row: top-k, then top-p of the rest (Holtzman et al., 2020)."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    descending_BV = -jnp.sort(-logits_BV, axis=-1)
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        least_B1 = descending_BV[:, sampling.top_k - 1 : sampling.top_k]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        descending_BV = jnp.where(descending_BV < least_B1, -jnp.inf, descending_BV)
    if sampling.top_p < 1:
        mass_BV = jnp.cumsum(jax.nn.softmax(descending_BV, axis=-1), axis=-1)
        kept_B1 = jnp.sum(
            mass_BV < sampling.top_p, axis=-1, keepdims=True
        )  # number of tokens before the last kept one
        least_B1 = jnp.take_along_axis(descending_BV, kept_B1, axis=-1)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)
