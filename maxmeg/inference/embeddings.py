"""Embeddings of texts: a vector of length 1 for each, from the last hidden states of its tokens."""

import typing
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmeg.inference.load import Trained
from maxmeg.inference.programs import jitted
from maxmeg.inference.requests import check_alone, check_ids
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM

Pooling = typing.Literal["mean", "first", "pooler"]
BATCH, MULTIPLE = 32, 32  # texts at a time; lengths are padded to multiples: few programs compile


def text_embeddings(
    trained: Trained, texts: Sequence[str], pooling: Pooling = "mean", truncate: bool = False
) -> Float[np.ndarray, "N D"]:
    """Return the float32 embeddings of texts.

    pooling: the mean over the hidden states of a text's tokens, that of its first token, or the
    pooler's output for it. A text stands between the tokenizer's class and separator tokens, if it
    has these. truncate: cut texts that exceed the context. ValueError for texts that exceed it
    otherwise, and for a pooler that the model does not have.
    """
    config, tokenizer = trained.config.model, trained.tokenizer
    check_alone(config)
    if pooling not in typing.get_args(Pooling):
        names = ", ".join(typing.get_args(Pooling))
        raise ValueError(f"pooling={pooling!r} is not one of {names}")
    if pooling == "pooler" and not config.bert.pooler:
        raise ValueError("pooling='pooler': the model has no pooler: choose mean or first")
    ends = [[] if token is None else [token] for token in (tokenizer.cls, tokenizer.sep)]
    room = config.max_position - config.bert.position_offset
    rows = []
    for number, text in enumerate(texts):
        ids = [*ends[0], *tokenizer.encode(text), *ends[1]]
        if len(ids) > room and truncate:
            ids = [*ids[: room - len(ends[1])], *ends[1]]
        if not 0 < len(ids) <= room:
            raise ValueError(
                f"text {number} has {len(ids)} tokens, and the model takes 1 to {room}: shorten "
                "it, or set truncate=True"
            )
        check_ids(np.array(ids), config.vocab_size)
        rows.append(ids)
    pool = jitted(pooled(pooling), trained.config, trained.mesh, trained.model)
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    found = np.zeros((len(rows), config.hidden_size), np.float32)
    for first in range(0, len(order), BATCH):
        numbers = order[first : first + BATCH]
        length = min(-(-len(rows[numbers[0]]) // MULTIPLE) * MULTIPLE, room)
        ids_BL = np.zeros((min(BATCH, len(order)), length), np.int32)
        segments_BL = np.zeros_like(ids_BL)
        for row, number in enumerate(numbers):
            ids_BL[row, : len(rows[number])] = rows[number]
            segments_BL[row, : len(rows[number])] = 1
        vectors_BD = pool(trained.model, jnp.asarray(ids_BL), jnp.asarray(segments_BL))
        found[numbers] = np.asarray(vectors_BD)[: len(numbers)]
    return found


def pooled(pooling: Pooling) -> Callable:
    """Return the (model, ids, segments) -> embeddings; segment 0 is padding."""

    def run(
        model: LM, ids_BL: Int[Array, "B L"], segments_BL: Int[Array, "B L"]
    ) -> Float[Array, "B D"]:
        positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1]), ids_BL.shape)
        ctx = Context(positions_BL, segments_BL, sequence_sharded=False)
        h_BLD = model.normed(model.stack(model.embed_tokens(ids_BL, ctx), ctx)[0])
        if pooling == "pooler":
            assert model.bert is not None
            h_BLD = model.bert.pooled(h_BLD[:, :1])
        h_BLD = h_BLD.astype(jnp.float32)
        weights_BL = (
            segments_BL if pooling == "mean" else jnp.zeros_like(segments_BL).at[:, 0].set(1)
        )
        weights_BL = weights_BL[:, : h_BLD.shape[1]].astype(jnp.float32)
        sums_BD = jnp.einsum("BL,BLD->BD", weights_BL, h_BLD)
        lengths_B1 = jnp.linalg.norm(sums_BD, axis=1, keepdims=True)
        return sums_BD / jnp.maximum(lengths_B1, jnp.finfo(jnp.float32).tiny)

    return run
