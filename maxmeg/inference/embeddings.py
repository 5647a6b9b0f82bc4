"""Embeddings of texts: a vector of length 1 for each, from the last hidden states of its tokens;
of a biencoder the vector that it was trained to give, of any length."""

import dataclasses
import typing
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmeg.checkpoint.names import from_tree, nested, to_arrays
from maxmeg.config.head import Biencoder, name_in_two
from maxmeg.inference.load import Trained
from maxmeg.inference.programs import jitted
from maxmeg.inference.requests import check_alone, check_ids
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM, language_model
from maxmeg.parallel.mesh import BATCH_AXES, batch_shards

Pooling = typing.Literal["mean", "first", "pooler", "vector"]
InputType = typing.Literal["document", "query"]  # as of other servers of embeddings
POOLINGS: tuple[Pooling, ...] = typing.get_args(Pooling)
VECTOR: Pooling = "vector"  # a biencoder's, which has no other
ROWS = (1, 8, 32)  # numbers of texts that are read together
SHORTEST = 32  # tokens that a row has at least


class Rows(typing.NamedTuple):
    """Rows of token ids to be padded to [count, length]; their numbers among all rows."""

    numbers: list[int]
    ids: list[Sequence[int]]
    count: int
    length: int


class Embedder:
    """Embeddings by one compiled program for each number of rows and length of them.

    Rows are padded to the next of a few lengths: 32, 64, 128 and so on, and unless `few` those
    halfway between two of them. longest: tokens of a text at most; 0: the model's context. queries:
    by a biencoder's encoder of queries, if it has two encoders; otherwise by that of texts.
    ValueError for an encoder-decoder.
    """

    def __init__(
        self, trained: Trained, few: bool = False, longest: int = 0, queries: bool = False
    ) -> None:
        self.biencoder = trained.config.model.head.biencoder
        trained = one_encoder(trained, queries)
        self.trained, self.model = trained, trained.config.model
        check_alone(self.model)
        room = self.model.max_position - self.model.bert.position_offset
        self.room = min(longest or room, room)
        self.lengths = [*row_lengths(self.room, few)]
        roles = trained.tokenizer.cls, trained.tokenizer.sep
        self.ends = tuple([] if role is None else [role] for role in roles)  # around a text
        head, self.shards = self.model.head, batch_shards(trained.mesh)
        self.is_biencoder = self.biencoder is not Biencoder.none
        self.default: Pooling = VECTOR if self.is_biencoder else "mean"
        self.width = head.width or self.model.hidden_size
        function = vectors if self.is_biencoder else pooled
        arguments = (trained.config, trained.mesh, trained.model, BATCH_AXES)
        self.program = jitted(function, *arguments)

    def rows(self, texts: Sequence[str | Sequence[int]], truncate: bool = False) -> list[list[int]]:
        """Return the token ids of texts.

        A text stands between the tokenizer's class and separator tokens, if it has these; ids stay
        as they are. truncate: cut texts that exceed the context. ValueError for those that do
        otherwise, and for ids outside the vocabulary.
        """
        tokenizer, (first, last), rows = self.trained.tokenizer, self.ends, []
        for number, text in enumerate(texts):
            end = last if isinstance(text, str) else []
            ids = [*first, *tokenizer.encode(text), *end] if isinstance(text, str) else [*text]
            if len(ids) > self.room and truncate:
                ids = [*ids[: self.room - len(end)], *end]
            if not 0 < len(ids) <= self.room:
                raise ValueError(
                    f"text {number} has {len(ids)} tokens, and 1 to {self.room} are allowed: "
                    "shorten it, or set truncate=True"
                )
            check_ids(np.array(ids), self.model.vocab_size, f"text {number}: ", tokenizer)
            rows.append(ids)
        return rows

    def check(self, pooling: str) -> None:
        """ValueError for a pooling that is unknown, or that the model does not have."""
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is not one of {', '.join(POOLINGS)}")
        if (pooling == VECTOR) != self.is_biencoder:
            able = VECTOR if self.is_biencoder else ", ".join(n for n in POOLINGS if n != VECTOR)
            raise ValueError(
                f"pooling={pooling!r} is not for a model with model.head.biencoder="
                f"{self.biencoder.name}: choose {able}"
            )
        if pooling == "pooler" and not self.model.bert.pooler:
            raise ValueError("pooling='pooler': the model has no pooler: choose mean or first")

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[Rows]:
        """Yield rows that are run together, the longest first."""
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        while order:
            sizes = [size * self.shards for size in ROWS]
            count = next((size for size in sizes if size >= len(order)), sizes[-1])
            numbers, order = order[:count], order[count:]
            ids = [rows[number] for number in numbers]
            length = next(length for length in self.lengths if length >= len(ids[0]))
            yield Rows(numbers, ids, count, length)

    def run(self, rows: Rows, pooling: Pooling) -> Float[np.ndarray, "N D"]:
        """Return the float32 embeddings of rows that run together."""
        ids_BL = np.zeros((rows.count, rows.length), np.int32)
        segments_BL = np.zeros_like(ids_BL)
        for row, ids in enumerate(rows.ids):
            ids_BL[row, : len(ids)] = ids
            segments_BL[row, : len(ids)] = 1
        poolings_B = np.full(rows.count, POOLINGS.index(pooling), np.int32)
        arrays = ids_BL, segments_BL, poolings_B
        vectors_BD = self.program(self.trained.model, *map(jnp.asarray, arrays))
        return np.asarray(vectors_BD)[: len(rows.ids)]

    def warm_up(self) -> None:
        """Compile all programs."""
        for length in self.lengths:
            for count in ROWS:
                self.run(Rows([], [], count * self.shards, length), self.default)

    def __call__(
        self,
        texts: Sequence[str | Sequence[int]],
        pooling: Pooling | None = None,
        truncate: bool = False,
    ) -> Float[np.ndarray, "N D"]:
        """Return the float32 embeddings of texts.

        pooling: the mean (None) over the hidden states of a text's tokens, that of its first token,
        or the pooler's output for it; of a biencoder its vector (None). ValueError as from `rows`
        and `check`.
        """
        pooling = pooling or self.default
        self.check(pooling)
        vectors = np.zeros((len(texts), self.width), np.float32)
        for rows in self.batches(self.rows(texts, truncate)):
            vectors[rows.numbers] = self.run(rows, pooling)
        return vectors


