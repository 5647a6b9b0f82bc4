"""Continuing a prompt with a key/value cache: one prefill, then one token a step."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from maxmeg.inference.sampling import Sampling, sample
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM


def forward_cached(
    model: LM, ids_BL: Int[Array, "B L"], offset: Int[Array, ""], cache: list
) -> tuple[jax.Array, list]:
    """Logits after the last of `ids_BL`, which follow `offset` tokens in the cache; new cache."""
    positions_BL = jnp.broadcast_to(offset + jnp.arange(ids_BL.shape[1]), ids_BL.shape)
    ctx = Context(positions_BL, cache_offset=offset, sequence_sharded=False)
    h_BLD, cache, _ = model.hidden(ids_BL, ctx, cache)
    return model.logits(h_BLD[:, -1:])[:, 0], cache


@functools.partial(jax.jit, static_argnames=("num_tokens", "sampling"))
def generate(
    model: LM, prompt_BL: Int[Array, "B L"], key: jax.Array, num_tokens: int, sampling: Sampling
) -> Int[Array, "B N"]:
    """`num_tokens` ids after each prompt; all prompts have one length."""
    B, L = prompt_BL.shape
    cache = model.stack.init_cache(B, L + num_tokens)
    logits_BV, cache = forward_cached(model, prompt_BL, jnp.int32(0), cache)

    def body(carry, i):
        logits_BV, cache = carry
        ids_B = sample(logits_BV, jax.random.fold_in(key, i), sampling)
        logits_BV, cache = forward_cached(model, ids_B[:, None], L + i, cache)
        return (logits_BV, cache), ids_B

    _, ids_NB = lax.scan(body, (logits_BV, cache), jnp.arange(num_tokens))
    return ids_NB.T


def check_length(prompt_length: int, num_tokens: int, max_position: int) -> None:
    """ValueError where a prompt is empty or, with what follows, longer than the context."""
    if prompt_length == 0:
        raise ValueError("the prompt is empty: give at least one token to continue")
    if prompt_length + num_tokens > max_position:
        raise ValueError(
            f"a prompt of {prompt_length} tokens and {num_tokens} new ones exceed the context of "
            f"{max_position}: shorten the prompt or ask for at most "
            f"{max(max_position - prompt_length, 0)} tokens"
        )
