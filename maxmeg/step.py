"""The pure steps: loss, gradients in the local view, one reduction, the update in the global view.

Gradients are computed inside one shard_map, each device differentiating its own share of the loss.
They accumulate in float32, unreduced, over all microbatches and are then reduced once.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxmeg.config.lazy import Lazy
from maxmeg.config.schema import Config, LossReduction, TrainConfig
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.optim.build import clip
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import BATCH_AXES, batch_shards
from maxmeg.parallel.parts import frozen, joined, trained
from maxmeg.parallel.placement import batch_spec
from maxmeg.parallel.rules import reductions
from maxmeg.parallel.spmd import spmd
from maxmeg.pipeline.executor import Program, run_pipeline
from maxmeg.pipeline.schedule import SCHEDULES, forward_only
from maxmeg.state import TrainState, shardings_of

mtp = Lazy("maxmeg.models.mtp")
experts = Lazy("maxmeg.layers.balance")
loads = Lazy("maxmeg.optim.balance")
Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


def context(batch: Batch, raw_key: jax.Array | None, layer=0) -> Context:
    key = None if raw_key is None else jax.random.wrap_key_data(raw_key)
    segments_BL = batch.get("segment_ids")
    places = {"rows_B": batch["rows"], "dropout_key": key, "layer": layer}
    return Context(batch["positions"], segments_BL, **places, share=batch["share"])


def head_loss(model: LM, h_BLD: jax.Array, batch: Batch, train: TrainConfig, raw_key=None):
    """(this device's share of the weighted loss, sums over its tokens) of normalized outputs.

    That of further tokens is in it where the batch says what divides it.
    """
    mask_BL = batch["loss_mask"]
    weighted = {**batch, "weights": mask_BL / batch["divisor"]}
    loss, losses_BL = model.token_losses(h_BLD, weighted, train)
    sums = {"loss_sum": jnp.sum(losses_BL * mask_BL), "tokens": jnp.sum(mask_BL)}
    if "mtp_divisors" in batch:
        more, of_depths = mtp.mtp_loss(model, h_BLD, batch, train, context(batch, raw_key))
        return loss + more, sums | of_depths
    return loss, sums


def loss_fn(
    model: LM, batch: Batch, train: TrainConfig, raw_key: jax.Array | None = None
) -> tuple[jax.Array, Metrics]:
    """This device's share of the weighted loss, and sums over its tokens.

    batch: tokens, targets, positions, loss_mask [B, L], rows [B], divisor and share [], and
    segment_ids [B, L] where documents are kept apart. raw_key None: no dropout.
    """
    h_BLD, _, _ = model.hidden(batch["tokens"], context(batch, raw_key))
    return head_loss(model, h_BLD, batch, train, raw_key)


def complete(batch: Batch, reduction: LossReduction, shards: int, depths: int = 0) -> Batch:
    """The batch [M, B, ...] with the rows' numbers in the global batch, what divides its mask (and
    those of further tokens), and its share in means over microbatches.

    Losses and gradients then need only be summed. token_mean: a token weighs 1 / (tokens of the
    global batch); megatron: the mean over microbatches and ranks of each one's own token mean.
    """
    mask_MBL = batch["loss_mask"]
    M, B, _ = mask_MBL.shape
    first = collectives.axis_index(BATCH_AXES) * B
    rows_MB = jnp.arange(M)[:, None] * B * shards + first + jnp.arange(B)[None]

    def divisors(mask_MBL: jax.Array) -> jax.Array:
        if reduction is LossReduction.token_mean:
            total = collectives.sum_over(jnp.sum(mask_MBL), BATCH_AXES)
            return jnp.full(M, jnp.maximum(total, 1))
        return jnp.maximum(jnp.sum(mask_MBL, axis=(1, 2)), 1) * (M * shards)

    whole = {**batch, "rows": rows_MB, "divisor": divisors(mask_MBL), "share": jnp.full(M, 1 / M)}
    if depths:
        masks = [mtp.shifted(batch, i + 1)["loss_mask"] for i in range(depths)]
        whole["mtp_divisors"] = jnp.stack([divisors(mask) for mask in masks], axis=1)
    return whole


def compute_model(model: LM, places, dtype) -> LM:
    """Masters cast once to the compute dtype and, under ZeRO-1, gathered once over data."""

    def one(master, place):
        value = experts.with_room(master) if place.exact else master.astype(dtype)
        if place.scatter_dim is None:
            return value
        return collectives.gather(value, ("data",), place.scatter_dim)

    return jax.tree.map(one, model, places)


def reduce_gradients(gradients: LM, places) -> LM:
    """Each gradient summed over the devices that hold its parameter: one collective a set of axes.

    Under ZeRO-1 each device keeps its part along data.
    """
    leaves, tree = jax.tree.flatten(gradients)
    flat = jax.tree.leaves(places)
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for i, place in enumerate(flat):
        if place.scatter_dim is not None:
            leaves[i] = collectives.scatter(leaves[i], ("data",), place.scatter_dim)
        by_axes.setdefault(collectives.present(place.sum_axes), []).append(i)
    for axes, members in by_axes.items():
        sums = collectives.sum_over([leaves[i] for i in members], axes)
        for i, total in zip(members, sums, strict=True):
            leaves[i] = total
    return jax.tree.unflatten(tree, leaves)


def local_gradients(model: LM, batch: Batch, raw_key: jax.Array | None, config: Config):
    """(float32 gradients of the trained part summed over the microbatches, metrics); nothing
    reduced."""
    if config.parallel.pipe > 1:
        schedule = SCHEDULES[config.parallel.schedule.value]
        return pipelined(model, batch, raw_key, config, schedule)

    fixed = frozen(model)

    def one(microbatch: Batch):
        def loss(own: LM):
            return loss_fn(joined(own, fixed), microbatch, config.train, raw_key)

        (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(trained(model))
        return jax.tree.map(lambda g: g.astype(jnp.float32), gradients), metrics

    if batch["tokens"].shape[0] == 1:
        return one({name: array[0] for name, array in batch.items()})
    return summed(one, batch)


def local_sums(model: LM, batch: Batch, config: Config) -> Metrics:
    """Sums of losses and tokens over the microbatches, without dropout."""
    if config.parallel.pipe > 1:
        return pipelined(model, batch, None, config, forward_only)[1]
    return summed(lambda microbatch: loss_fn(model, microbatch, config.train)[1], batch)


def summed(function: Callable, batch: Batch):
    """The sum of `function` over the microbatches, one after the other."""

    def accumulate(total, microbatch):
        return jax.tree.map(jnp.add, total, function(microbatch)), None

    shapes = jax.eval_shape(function, {name: array[0] for name, array in batch.items()})
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return lax.scan(accumulate, zeros, batch)[0]


def pipelined(
    model: LM, batch: Batch, raw_key, config: Config, schedule: Callable
) -> tuple[typing.Any, Metrics]:
    """local_gradients on the stages of a pipeline, in the order of a schedule.

    The gradients are None where the schedule has forwards alone.
    """
    outer, stack = partition(trained(model))
    fixed_outer, fixed_stack = partition(frozen(model))
    units = model.stack

    def embed(outer: LM, microbatch: Batch):
        whole = joined(outer, fixed_outer)
        return whole.embed(microbatch["tokens"], context(microbatch, raw_key))

    def unit(params, x_BLD, given):
        microbatch, layer, fixed = given
        whole = joined(params, fixed)
        return units.run_unit(whole, x_BLD, context(microbatch, raw_key), layer)[0]

    def head(outer: LM, x_BLD, microbatch: Batch):
        whole = joined(outer, fixed_outer)
        h_BLD = whole.normalized(x_BLD, context(microbatch, raw_key))
        return head_loss(whole, h_BLD, microbatch, config.train, raw_key)

    groups = tuple(stack.stack.groups), tuple(fixed_stack.stack.groups)
    program = Program(outer, *groups, batch, embed, unit, head)
    parallel = config.parallel
    table = schedule(batch["tokens"].shape[0], parallel.pipe, parallel.chunks)
    (outer_sums, group_sums), sums = run_pipeline(program, table, units.layout)
    if outer_sums is None:
        return None, sums
    stack = jax.tree.unflatten(jax.tree.structure(stack), jax.tree.leaves(group_sums))
    return joined(outer_sums, stack), sums


def partition(model: LM) -> tuple[LM, LM]:
    """(the model without its stack, its stack alone), None in place of the other's arrays."""

    def keep(inside: bool):
        def one(path, array):
            return array if (path[0].name == "stack") == inside else None

        return jax.tree_util.tree_map_with_path(one, model)

    return keep(False), keep(True)