def embedders(trained: Trained, few: bool = False, longest: int = 0) -> tuple[Embedder, Embedder]:
    """Return the embedders of texts and of queries: one, unless a biencoder has two encoders."""
    of_texts = Embedder(trained, few, longest)
    is_separate = of_texts.biencoder is Biencoder.separate
    return of_texts, Embedder(trained, few, longest, queries=True) if is_separate else of_texts


def one_encoder(trained: Trained, queries: bool) -> Trained:
    """Return the encoder of queries, or that of texts, of a biencoder that has two; another model
    as it is. Weights are not copied."""
    if trained.config.model.head.biencoder is not Biencoder.separate:
        return trained
    config = dataclasses.replace(trained.config, model=trained.config.model.one_encoder)
    like = jax.eval_shape(lambda key: language_model(key, config), jax.random.key(0))
    arrays = to_arrays(trained.model)
    encoder = {name: arrays[name_in_two(name, queries)] for name in to_arrays(like)}
    return dataclasses.replace(trained, model=from_tree(nested(encoder), like), config=config)


def row_lengths(room: int, few: bool) -> Iterator[int]:
    """Yield the lengths of rows: the last is `room`."""
    length = SHORTEST
    while length < room:
        yield length
        if length + length // 2 < room and not few:
            yield length + length // 2
        length *= 2
    yield room


def context(ids_BL: Int[Array, "B L"], segments_BL: Int[Array, "B L"]) -> Context:
    positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1]), ids_BL.shape)
    return Context(positions_BL, segments_BL, sequence_sharded=False, tokens_BL=ids_BL)


def vectors(
    model: LM, ids_BL: Int[Array, "B L"], segments_BL: Int[Array, "B L"], _: Int[Array, " B"]
) -> Float[Array, "B W"]:
    """Return the vectors of a biencoder."""
    ctx = context(ids_BL, segments_BL)
    x = model.stack(model.embed_tokens(ids_BL, ctx), ctx)[0]
    return model.outputs({"target": x["target"][:, :1]}, ctx)[:, 0].astype(jnp.float32)


def pooled(
    model: LM,
    ids_BL: Int[Array, "B L"],
    segments_BL: Int[Array, "B L"],
    poolings_B: Int[Array, " B"],
) -> Float[Array, "B D"]:
    """Return embeddings; segment 0 is padding, poolings are indices of POOLINGS."""
    pooling = poolings_B[0]
    ctx = context(ids_BL, segments_BL)
    h_BLD = model.normed(model.stack(model.embed_tokens(ids_BL, ctx), ctx)[0]["target"])
    first_B1D = h_BLD[:, :1]
    if model.bert.pooler is not None:
        is_pooler = pooling == POOLINGS.index("pooler")
        first_B1D = jnp.where(is_pooler, model.bert.pooled(first_B1D), first_B1D)
    sums_BD = jnp.einsum("BL,BLD->BD", jnp.float32(segments_BL), jnp.float32(h_BLD))
    is_mean = pooling == POOLINGS.index("mean")
    sums_BD = jnp.where(is_mean, sums_BD, jnp.float32(first_B1D[:, 0]))
    lengths_B1 = jnp.linalg.norm(sums_BD, axis=1, keepdims=True)
    return sums_BD / jnp.maximum(lengths_B1, jnp.finfo(jnp.float32).tiny)
