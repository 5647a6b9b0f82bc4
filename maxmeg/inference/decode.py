"""Generate text with a key/value cache: one prefill, then one token per row and step.

Prompts of different lengths are right-padded to one array. Keys and values of padding are never
attended to: the new tokens of a row overwrite them, and attention is causal.
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
from jaxtyping import Array, Float, Int

from maxmeg.config.mixers import RotaryScaling
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.load import Trained, load_run, without_pipeline
from maxmeg.inference.prompts import end_tokens
from maxmeg.inference.sampling import Sampling, sample
from maxmeg.layers.attention import PAGE
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.parallel.rules import reductions
from maxmeg.parallel.spmd import spmd
from maxmeg.step import compute_model

SHORTEST = 16  # prompts are padded to this length times a power of two
SAMPLE_TOKENS = 200  # that a run generates when training ends
BATCH = 8  # prompts per batch
REPLICATED = P()


@dataclasses.dataclass(frozen=True)
class Request:
    """What to generate for each prompt: at most `num_tokens`, stopping at a token in `ends`."""

    num_tokens: int
    sampling: Sampling
    ends: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens={self.num_tokens} must be at least 1")


class Prompts(typing.NamedTuple):
    """Right-padded prompts. lengths_B: tokens of each prompt; 0: the row is empty. rows_B: a number
    per row, folded into the sampling key."""

    ids_BL: Int[Array, "B L"]
    lengths_B: Int[Array, " B"]
    rows_B: Int[Array, " B"]


class Progress(typing.NamedTuple):
    """State of the decoding loop, after `step` new tokens per row.

    ids_BM: each prompt followed by its new tokens. lengths_B: tokens of each prompt. counts_B: new
    tokens before a row's end. raw_keys: of the sampling, one per row. cache: of M tokens.
    """

    step: jax.Array
    ids_BM: jax.Array
    lengths_B: jax.Array
    counts_B: jax.Array
    ended_B: jax.Array
    raw_keys: jax.Array
    cache: list


def forward_cached(
    model: LM, ids_BL: Int[Array, "B L"], offset: Int[Array, "*B"], cache: list
) -> tuple[jax.Array, list]:
    """Return the logits after the last token of `ids_BL`, and the new cache.

    offset: number of tokens in the cache before `ids_BL`, for all rows or per row.
    """
    positions_BL = jnp.expand_dims(offset, -1) + jnp.arange(ids_BL.shape[1])
    positions_BL = jnp.broadcast_to(positions_BL, ids_BL.shape)
    ctx = Context(positions_BL, cache_offset=offset, sequence_sharded=False)
    h_BLD, filled, _ = model.hidden(ids_BL, ctx, cache)
    assert filled is not None
    return model.logits(h_BLD[:, -1:])[:, 0], filled


def prefill(
    model: LM, ids_BL: Int[Array, "B L"], lengths_B: Int[Array, " B"], cache: list
) -> tuple[jax.Array, list]:
    """Return the logits after each row's last token, and a cache of these rows.

    Padding has the position of the last token, because LongRoPE depends on the row's length.
    """
    last_B1 = jnp.maximum(lengths_B - 1, 0)[:, None]
    positions_BL = jnp.minimum(jnp.arange(ids_BL.shape[1]), last_B1)
    ctx = Context(positions_BL, cache_offset=0, sequence_sharded=False)
    h_BLD, filled, _ = model.hidden(ids_BL, ctx, cache)
    assert filled is not None
    h_B1D = jnp.take_along_axis(h_BLD, last_B1[..., None], axis=1)
    return model.logits(h_B1D)[:, 0], filled


def rotary_switch(config: ModelConfig) -> int:
    """Return the row length above which LongRoPE uses its long factors; 0 for other models."""
    is_longrope = config.rotary.scaling is RotaryScaling.longrope
    return config.rotary.original_length if is_longrope else 0


def start(model: LM, prompts: Prompts, key: jax.Array, request: Request, length: int) -> Progress:
    """Read the prompts into a cache of `length` tokens, and choose the first token of each row."""
    B, L = prompts.ids_BL.shape
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(prompts.rows_B)
    cache = model.stack.init_cache(B, length)
    logits_BV, cache = prefill(model, prompts.ids_BL, prompts.lengths_B, cache)
    progress = Progress(
        step=jnp.int32(0),
        ids_BM=jnp.pad(prompts.ids_BL, ((0, 0), (0, length - L))),
        lengths_B=prompts.lengths_B,
        counts_B=jnp.zeros(B, jnp.int32),
        ended_B=prompts.lengths_B == 0,
        raw_keys=jax.random.key_data(keys_B),
        cache=cache,
    )
    return choose_next(logits_BV, progress, request)


def choose_next(logits_BV: Float[Array, "B V"], progress: Progress, request: Request) -> Progress:
    """Sample the next token of each row."""

    def choose(logits_V, raw_key):
        key = jax.random.fold_in(jax.random.wrap_key_data(raw_key), progress.step)
        return sample(logits_V[None], key, request.sampling)[0]

    ids_B = jax.vmap(choose)(logits_BV, progress.raw_keys)
    ended_B = progress.ended_B | jnp.isin(ids_B, jnp.array(request.ends, jnp.int32))
    places = jnp.arange(len(ids_B)), progress.lengths_B + progress.step
    return progress._replace(
        step=progress.step + 1,
        ids_BM=progress.ids_BM.at[places].set(ids_B),
        counts_B=progress.counts_B + ~ended_B,
        ended_B=ended_B,
    )


def advance(model: LM, progress: Progress, request: Request, switch: int) -> Progress:
    """Choose one more token of each row.

    switch: the model's rotary_switch; when a row grows past it, the cache is recomputed, because
    the cached keys have the rotation of shorter rows.
    """
    offset_B = progress.lengths_B + progress.step - 1  # number of cached tokens per row

    def decode(cache: list):
        ids_B1 = jnp.take_along_axis(progress.ids_BM, offset_B[:, None], axis=1)
        return forward_cached(model, ids_B1, offset_B, cache)

    def recompute(cache: list):
        return prefill(model, progress.ids_BM, offset_B + 1, cache)

    if 0 < switch < progress.ids_BM.shape[1]:
        crosses = jnp.any((offset_B == switch) & ~progress.ended_B)
        logits_BV, cache = lax.cond(crosses, recompute, decode, progress.cache)
    else:
        logits_BV, cache = decode(progress.cache)
    return choose_next(logits_BV, progress._replace(cache=cache), request)


def generate(
    model: LM, prompts: Prompts, key: jax.Array, request: Request, switch: int = 0
) -> tuple[Int[Array, "B N"], Int[Array, " B"]]:
    """Return the new ids of each row, and how many of them precede its end.

    Ids after the end have no meaning. A row depends only on its prompt and its number. switch: as
    of `advance`.
    """
    L, N = prompts.ids_BL.shape[1], request.num_tokens
    length = L + N if L + N < PAGE else -(-(L + N) // PAGE) * PAGE

    def unfinished(progress: Progress):
        return (progress.step < N) & ~jnp.all(progress.ended_B)

    def step(progress: Progress) -> Progress:
        return advance(model, progress, request, switch)

    final = lax.while_loop(unfinished, step, start(model, prompts, key, request, length))
    places_BN = final.lengths_B[:, None] + jnp.arange(N)
    return jnp.take_along_axis(final.ids_BM, places_BN, axis=1), final.counts_B


def check_causal(model: ModelConfig) -> None:
    """ValueError for a model that does not predict next tokens."""
    if not model.attention.causal:
        raise ValueError(
            "model.attention.causal=false: a bidirectional model predicts masked tokens and does "
            "not continue text; its loss can be measured (maxmeg evaluate)"
        )


def make_generate(config: Config, mesh: Mesh, model: LM, request: Request) -> Callable:
    """Return the jitted (model, prompts, raw key) -> (ids_BN, counts_B) for a model on `mesh`.

    ValueError for a model that is not causal.
    """
    check_causal(config.model)

    def local(model, prompts, raw_key):
        key = jax.random.wrap_key_data(raw_key)
        return generate(model, prompts, key, request, rotary_switch(config.model))

    return jitted(local, config, mesh, model)


def jitted(
    function: Callable,
    config: Config,
    mesh: Mesh,
    model: LM,
    arguments: typing.Any = REPLICATED,
    result: typing.Any = REPLICATED,
    donate: tuple[int, ...] = (),
) -> Callable:
    """Return the jitted function(model, *arguments) for a model on `mesh`.

    Weights are cast to the compute dtype. arguments, result: their partition specs; by default
    every device has all of them. donate: numbers of the arguments that are reused, from 1.
    """
    grad_layout = reductions(model, mesh, config.parallel.zero1)
    specs = jax.tree.map(lambda array: array.sharding.spec, model)
    dtype = jnp.dtype(config.model.dtype.value)

    def local(model, values):
        return function(compute_model(model, grad_layout, dtype), *values)

    program = spmd(local, mesh, (specs, arguments), result)
    return jax.jit(lambda model, *values: program(model, values), donate_argnums=donate)


class Writer:
    """Generates continuations of prompts, in batches of at most `batch` prompts.

    Prompts are sorted by length into batches; one program is compiled per padded length.
    """

    def __init__(self, trained: Trained, request: Request, batch: int = BATCH):
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1 prompt")
        self.trained, self.request, self.batch = trained, request, batch
        self.run = make_generate(trained.config, trained.mesh, trained.model, request)

    def __call__(self, prompts: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
        """Return the new ids of each prompt, without the end token; ValueError as check_length."""
        model = self.trained.config.model
        for number, ids in enumerate(prompts, 1):
            where = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
            check_length(len(ids), self.request.num_tokens, model.max_position, where)
            check_ids(ids, model.vocab_size, where)
        key = jax.random.key_data(jax.random.key(seed))
        order = np.argsort([len(ids) for ids in prompts], kind="stable")
        results = [np.empty(0, np.int32)] * len(prompts)
        batch = min(self.batch, len(prompts))
        for start in range(0, len(prompts), max(batch, 1)):
            numbers = order[start : start + batch].tolist()
            padded = pad([prompts[i] for i in numbers], numbers, batch)
            ids_BN, counts_B = map(np.asarray, self.run(self.trained.model, padded, key))
            for row, number in enumerate(numbers):
                results[number] = ids_BN[row, : counts_B[row]]
        return results


def pad(prompts: Sequence[np.ndarray], numbers: Sequence[int], batch: int) -> Prompts:
    """Return prompts and their numbers as `batch` rows, padded to one of few lengths."""
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
    """Decode the tokens `following` a prompt together with it, which keeps a leading space."""
    decode = trained.tokenizer.decode
    before, whole = decode(prompt), decode(np.concatenate((prompt, following)))
    return whole.removeprefix(before) if whole.startswith(before) else decode(following)


def continue_text(
    trained: Trained, prompt: str, num_tokens: int, sampling: Sampling, seed: int
) -> str:
    """Return the continuation of a prompt up to the first end of a document.

    No BOS token is prepended: documents in training have none.
    """
    ids = trained.tokenizer.encode(prompt)
    ends = end_tokens(trained.tokenizer, trained.config.model.vocab_size)
    request = Request(num_tokens, sampling, ends)
    return text_after(trained, ids, Writer(trained, request)([ids], seed)[0])


def check_length(prompt_length: int, num_tokens: int, max_position: int, where: str = "") -> None:
    """ValueError if a prompt is empty, or exceeds the context with its new tokens."""
    if prompt_length == 0:
        raise ValueError(f"{where}the prompt is empty: give at least one token to continue")
    if prompt_length + num_tokens > max_position:
        raise ValueError(
            f"{where}a prompt of {prompt_length} tokens and {num_tokens} new ones exceed the "
            f"context of {max_position}: shorten the prompt or ask for at most "
            f"{max(max_position - prompt_length, 0)} tokens"
        )


def check_ids(ids: np.ndarray, vocab_size: int, where: str = "") -> None:
    """ValueError if a token has no embedding."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"{where}token {ids.max()} is not in the model's vocabulary of {vocab_size}: the "
            "tokenizer is not the model's, or has grown since"
        )


def sample_at_end(
    model: LM, config: Config, tokenizer: Tokenizer, step: int, mesh: Mesh, saved: bool
) -> str:
    """Return how the trained model continues log.sample_prompt.

    saved: whether there is a checkpoint of `step`. From it the model is read onto one device if the
    devices are virtual ones of this process's CPU, and with a pipeline onto a mesh without one;
    "" for a pipeline that is not saved.
    """
    prompt, pipelined = config.log.sample_prompt, mesh.shape["pipe"] > 1
    trained = Trained(model, config, tokenizer, step, mesh)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if saved and on_cpu and mesh.size > 1 and not mesh.is_multi_process:
        # XLA may start collectives that do not depend on each other, as small steps of decoding
        # have many, in another order on each virtual device of a busy CPU: they wait forever.
        trained = load_run(config.run_dir, step)
    elif saved and pipelined:
        trained = load_run(config.run_dir, step, without_pipeline(mesh, config.model.hidden_size))
    elif pipelined:
        return ""
    room = config.model.max_position - len(tokenizer.encode(prompt))
    sampling = Sampling(temperature=0.5, top_k=40)
    return continue_text(trained, prompt, min(SAMPLE_TOKENS, room), sampling, config.seed)