def make_gradients(config: Config, mesh: Mesh, model: LM) -> Callable:
    """(model, batch, key) -> (gradients of the global loss, metrics) on global arrays, those of
    the model's trained part.

    `model` is abstract with shardings. Batch arrays are [microbatch, sample, length].
    """
    places = reductions(model, mesh, config.parallel.zero1)
    specs = jax.tree.map(lambda a: a.sharding.spec, model)
    dtype = jnp.dtype(config.model.dtype.value)
    dropout = max(
        config.model.dropout_hidden,
        config.model.dropout_attention,
        config.model.dropout_embedding,
        config.lora.dropout,
        config.model.router_jitter,
        config.model.router_sinkhorn,
    )

    def local(model, batch, raw_key):
        depths = config.model.mtp_depths
        batch = complete(batch, config.train.loss_reduction, batch_shards(mesh), depths)
        gradients, sums = local_gradients(
            compute_model(model, places, dtype), batch, raw_key if dropout else None, config
        )
        return reduce_gradients(gradients, trained(places)), collectives.sum_over(sums, BATCH_AXES)

    def gradients(model, batch, raw_key):
        batch_specs = {name: batch_spec(array.ndim) for name, array in batch.items()}
        run = spmd(local, mesh, (specs, batch_specs, P()), (trained(specs), P()))
        return run(model, batch, raw_key)

    return gradients


