"""The contrastive loss of a biencoder: each query against the texts of a whole microbatch.

A row holds a query, its text and hard negatives as segments 1, 2, 3 ..., each with positions of its
own; with two encoders the query is the source. The vector of each is the model's output at its
first token; the score of a query and a text is their inner product. A query's own text has to score
higher than all other texts of the microbatch, on all devices of the batch axes, as in Megatron-LM's
ICT.
"""

import math
import typing

import jax
import jax.numpy as jnp

from maxmeg.config.data import HAS_TEXT
from maxmeg.config.schema import TrainConfig
from maxmeg.layers.context import Context
from maxmeg.objectives.objective import Metrics, Objective, Sums, token_metrics
from maxmeg.parallel import collectives
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.mesh import BATCH_AXES, CONTEXT_AXES

TOPS = (1, 5)  # share of queries whose own text is among the best 1, the best 5


def vectors(h_BLW: jax.Array, batch: Batch, ctx: Context, count: int) -> jax.Array:
    """float32 vectors [B, count, W] of the first `count` segments of each row, on all devices along
    context."""
    assert batch.segment_ids is not None
    places = positions_BL, segments_BL = batch.positions, batch.segment_ids
    if ctx.source is not None:
        of_queries = ctx.source.positions_BS, ctx.source.segments_BS
        pairs = zip(of_queries, places, strict=True)
        positions_BL, segments_BL = (jnp.concatenate(pair, axis=1) for pair in pairs)
    numbers_N = jnp.arange(1, count + 1)
    is_first_BLN = (positions_BL[..., None] == 0) & (segments_BL[..., None] == numbers_N)
    parts_BNW = jnp.einsum("BLN,BLW->BNW", is_first_BLN.astype(h_BLW.dtype), h_BLW)
    return collectives.sum_over(parts_BNW.astype(jnp.float32), CONTEXT_AXES)


@jax.named_scope("loss")
def loss(
    model: typing.Any, h_BLW: jax.Array, batch: Batch, train: TrainConfig, ctx: Context
) -> tuple[jax.Array, Sums]:
    """(local contribution to the mean cross entropy of each query's own text among all texts, local
    sums).

    All devices that share rows compute their loss; each counts its part.
    """
    flags = [batch.extra[name] for name in sorted(batch.extra) if name.startswith(HAS_TEXT)]
    if not flags:
        raise ValueError(f"the batch has no arrays {HAS_TEXT}0, ...: one for each text of a row")
    copied = (*CONTEXT_AXES, *collectives.VOCAB_AXES)
    is_query_B = collectives.sum_over(jnp.sum(batch.loss_mask, axis=1), CONTEXT_AXES)
    is_text_BN = jnp.stack(flags, axis=1) * (is_query_B[:, None] > 0)
    vectors_BNW = vectors(h_BLW, batch, ctx, 1 + len(flags))
    query_BW, texts_TW = vectors_BNW[:, 0], vectors_BNW[:, 1:].reshape(-1, h_BLW.shape[-1])
    texts_TW = collectives.gather(texts_TW, BATCH_AXES, 0)
    is_text_T = collectives.gather(is_text_BN.reshape(-1), BATCH_AXES, 0)
    scores_BT = jnp.einsum("BW,TW->BT", query_BW, texts_TW, precision="highest")
    if train.score_scaling:
        scores_BT /= math.sqrt(model.output_weight().shape[-1])
    scores_BT = jnp.where(is_text_T > 0, scores_BT, jnp.finfo(jnp.float32).min)
    B = len(query_BW)
    label_B1 = (collectives.first_index(BATCH_AXES, B) + jnp.arange(B)[:, None]) * len(flags)
    label_score_B1 = jnp.take_along_axis(scores_BT, label_B1, axis=1)
    losses_B = is_query_B * (jax.nn.logsumexp(scores_BT, axis=1) - label_score_B1[:, 0])
    total = jnp.sum(losses_B) / batch.divisors[0] / collectives.axis_size(copied)
    is_before_BT = jnp.arange(scores_BT.shape[1]) < label_B1  # of equal scores the first one counts
    better_BT = (scores_BT > label_score_B1) | (scores_BT == label_score_B1) & is_before_BT
    rank_B = jnp.sum(better_BT, axis=1)
    sums = {"loss_sum": jnp.sum(losses_B), "tokens": jnp.sum(is_query_B)}
    names = ("right", *(f"right_{top}" for top in TOPS[1:]))
    for name, top in zip(names, TOPS, strict=True):
        sums[name] = jnp.sum(is_query_B * (rank_B < top))
    return total, {n: collectives.counted_once(x, CONTEXT_AXES) for n, x in sums.items()}


def metrics(sums: Sums) -> Metrics:
    """Mean cross entropy of queries, and the shares of those whose own text scores best, or among
    the best five."""
    queries, tops = jnp.maximum(sums["tokens"], 1), TOPS[1:]
    top = {f"accuracy_{top}": sums[f"right_{top}"] / queries for top in tops}
    return token_metrics(sums) | {"accuracy": sums["right"] / queries} | top


CONTRASTIVE = Objective(loss=loss, metrics=metrics)
