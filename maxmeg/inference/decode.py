"""Continuing a prompt with a key/value cache: one prefill, then one token a step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from maxmeg.config.schema import Config
from maxmeg.inference.load import Trained
from maxmeg.inference.sampling import Sampling, sample
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.parallel.rules import reductions
from maxmeg.parallel.spmd import spmd
from maxmeg.step import compute_model


def forward_cached(
    model: LM, ids_BL: Int[Array, "B L"], offset: Int[Array, ""], cache: list
) -> tuple[jax.Array, list | None]:
    """Logits after the last of `ids_BL`, which follow `offset` tokens in the cache; new cache."""
    positions_BL = jnp.broadcast_to(offset + jnp.arange(ids_BL.shape[1]), ids_BL.shape)
    ctx = Context(positions_BL, cache_offset=offset, sequence_sharded=False)
    h_BLD, filled, _ = model.hidden(ids_BL, ctx, cache)
    return model.logits(h_BLD[:, -1:])[:, 0], filled


def generate(
    model: LM, prompt_BL: Int[Array, "B L"], key: jax.Array, num_tokens: int, sampling: Sampling
) -> Int[Array, "B N"]:
    """`num_tokens` ids after each prompt; all prompts have one length."""
    B, L = prompt_BL.shape
    empty = model.stack.init_cache(B, L + num_tokens)
    first_BV, filled = forward_cached(model, prompt_BL, jnp.int32(0), empty)

    def body(carry, i):
        logits_BV, cache = carry
        ids_B = sample(logits_BV, jax.random.fold_in(key, i), sampling)
        logits_BV, cache = forward_cached(model, ids_B[:, None], L + i, cache)
        return (logits_BV, cache), ids_B

    _, ids_NB = lax.scan(body, (first_BV, filled), jnp.arange(num_tokens))
    return ids_NB.T


def make_generate(
    config: Config, mesh: Mesh, model: LM, num_tokens: int, sampling: Sampling
) -> Callable:
    """The jitted (model, prompt_BL, raw key) -> ids_BN for a model laid out over `mesh`.

    Weights are cast to the compute dtype. Every device sees all prompts.
    """
    places = reductions(model, mesh, config.parallel.zero1)
    specs = jax.tree.map(lambda array: array.sharding.spec, model)
    dtype = jnp.dtype(config.model.dtype.value)

    def local(model, prompt_BL, raw_key):
        key = jax.random.wrap_key_data(raw_key)
        return generate(compute_model(model, places, dtype), prompt_BL, key, num_tokens, sampling)

    return jax.jit(spmd(local, mesh, (specs, P(), P()), P()))


def continue_text(
    trained: Trained, prompt: str, num_tokens: int, sampling: Sampling, seed: int
) -> str:
    """The prompt's continuation, up to the first end of a document."""
    tokenizer, config = trained.tokenizer, trained.config
    ids = tokenizer.encode(prompt)
    check_length(len(ids), num_tokens, config.model.max_position)
    run = make_generate(config, trained.mesh, trained.model, num_tokens, sampling)
    key = jax.random.key_data(jax.random.key(seed))
    made = np.asarray(run(trained.model, jnp.asarray(ids, jnp.int32)[None], key))[0]
    ends = np.flatnonzero(made == tokenizer.eod)
    return tokenizer.decode(made[: ends[0]] if len(ends) else made)


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
