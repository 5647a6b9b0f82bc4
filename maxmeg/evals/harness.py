"""Evaluate a trained model on the tasks of lm-evaluation-harness.

Scores are equal to those of the harness's model class for transformers (HFLM). Needs the `lm_eval`
package: pip install 'maxmeg[evals]'.
"""

import difflib
import functools
import importlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from maxmeg.data.chat.ends import end_tokens
from maxmeg.data.chat.template import ChatTemplate, load_chat_template
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.engine import LANES, Engine
from maxmeg.inference.load import Trained
from maxmeg.inference.programs import jitted
from maxmeg.inference.requests import Request, check_alone, check_causal, check_ids
from maxmeg.inference.sampling import Sampling
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM

CHUNK = 128  # tokens whose logits are in memory at once
SHORTEST = 16  # rows are padded to this length times a power of two
MAX_NEW = 256  # default number of new tokens, as in HFLM
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class Tokens(typing.NamedTuple):
    """Right-padded rows of tokens, and the tokens to score.

    Target targets_T[i] is scored by the output at places_T[i] = row * L + position. Only the first
    num_T targets count; the others are padding.
    """

    ids_BL: Int[Array, "B L"]
    lengths_B: Int[Array, " B"]
    places_T: Int[Array, " T"]
    targets_T: Int[Array, " T"]
    num_T: Int[Array, ""]


class Packed(typing.NamedTuple):
    """A batch of tokens, and the slice of its targets that belongs to each request."""

    tokens: Tokens
    slices: list[tuple[int, slice]]  # (number of the request, its targets)


Pair = tuple[Sequence[int], Sequence[int]]  # tokens of the context, and of its continuation


def score(model: LM, tokens: Tokens) -> tuple[Float[Array, " T"], Bool[Array, " T"]]:
    """Return the log-probability of every target, and whether it is the most likely token."""
    B, L = tokens.ids_BL.shape
    last_B1 = jnp.maximum(tokens.lengths_B - 1, 0)[:, None]
    positions_BL = jnp.minimum(jnp.arange(L), last_B1)  # LongRoPE depends on the length
    h_BLD, _, _ = model.hidden(tokens.ids_BL, Context(positions_BL, sequence_sharded=False))
    h_ND = h_BLD.reshape(B * L, -1)

    def score_chunk(chunk, scores):
        def part(array_T):
            return lax.dynamic_slice_in_dim(array_T, chunk * CHUNK, CHUNK)

        logits_CV = model.logits(h_ND[part(tokens.places_T)][None])[0]
        targets_C = part(tokens.targets_T)
        logits_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=1)[:, 0]
        values = (
            logits_C - jax.nn.logsumexp(logits_CV, axis=1),
            jnp.argmax(logits_CV, axis=1) == targets_C,
        )
        return tuple(
            lax.dynamic_update_slice_in_dim(array_T, value_C, chunk * CHUNK, 0)
            for array_T, value_C in zip(scores, values, strict=True)
        )

    T = tokens.places_T.shape
    chunks = (tokens.num_T + CHUNK - 1) // CHUNK
    return lax.fori_loop(0, chunks, score_chunk, (jnp.zeros(T, jnp.float32), jnp.zeros(T, bool)))


def packed(pairs: Sequence[Pair], batch: int) -> Iterator[Packed]:
    """Yield the pairs in batches of at most `batch` rows of similar lengths.

    Pairs that differ only in their last token, like the answers A to D, share a row.
    """
    inputs = [(*context, *following)[:-1] for context, following in pairs]
    batch = min(batch, len(set(inputs)))
    rows: list[Sequence[int]] = []
    places: list[int] = []
    targets: list[int] = []
    slices: list[tuple[int, slice]] = []
    for number in sorted(range(len(pairs)), key=lambda i: (len(inputs[i]), inputs[i])):
        row, following = inputs[number], pairs[number][1]
        length = bucket(len(row))
        is_new = not rows or row != rows[-1]
        full = is_new and len(rows) == batch
        full |= len(places) + len(following) > batch * length
        if rows and (full or length != bucket(len(rows[-1]))):
            yield Packed(padded(rows, batch, places, targets), slices)
            rows, places, targets, slices = [], [], [], []
            is_new = True
        if is_new:
            rows.append(row)
        first = (len(rows) - 1) * length + len(row) - len(following)
        slices.append((number, slice(len(places), len(places) + len(following))))
        places += range(first, first + len(following))
        targets += following
    if rows:
        yield Packed(padded(rows, batch, places, targets), slices)


