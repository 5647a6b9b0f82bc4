"""Biencoders: the contrastive loss over a whole microbatch, the same on every layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import (
    BATCH,
    assert_equal_but_rounding,
    batch_gradients,
    first_samples,
    named_gradients,
    on_host,
    tiny,
)

from maxmeg.checkpoint.names import from_tree, nested, to_arrays
from maxmeg.config.data import HAS_TEXT, Objective
from maxmeg.config.head import Biencoder, two_encoders
from maxmeg.config.model import Norm, NormPlace, Position
from maxmeg.config.parallel import Schedule
from maxmeg.data.retrieval.pairs import PairDataset
from maxmeg.data.retrieval.rows import Lengths
from maxmeg.inference.embeddings import one_encoder, vectors
from maxmeg.inference.load import Trained
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.objectives.contrastive import CONTRASTIVE
from maxmeg.objectives.contrastive import vectors as vectors_of_rows
from maxmeg.objectives.microbatch import context

TOLERANCE = 1e-5  # relative, float32: the order of sums differs
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
LENGTH, NEGATIVES, MICROBATCHES = 48, 2, 2
SLOW = pytest.mark.slow
ROWS_CUT = {"fsdp": 2, "context": 2, "tensor": 2}
LAYOUTS = [
    {"pipe": 2, "fsdp": 2, "tensor": 2},
    ROWS_CUT,
    {"pipe": 2, "data": 2, "fsdp": 2, "schedule": Schedule.zero_bubble},
]
MODEL = {
    **{"norm": Norm.layernorm, "norm_place": NormPlace.post_residual, "tied": True},
    **{"position": Position.learned, "max_position": 18, "attention.causal": False},
    **{"head.biencoder": Biencoder.shared, "head.projection": 12, "num_layers": 4},
    "bert.pooler": True,
}


SEPARATE = {"head.biencoder": Biencoder.separate, "layers": two_encoders(4), "num_layers": 8}


def pairs(separate: bool) -> PairDataset:
    random = np.random.default_rng(0)
    sizes = [random.integers(4, 12, 2 + n % 4) for n in range(BATCH)]
    examples = [[random.integers(0, 61, size) for size in row] for row in sizes]
    return PairDataset(examples, Lengths(LENGTH, 12, 12, separate), NEGATIVES, 61, shuffle=False)


def in_one_encoder(name: str) -> str:
    """The name that an array of a biencoder's two encoders has in a model of one encoder."""
    return name.replace("model.query.", "model.").replace("stack.groups.1.", "stack.groups.0.")


def gradients(parallel: dict, separate: bool = False, weights: LM | None = None):
    """(metrics, gradients by name in model order, model, batch) of two microbatches. weights: of a
    model with one encoder, for both."""
    replicas = parallel.get("data", 1) * parallel["fsdp"]
    micro_batch_size = BATCH // MICROBATCHES // replicas
    train = {"micro_batch_size": micro_batch_size, "score_scaling": True}
    config = tiny(MODEL | SEPARATE if separate else MODEL, train, **parallel)
    data = config.data
    data.objective, data.paths, data.sequence_length = Objective.retrieve, ("a.jsonl",), LENGTH
    data.query_length, data.negatives = 12, NEGATIVES
    data.separate_queries = separate

    def prepare(model):
        if weights is None:
            return model
        arrays = to_arrays({"model": weights})
        taken = {name: arrays[in_one_encoder(name)] for name in to_arrays({"model": model})}
        return from_tree(nested(taken), {"model": model})["model"]

    sums, *found = batch_gradients(config, first_samples(pairs(separate).batch), prepare)
    return CONTRASTIVE.metrics(sums), *found


@pytest.fixture(scope="module")
def one_device():
    return gradients({"fsdp": 1})


@pytest.fixture(scope="module")
def two_encoders_on_one_device():
    return gradients({"fsdp": 1}, separate=True)


@pytest.mark.slow
def test_two_encoders_with_the_same_weights_are_one(one_device):
    """The gradients of both add up to those of the one, and each has a part of its own."""
    values, found, *_ = gradients({"fsdp": 1}, separate=True, weights=one_device[2])
    sums: dict[str, np.ndarray] = {}
    for name, array in found.items():
        of_one = in_one_encoder(f"model.{name}").removeprefix("model.")
        sums[of_one] = sums.get(of_one, 0) + array
        assert np.abs(array).max() > 0, name
    assert len(found) == 2 * len(one_device[1])
    assert_equal_but_rounding((values, sums), one_device, TOLERANCE, FLOOR)


