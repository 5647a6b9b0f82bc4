"""Further tokens: a loop over depths on shortened rows gives the same. (On meshes and schedules:
test_moe_training.py and test_pipelined_runs.py.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import LENGTH, VOCAB, mesh_of, tiny

from maxmeg.checkpoint.names import to_arrays
from maxmeg.config.mixers import RouterScore
from maxmeg.config.model import NormPlace, Position
from maxmeg.config.schema import Config, LossReduction, TrainConfig
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.models.mixers import pattern
from maxmeg.objectives.language_modelling import LANGUAGE_MODELLING, shifted
from maxmeg.objectives.microbatch import with_divisors
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.trainable import trained
from maxmeg.pipeline.schedule import one_f_one_b
from maxmeg.step import local_gradients

TOLERANCE = 1e-5  # relative, float32: the order of sums differs
FLOOR = 1e-8  # for gradients that are zero in exact arithmetic
DEPTHS, FACTOR = 2, 0.3
MODEL = {  # everything that embeds, ends or repeats in its own way
    "num_layers": 1,
    "layers": "*(local,moe)",
    "moe.num_experts": 4,
    "moe.ffn_size": 16,
    "moe.score": RouterScore.sigmoid,
    "moe.bias_balancing": True,
    "attention.window": 5,
    "position": Position.learned,
    "max_position": LENGTH,
    "norm_place": NormPlace.sandwich,
    "embedding_scale": 3.0,
    "logit_softcap": 4.0,
    "tied": True,
    "mtp.num_layers": DEPTHS,
    "mtp.loss_weight": FACTOR,
}


def drawn(rows: int) -> tuple[LM, Batch]:
    """(model of random arrays, norms too, a batch of rows of three documents)."""
    config = tiny(MODEL).model
    shapes = jax.eval_shape(lambda key: LM(key, config), jax.random.key(0))
    rng = np.random.default_rng(0)
    model = jax.tree.map(lambda a: jnp.asarray(0.3 * rng.normal(size=a.shape), a.dtype), shapes)
    batch = {name: rng.integers(0, VOCAB, (rows, LENGTH)) for name in ("tokens", "targets")}
    mask = (rng.random((rows, LENGTH)) < 0.7).astype(np.float32)
    positions = np.broadcast_to(np.arange(LENGTH), (rows, LENGTH))
    cuts = rng.integers(1, LENGTH, (rows, 2, 1))
    segments = 1 + (np.arange(LENGTH) >= cuts).sum(axis=1).astype(np.int32)
    batch |= {"segment_ids": segments, "positions": positions, "loss_mask": mask}
    return model, jax.tree.map(jnp.asarray, Batch.of(batch))


def plain_losses(model: LM, batch: Batch) -> list[tuple[jax.Array, jax.Array]]:
    """(sum of masked cross entropies, tokens) of every depth from 0, on rows that are shorter by
    what has no target."""

    def losses(x_BLD, depth: int):
        logits = model.logits(x_BLD)
        targets = batch.targets[:, depth:, None]
        each = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets, -1)[..., 0]
        same = segments[:, depth:] == segments[:, : LENGTH - depth]
        mask = batch.loss_mask[:, depth:] * same
        return (each * mask).sum(), mask.sum()

    segments, positions = batch.segment_ids, batch.positions
    ctx = Context(positions, segments)
    x_BLD = model.hidden(batch.tokens, ctx)[0]
    actual = [losses(x_BLD, 0)]
    for d, depth in enumerate(model.mtp.depths, 1):
        here = dataclasses.replace(
            ctx, positions_BL=positions[:, :-d], segments_BL=segments[:, :-d], layer=7
        )
        there = dataclasses.replace(ctx, positions_BL=positions[:, d:])
        e_BLD = depth.embedding_norm(model.embed_side(batch.tokens[:, d:], there))
        h_BLD = depth.hidden_norm(x_BLD[:, : LENGTH - d])
        weight = depth.projection.weight[...]
        x_BLD = e_BLD @ weight[: e_BLD.shape[-1]] + h_BLD @ weight[e_BLD.shape[-1] :]
        x_BLD = depth.final_norm(depth.layer({"target": x_BLD}, here)[0]["target"])
        actual.append(losses(x_BLD, d))
    return actual


def assert_same(actual, wanted) -> None:
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(wanted), strict=True
    ):
        error = np.abs(a - b).max()
        assert error <= TOLERANCE * np.abs(b).max() + FLOOR, jax.tree_util.keystr(path)


@pytest.mark.slow
def test_a_loop_over_depths_gives_the_same_loss_and_gradients():
    """Those of the shared embedding and output weights from all their uses."""
    model, batch = drawn(2)
    masks = [mask[None] for mask in LANGUAGE_MODELLING.masks(model, batch)]
    batched = jax.tree.map(lambda array: array[None], batch)
    whole = with_divisors(batched, LossReduction.token_mean, 1, masks)
    config = Config(train=TrainConfig(loss_chunk=8))

    def plain(model):
        (main, tokens), *later = plain_losses(model, batch)
        means = [total / count for total, count in later]
        return main / tokens + FACTOR * sum(means) / DEPTHS, (main, tokens, later)

    gradients, sums = jax.jit(
        lambda model: local_gradients(model, whole, None, config, LANGUAGE_MODELLING, one_f_one_b)
    )(model)
    expected, (main, tokens, later) = jax.jit(jax.grad(plain, has_aux=True))(model)
    assert_same([sums["loss_sum"], sums["tokens"]], [main, tokens])
    assert_same(
        [sums["mtp_loss_sum"], sums["mtp_tokens"]], list(map(jnp.stack, zip(*later, strict=True)))
    )
    actual, expected = to_arrays(gradients), to_arrays(trained(expected))
    assert_same(actual, expected)


def test_batches_are_shifted_for_each_mtp_layer():
    batch = Batch(
        tokens=jnp.array([[1, 2, 3, 4, 5, 6]]),
        positions=jnp.array([[0, 1, 2, 0, 1, 2]]),
        targets=jnp.array([[2, 3, 9, 5, 6, 8]]),
        loss_mask=jnp.array([[1.0, 0, 1, 1, 1, 1]]),
    )
    later = shifted(batch, 2)
    assert later.tokens.tolist() == [[3, 4, 5, 6, 0, 0]]
    assert later.targets.tolist() == [[9, 5, 6, 8, 0, 0]]
    assert later.loss_mask.tolist() == [[1, 1, 1, 1, 0, 0]]
    later = shifted(dataclasses.replace(batch, segment_ids=jnp.array([[1, 1, 1, 2, 2, 2]])), 1)
    assert later.tokens.tolist() == [[2, 3, 0, 5, 6, 0]]
    assert later.positions.tolist() == [[1, 2, 0, 1, 2, 0]]
    assert later.loss_mask.tolist() == [[0, 1, 0, 1, 1, 0]]


@pytest.mark.parametrize("reduction", LossReduction)
def test_each_depth_is_divided_by_its_own_tokens(reduction):
    mask = (np.random.default_rng(0).random((2, 3, LENGTH)) < 0.6).astype(np.float32)
    zeros = jnp.zeros(mask.shape, jnp.int32)
    batch = Batch(zeros, zeros, zeros, jnp.asarray(mask))
    model = jax.eval_shape(lambda key: LM(key, tiny(MODEL).model), jax.random.key(0))
    actual = with_divisors(batch, reduction, 1, LANGUAGE_MODELLING.masks(model, batch))
    for depth in range(DEPTHS):
        each = mask[:, :, depth + 1 :].sum(axis=(1, 2))
        wanted = [each.sum()] * 2 if reduction is LossReduction.token_mean else 2 * each
        np.testing.assert_array_equal(actual.divisors[:, depth + 1], wanted)
    assert actual.divisors.shape == (2, 1 + DEPTHS)


EXPERTS = {"moe.num_experts": 4}
KINDS = {  # of the last layer
    "experts": EXPERTS | {"num_layers": 4, "layers": "2(attention,mlp) *(attention,moe)"},
    "window": {"num_layers": 3, "layers": "*(local,mlp attention,mlp)", "attention.window": 5},
    "parallel": {"num_layers": 2, "layers": "*(attention+mlp)", "attention.num_heads": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_depth_has_a_layer_of_the_last_kind(kind):
    model = tiny({**KINDS[kind], "mtp.num_layers": 1}).model
    (depth,) = jax.eval_shape(lambda key: LM(key, model), jax.random.key(0)).mtp.depths
    last = pattern(tiny(KINDS[kind]).model)[-1][0]
    own = tuple(sublayer.spec for sublayer in depth.layer.sublayers)
    assert own == last[-len(own) :] and len(own) == 2 - (kind == "parallel")


@pytest.mark.parametrize(
    ("model", "lora", "message"),
    [
        ({"mtp.num_layers": -1}, 0, "model.mtp.num_layers=-1 must be at least 0"),
        ({"mtp.num_layers": LENGTH}, 0, f"mtp.num_layers={LENGTH} leaves no target in rows"),
        ({"mtp.num_layers": 0}, 0, "mtp.loss_weight=0.3 has no effect without model.mtp.num"),
        ({"mtp.loss_weight": 0.0}, 0, "mtp.loss_weight=0.0 must be above 0"),
        ({}, 2, "lora.rank=2 cannot train MTP layers .*set it to 0"),
    ],
)
def test_invalid_arguments_are_refused(model, lora, message):
    config = tiny({**MODEL, **model}, fsdp=1)
    config.lora.rank = lora
    with pytest.raises(ValueError, match=message):
        mesh_of(config)