def bucket(length: int) -> int:
    """Return the length that a row is padded to: one of few, so that few programs are compiled."""
    return SHORTEST << (-(-length // SHORTEST) - 1).bit_length()


def padded(rows, batch: int, places: Sequence[int], targets: Sequence[int]) -> Tokens:
    """Return rows and targets as arrays of the shapes that `score` is compiled for."""
    L = bucket(len(rows[-1]))
    ids_BL = np.zeros((batch, L), np.int32)
    lengths_B = np.zeros(batch, np.int32)
    for row, ids in enumerate(rows):
        ids_BL[row, : len(ids)], lengths_B[row] = ids, len(ids)
    both_T = np.zeros((2, -(-batch * L // CHUNK) * CHUNK), np.int32)
    both_T[:, : len(places)] = places, targets
    arrays = (ids_BL, lengths_B, *both_T, np.array(len(places), np.int32))
    return Tokens(*map(jnp.asarray, arrays))


class HarnessModel:
    """The methods of lm_eval.api.model.LM; `harness_model` makes it a subclass of that class.

    The `args` of a request are (context, continuation), (text,) or (context, settings).
    """

    def __init__(self, trained: Trained, batch: int = LANES):
        super().__init__()
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1 row")
        self.trained, self.batch = trained, batch
        tokenizer: Tokenizer = trained.tokenizer
        self.max_length = trained.config.model.max_position
        self.prefix = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
        check_causal(trained.config.model)
        check_alone(trained.config.model)
        self.run = jitted(score, trained.config, trained.mesh, trained.model)
        self.hidden_ids = special_ids(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, after BOS if the tokenizer adds it and the text has none."""
        tokenizer = self.trained.tokenizer
        has_prefix = text.startswith(tokenizer.decode([self.prefix]))
        return [*(() if has_prefix else tokenizer.opening), *tokenizer.encode(text).tolist()]

    def encode_pair(self, context: str, following: str) -> Pair:
        """Tokenize context and continuation together; split after the tokens of the context."""
        stripped = context.rstrip()
        following = context[len(stripped) :] + following
        if stripped:
            before = self.encode(stripped)
            pair = self.encode(stripped + following)
        else:
            before, ids = [self.prefix], self.trained.tokenizer.encode(following).tolist()
            pair = ids if ids[:1] == before else before + ids
        if len(pair) <= len(before):
            raise ValueError(
                f"{following!r} after {context[-40:]!r} adds no token: give a "
                "continuation that is not empty"
            )
        return before, pair[len(before) :]

    def scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy decoding gives it) of each continuation.

        Where both exceed the model's context length, the context is truncated from the left.
        """
        size, tokenizer = self.trained.config.model.vocab_size, self.trained.tokenizer
        for context, following in pairs:
            if len(following) > self.max_length:
                raise ValueError(
                    f"a continuation of {len(following)} tokens is longer than the context of "
                    f"{self.max_length}: shorten it"
                )
            check_ids(np.array([*context, *following]), size, tokenizer=tokenizer)
        cut = [
            (tuple(context)[-max(self.max_length + 1 - len(following), 1) :], following)
            for context, following in pairs
        ]
        results = [(0.0, True)] * len(pairs)
        for tokens, slices in packed(cut, self.batch):
            values_T, likeliest_T = map(np.asarray, self.run(self.trained.model, tokens))
            for number, targets in slices:
                total = float(values_T[targets].astype(np.float64).sum())
                results[number] = total, bool(likeliest_T[targets].all())
        return results

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self.scores([self.encode_pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of whole texts, in windows of the context length."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            ids = [self.prefix, *self.encode(request.args[0])]
            for start in range(1, len(ids), self.max_length):
                context = ids[max(start - self.max_length, 0) : start]
                pairs.append((context, ids[start : start + self.max_length]))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self.scores(pairs), strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Generate text up to its first stop string."""
        replies, texts = [], []
        settings = [self.settings(request.args[1]) for request in requests]
        for number, request in enumerate(settings):
            room = self.max_length - request.num_tokens
            if room < 1:
                raise ValueError(
                    f"{request.num_tokens} new tokens leave no room for a prompt in the context of "
                    f"{self.max_length}: ask for fewer (max_gen_toks)"
                )
            ids = self.encode(requests[number].args[0]) or [self.prefix]
            replies.append(self.engine.submit(ids[-room:], request, number=number))
        while self.engine.step():
            pass
        for reply in replies:
            tokens = [i for i in reply.tokens if i not in self.hidden_ids]
            texts.append(until(self.trained.tokenizer.decode(tokens), reply.request.stops))
        return texts

    @functools.cached_property
    def engine(self) -> Engine:
        return Engine(self.trained, max_num_seqs=self.batch)

    def settings(self, options: Mapping[str, typing.Any]) -> Request:
        """Return a task's generation settings; ValueError for unknown options."""
        options = dict(options)
        stops = options.pop("until", None) or []
        stops = (stops,) if isinstance(stops, str) else tuple(stop for stop in stops if stop)
        counts = [options.pop(name, None) for name in LENGTHS]
        count = next((int(count) for count in counts if count is not None), MAX_NEW)
        temperature = float(options.pop("temperature", None) or 0)
        samples = options.pop("do_sample", None)
        if samples and not temperature:
            raise ValueError("do_sample=True with temperature 0: give a temperature > 0")
        sampling = Sampling(
            0.0 if samples is False else temperature,
            int(options.pop("top_k", None) or 0),
            float(options.pop("top_p", None) or 1),
        )
        if options:
            raise ValueError(
                f"generation settings {options} are not known: supported are until, do_sample, "
                f"temperature, top_k, top_p and {LENGTHS[0]}"
            )
        tokenizer, config = self.trained.tokenizer, self.trained.config
        ends = {*end_tokens(tokenizer, config.data, config.model.vocab_size), tokenizer.eod}
        return Request(count, sampling, tuple(sorted(ends)), stops)

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if not add_generation_prompt:
            raise NotImplementedError("continuing a message that the task begins is not supported")
        return self._template().render([chat_history])[0]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template().text if chat_template else None

    def _template(self) -> ChatTemplate:
        return load_chat_template(self.trained.tokenizer, self.trained.config.data.chat_template)

    @property
    def tokenizer_name(self) -> str:
        return self.trained.tokenizer.identity


def until(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    for stop in stops:
        text = text.split(stop)[0]
    return text


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens, which are removed from generated text."""
    roles = {i for i in (tokenizer.eod, tokenizer.bos, tokenizer.pad) if i is not None}
    return tokenizer.special_ids | roles


def harness_model(trained: Trained, batch: int = LANES) -> typing.Any:
    """Return `trained` as an lm_eval.api.model.LM, for lm_eval.simple_evaluate."""
    return type("Model", (HarnessModel, part_of_harness("lm_eval.api.model").LM), {})(
        trained, batch
    )


def run_tasks(
    trained: Trained,
    tasks: Sequence[str],
    batch: int = LANES,
    shots: int | None = None,
    limit: int | None = None,
) -> str:
    """Return a table of the scores. tasks: names of the harness's tasks, or YAML files of tasks.

    shots: number of examples (None: as the task says). limit: number of questions per task.
    ValueError for a task that is neither a name nor a file.
    """
    model, managers = harness_model(trained, batch), part_of_harness("lm_eval.tasks")
    files = [name for name in tasks if Path(name).is_file()]
    # To list its own tasks the harness reads thousands of files.
    manager = managers.TaskManager(include_defaults=len(files) < len(tasks))
    for name in tasks:
        if name not in files and name not in manager.all_tasks:
            nearest = difflib.get_close_matches(name, manager.all_tasks, 3, 0.5)
            hint = f"nearest are {', '.join(nearest)}" if nearest else "give a name or a YAML file"
            raise ValueError(f"task {name!r} is neither a task of lm_eval nor a file: {hint}")
    results = part_of_harness("lm_eval").simple_evaluate(
        model, tasks=list(tasks), num_fewshot=shots, limit=limit, task_manager=manager
    )
    return part_of_harness("lm_eval.utils").make_table(results)


def part_of_harness(module: str) -> typing.Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            "--tasks needs lm-evaluation-harness: pip install 'maxmeg[evals]'"
        ) from error