@SLOW
@pytest.mark.parametrize("parallel", LAYOUTS)
def test_two_encoders_on_a_layout_equal_one_device(two_encoders_on_one_device, parallel):
    found = gradients(parallel, separate=True)
    assert_equal_but_rounding(found, two_encoders_on_one_device, TOLERANCE, FLOOR)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [False, True])
def test_each_encoder_alone_computes_its_vectors(two_encoders_on_one_device, queries):
    *_, model, batch = two_encoders_on_one_device
    config = tiny(MODEL | SEPARATE, fsdp=1)
    mesh = jax.tree.leaves(model)[0].sharding.mesh
    trained = Trained(model, config, None, 0, mesh)  # type: ignore[arg-type]
    rows = jax.tree.map(lambda array: jnp.asarray(np.asarray(array[0])), batch)
    ctx = context(dataclasses.replace(rows, microbatch_weight=1.0), None)
    host = on_host(model)
    h_BLW = host.outputs(host.stack(host.embed(rows, ctx), ctx)[0], ctx)
    wanted_B2W = vectors_of_rows(h_BLW, rows, ctx, 2)
    tokens, segments = (rows.tokens, rows.segment_ids == 2)
    if queries:
        tokens, segments = rows.extra["encoder_tokens"], rows.extra["encoder_segment_ids"]
    part = slice(0, 12)  # a query, or the first text of a row
    arrays = tokens[:, part], jnp.int32(segments[:, part]), jnp.zeros(len(tokens), jnp.int32)
    alone = one_encoder(trained, queries)
    assert alone.config.model.num_layers == 4
    found_BW = jax.jit(vectors)(alone.model, *arrays)
    np.testing.assert_allclose(found_BW, wanted_B2W[:, 1 - queries], rtol=1e-5, atol=1e-6)


def test_the_loss_is_cross_entropy_over_all_texts_of_a_microbatch(one_device):
    *found, model, batch = one_device
    flags = np.stack([batch.extra[f"{HAS_TEXT}{n}"] for n in range(1 + NEGATIVES)], axis=-1)
    assert 0 < flags.sum() < flags.size and flags[..., 0].all()
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segment_ids)
    # Each text in a row of its own, the query first.
    of_text_MRKL = segments[:, :, None] == np.arange(1, 3 + NEGATIVES)[:, None]
    sizes_MRK1 = of_text_MRKL.sum(-1, keepdims=True)
    first_MRK1 = of_text_MRKL.argmax(-1)[..., None]
    real_MRKL = np.arange(12) < sizes_MRK1
    places_MRKL = np.where(real_MRKL, first_MRK1 + np.arange(12), 0)
    ids_MRKL = np.where(real_MRKL, np.take_along_axis(tokens[:, :, None], places_MRKL, -1), 0)
    ids, real = (array.reshape(-1, 12) for array in (ids_MRKL, real_MRKL))

    def loss(model):
        ctx = Context(jnp.broadcast_to(jnp.arange(12), ids.shape), jnp.int32(real))
        x, _, _ = model.stack(model.embed_tokens(jnp.asarray(ids), ctx), ctx)
        found_BD = model.classifier.read(model.bert.pooled(x["target"][:, :1]), ctx)[:, 0]
        losses, ranks, rows = [], [], BATCH // MICROBATCHES
        for m, texts in enumerate(found_BD.reshape(*ids_MRKL.shape[:3], -1)):
            there = jnp.asarray(flags[m].reshape(-1).nonzero()[0])
            own = jnp.searchsorted(there, jnp.arange(rows) * (1 + NEGATIVES))
            kept = texts[:, 1:].reshape(-1, texts.shape[-1])[there]
            scores = texts[:, 0] @ kept.T / np.sqrt(32)
            own_scores = scores[np.arange(rows), own]
            losses.append(jax.nn.logsumexp(scores, axis=1) - own_scores)
            ranks.append((scores > own_scores[:, None]).sum(1))
        places = jnp.concatenate(ranks)
        return jnp.concatenate(losses).mean(), ((places < 1).mean(), (places < 5).mean())

    (value, tops), wanted = jax.jit(jax.value_and_grad(loss, has_aux=True))(on_host(model))
    values = dict(zip(("loss", "accuracy", "accuracy_5"), (value, *tops), strict=True))
    assert_equal_but_rounding(found, (values, named_gradients(wanted)), TOLERANCE, FLOOR)