def make_train_step(config: Config, mesh: Mesh, optimizer, abstract: TrainState) -> Callable:
    """The jitted (state, batch, controls) -> (state, metrics); the old state is consumed.

    controls: learning_rate and weight_decay of this step, and stop, one flag a device. metrics:
    loss (token mean), grad_norm, tokens, stop: how many flags are set, the losses of further
    tokens, and expert_loads: of every layer with experts how many tokens each got, and tallies
    (layers/balance.py).
    """
    gradients_of = make_gradients(config, mesh, abstract.model)
    counting = config.model.num_experts > 0 and not config.lora.rank

    def train_step(state: TrainState, batch: Batch, controls: dict[str, jax.Array]):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        gradients, sums = gradients_of(state.model, batch, jax.random.key_data(key))
        counts, gradients = loads.counted(gradients) if counting else (None, gradients)
        gradients, norm = clip(gradients, config.optim.clip_norm)
        rates = {name: controls[name] for name in ("learning_rate", "weight_decay")}
        own = trained(state.model)
        updates, opt_state = optimizer.update(gradients, state.optimizer, own, **rates)
        if counting:
            updates = loads.balanced(updates, counts, own, config.model)
        model = joined(jax.tree.map(jnp.add, own, updates), frozen(state.model))
        metrics = {
            "loss": sums["loss_sum"] / jnp.maximum(sums["tokens"], 1),
            "grad_norm": norm,
            "tokens": sums["tokens"],
            "stop": jnp.sum(controls["stop"]),
        }
        if "mtp_loss_sum" in sums:
            metrics |= mtp.mtp_metrics(sums)
        if counting:
            layout = state.model.stack.layout
            metrics["expert_loads"] = loads.layer_loads(counts, config.model, layout)
        return TrainState(state.step + 1, model, opt_state, state.key), metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings_of(abstract), None))


def make_eval_step(config: Config, mesh: Mesh, model: LM) -> Callable:
    """The jitted (model, batch) -> sums of losses and tokens, without dropout.

    Batch arrays are [microbatch, sample, length].
    """
    places = reductions(model, mesh, config.parallel.zero1)
    specs = jax.tree.map(lambda a: a.sharding.spec, model)
    dtype = jnp.dtype(config.model.dtype.value)

    def local(model, batch):
        batch = complete(batch, config.train.loss_reduction, batch_shards(mesh))
        sums = local_sums(compute_model(model, places, dtype), batch, config)
        return collectives.sum_over(sums, BATCH_AXES)

    def eval_step(model, batch):
        batch_specs = {name: batch_spec(array.ndim) for name, array in batch.items()}
        return spmd(local, mesh, (specs, batch_specs), P())(model, batch)

    return jax.jit(eval_step)
