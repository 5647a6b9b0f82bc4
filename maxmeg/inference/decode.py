"""Continuing prompts with a key/value cache: one prefill, then one token a row and step.

Prompts of different lengths lie in one array, padded behind their last tokens. What padding leaves
in the cache is never seen: each row's new tokens are written over it, and attention is causal.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from maxmeg.config.schema import Config
from maxmeg.inference.chat import end_tokens
from maxmeg.inference.load import Trained
from maxmeg.inference.sampling import Sampling, sample
from maxmeg.layers.attention import PAGE
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.parallel.rules import reductions
from maxmeg.parallel.spmd import spmd
from maxmeg.step import compute_model

SHORTEST = 16  # prompts are padded to this length, or the next of its doubles
BATCH = 8  # prompts continued at once


@dataclasses.dataclass(frozen=True)
class Request:
    """At most `num_tokens` for each prompt, chosen as `sampling` says, until one of `ends`."""

    num_tokens: int
    sampling: Sampling
    ends: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens={self.num_tokens} must be at least 1")


class Prompts(typing.NamedTuple):
    """Tokens and how many of a row are its prompt (0: the row is not wanted); rows_B: what each
    row's choices depend on beside the key."""

    ids_BL: Int[Array, "B L"]
    lengths_B: Int[Array, " B"]
    rows_B: Int[Array, " B"]


class Progress(typing.NamedTuple):
    """Tokens so far, `step` in each row, of which counts_B precede the row's end."""

    step: jax.Array
    ids_BN: jax.Array
    counts_B: jax.Array
    ended_B: jax.Array
    cache: list


def forward_cached(
    model: LM, ids_BL: Int[Array, "B L"], offset: Int[Array, "*B"], cache: list
) -> tuple[jax.Array, list]:
    """Logits after the last of `ids_BL`, which follow `offset` tokens of all or of each row in
    the cache; new cache."""
    positions_BL = jnp.expand_dims(offset, -1) + jnp.arange(ids_BL.shape[1])
    positions_BL = jnp.broadcast_to(positions_BL, ids_BL.shape)
    ctx = Context(positions_BL, cache_offset=offset, sequence_sharded=False)
    h_BLD, filled, _ = model.hidden(ids_BL, ctx, cache)
    assert filled is not None
    return model.logits(h_BLD[:, -1:])[:, 0], filled


def prefill(
    model: LM, ids_BL: Int[Array, "B L"], lengths_B: Int[Array, " B"], cache: list
) -> tuple[jax.Array, list]:
    """Logits after each row's last token, and the cache, which was empty.

    Padding has the position of the last token: a row's length decides some rotations.
    """
    last_B1 = jnp.maximum(lengths_B - 1, 0)[:, None]
    positions_BL = jnp.minimum(jnp.arange(ids_BL.shape[1]), last_B1)
    ctx = Context(positions_BL, cache_offset=0, sequence_sharded=False)
    h_BLD, filled, _ = model.hidden(ids_BL, ctx, cache)
    assert filled is not None
    h_B1D = jnp.take_along_axis(h_BLD, last_B1[..., None], axis=1)
    return model.logits(h_B1D)[:, 0], filled


def generate(
    model: LM, prompts: Prompts, key: jax.Array, request: Request
) -> tuple[Int[Array, "B N"], Int[Array, " B"]]:
    """New ids of each row, and how many precede its end (what follows them means nothing).

    A row's tokens depend on its own prompt and number alone.
    """
    B, L = prompts.ids_BL.shape
    N, ends = request.num_tokens, jnp.array(request.ends, jnp.int32)
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(prompts.rows_B)

    def choose(logits_V, row_key, step):
        row_key = jax.random.fold_in(row_key, step)
        return sample(logits_V[None], row_key, request.sampling)[0]

    def choose_next(logits_BV, cache, so_far: Progress) -> Progress:
        ids_B = jax.vmap(choose, (0, 0, None))(logits_BV, keys_B, so_far.step)
        ended_B = so_far.ended_B | jnp.isin(ids_B, ends)
        return Progress(
            so_far.step + 1,
            so_far.ids_BN.at[:, so_far.step].set(ids_B),
            so_far.counts_B + ~ended_B,
            ended_B,
            cache,
        )

    def unfinished(so_far: Progress):
        return (so_far.step < N) & ~jnp.all(so_far.ended_B)

    def advance(so_far: Progress) -> Progress:
        ids_B1 = lax.dynamic_slice_in_dim(so_far.ids_BN, so_far.step - 1, 1, axis=1)
        offset_B = prompts.lengths_B + so_far.step - 1
        return choose_next(*forward_cached(model, ids_B1, offset_B, so_far.cache), so_far)

    length = L + N if L + N < PAGE else -(-(L + N) // PAGE) * PAGE
    first = prefill(model, prompts.ids_BL, prompts.lengths_B, model.stack.init_cache(B, length))
    none = jnp.zeros((B, N), jnp.int32), jnp.zeros(B, jnp.int32), prompts.lengths_B == 0
    found = lax.while_loop(
        unfinished, advance, choose_next(*first, Progress(jnp.int32(0), *none, first[1]))
    )
    return found.ids_BN, found.counts_B


def make_generate(config: Config, mesh: Mesh, model: LM, request: Request) -> Callable:
    """The jitted (model, prompts, raw key) -> (ids_BN, counts_B) for a model laid out over `mesh`.

    Weights are cast to the compute dtype. Every device sees all prompts.
    """
    places = reductions(model, mesh, config.parallel.zero1)
    specs = jax.tree.map(lambda array: array.sharding.spec, model)
    dtype = jnp.dtype(config.model.dtype.value)

    def local(model, prompts, raw_key):
        key = jax.random.wrap_key_data(raw_key)
        return generate(compute_model(model, places, dtype), prompts, key, request)

    return jax.jit(spmd(local, mesh, (specs, P(), P()), P()))


class Writer:
    """Continues prompts with one model, at most `batch` at once.

    Prompts of like lengths go together; there is one program for each length they are padded to.
    """

    def __init__(self, trained: Trained, request: Request, batch: int = BATCH):
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1: prompts continued at once")
        self.trained, self.request, self.batch = trained, request, batch
        self.run = make_generate(trained.config, trained.mesh, trained.model, request)

    def __call__(self, prompts: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
        """The ids that follow each prompt, without its end; ValueError as check_length."""
        model = self.trained.config.model
        for number, ids in enumerate(prompts, 1):
            where = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
            check_length(len(ids), self.request.num_tokens, model.max_position, where)
            check_ids(ids, model.vocab_size, where)
        key = jax.random.key_data(jax.random.key(seed))
        order = np.argsort([len(ids) for ids in prompts], kind="stable")
        found = [np.empty(0, np.int32)] * len(prompts)
        batch = min(self.batch, len(prompts))
        for start in range(0, len(prompts), max(batch, 1)):
            numbers = order[start : start + batch].tolist()
            padded = pad([prompts[i] for i in numbers], numbers, batch)
            ids_BN, counts_B = map(np.asarray, self.run(self.trained.model, padded, key))
            for row, number in enumerate(numbers):
                found[number] = ids_BN[row, : counts_B[row]]
        return found


def pad(prompts: Sequence[np.ndarray], numbers: Sequence[int], batch: int) -> Prompts:
    """Prompts with their numbers as `batch` rows, padded to one of few lengths."""
    longest, length = max(map(len, prompts)), SHORTEST
    while length < longest:
        length *= 2
    ids_BL = np.zeros((batch, length), np.int32)
    lengths_B, rows_B = np.zeros((2, batch), np.int32)
    for row, (ids, number) in enumerate(zip(prompts, numbers, strict=True)):
        ids_BL[row, : len(ids)] = ids
        lengths_B[row], rows_B[row] = len(ids), number
    return Prompts(jnp.asarray(ids_BL), jnp.asarray(lengths_B), jnp.asarray(rows_B))


def text_after(trained: Trained, prompt: np.ndarray, following: np.ndarray) -> str:
    """The text of `following` as it continues the prompt's: some tokenizers drop a first space."""
    decode = trained.tokenizer.decode
    before, whole = decode(prompt), decode(np.concatenate((prompt, following)))
    return whole.removeprefix(before) if whole.startswith(before) else decode(following)


def continue_text(
    trained: Trained, prompt: str, num_tokens: int, sampling: Sampling, seed: int
) -> str:
    """The prompt's continuation, up to the first end of a document, as a sample of training: the
    prompt opens with nothing, as documents do."""
    ids = trained.tokenizer.encode(prompt)
    ends = end_tokens(trained.tokenizer, trained.config.model.vocab_size)
    request = Request(num_tokens, sampling, ends)
    return text_after(trained, ids, Writer(trained, request)([ids], seed)[0])


def check_length(prompt_length: int, num_tokens: int, max_position: int, where: str = "") -> None:
    """ValueError where a prompt is empty or, with what follows, longer than the context."""
    if prompt_length == 0:
        raise ValueError(f"{where}the prompt is empty: give at least one token to continue")
    if prompt_length + num_tokens > max_position:
        raise ValueError(
            f"{where}a prompt of {prompt_length} tokens and {num_tokens} new ones exceed the "
            f"context of {max_position}: shorten the prompt or ask for at most "
            f"{max(max_position - prompt_length, 0)} tokens"
        )


def check_ids(ids: np.ndarray, vocab_size: int, where: str = "") -> None:
    """ValueError where the model has no embedding for a token."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"{where}token {ids.max()} is not in the model's vocabulary of {vocab_size}: the "
            "tokenizer is not the model's, or has grown since"
        )
