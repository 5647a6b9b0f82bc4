"""The pure steps: loss, gradients in the local view, one reduction, the update in the global view.

Gradients are computed inside one shard_map, each device differentiating its own share of the loss.
They accumulate in float32, unreduced, over all microbatches and are then reduced once.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxmeg.config.recompute import offloaded_alone
from maxmeg.config.schema import Config, LossReduction
from maxmeg.layers import auxiliary
from maxmeg.layers.context import Context, Source
from maxmeg.models.stack import first_sublayer
from maxmeg.objectives.objective import Metrics, Model, Objective
from maxmeg.objectives.table import OBJECTIVES
from maxmeg.ops.recipes import recipe_of
from maxmeg.optim.build import clip
from maxmeg.optim.scaling import next_scaler, unscaled
from maxmeg.optim.update import Parts, on_device, update
from maxmeg.parallel import collectives
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.mesh import BATCH_AXES, CONTEXT_AXES, TOKEN_AXES, batch_shards
from maxmeg.parallel.placement import batch_spec
from maxmeg.parallel.rules import Reduction, reductions, storage_specs
from maxmeg.parallel.spmd import spmd
from maxmeg.parallel.trainable import fixed, frozen, joined, saved, trained
from maxmeg.pipeline.executor import run_pipeline
from maxmeg.pipeline.last_stage import from_last_stage
from maxmeg.pipeline.program import Program
from maxmeg.pipeline.schedule import SCHEDULES, forward_only, one_f_one_b
from maxmeg.processes.host import result_sharding
from maxmeg.runtime.gpu_environment import compiler_options
from maxmeg.state import TrainState, shardings_of
from maxmeg.weights.fused import fuse, separate
from maxmeg.weights.quantized import with_codes, without_codes


def context(batch: Batch, raw_key: jax.Array | None, layer=0) -> Context:
    """What the layers know about a microbatch. raw_key: of the step's randomness in training, None
    in evaluation."""
    tokens_BS, source = batch.extra.get("encoder_tokens"), None
    if tokens_BS is not None:
        source = Source.of(tokens_BS, batch.extra["encoder_segment_ids"])
    return Context(
        batch.positions,
        batch.segment_ids,
        token_types_BL=batch.extra.get("token_types"),
        rows_B=batch.rows,
        dropout_key=None if raw_key is None else jax.random.wrap_key_data(raw_key),
        layer=layer,
        microbatch_weight=batch.microbatch_weight,
        training=raw_key is not None,
        chunks_BC=batch.chunks,
        source=source,
    )


def complete(
    batch: Batch,
    reduction: LossReduction,
    shards: int,
    masks: Sequence[jax.Array],
    scale: jax.Array | float = 1.0,
) -> Batch:
    """The batch [M, B, ...] with the rows' numbers in the global batch, the divisor of the loss of
    each of `masks` [M, B, L], and the weight of each microbatch in means over them.

    Losses and gradients then need only be summed. token_mean: a token weighs 1 / (tokens of the
    global batch); megatron: the mean over microbatches and ranks of each one's own token mean.
    scale: factor of all losses.
    """
    M, B, _ = batch.tokens.shape
    first = collectives.first_index(BATCH_AXES, B)
    rows_MB = jnp.arange(M)[:, None] * B * shards + first + jnp.arange(B)[None]

    def divisors(mask_MBL: jax.Array) -> jax.Array:
        if reduction is LossReduction.token_mean:
            total = collectives.sum_over(jnp.sum(mask_MBL), TOKEN_AXES)
            return jnp.full(M, jnp.maximum(total, 1))
        totals_M = collectives.sum_over(jnp.sum(mask_MBL, axis=(1, 2)), CONTEXT_AXES)
        return jnp.maximum(totals_M, 1) * (M * shards)

    return dataclasses.replace(
        batch,
        rows=rows_MB,
        divisors=jnp.stack([divisors(mask_MBL) for mask_MBL in masks], axis=1) / scale,
        microbatch_weight=jnp.full(M, scale / M),
    )


@jax.named_scope("compute_weights")
def compute_model(model: typing.Any, gradient_reductions, dtype) -> typing.Any:
    """The parameters that compute: masters cast once to the compute dtype, cut to the device's
    key/value head where those are fewer than tensor, and gathered where a Reduction has a cut."""

    def one(master, place):
        value = master if place.exact else master.astype(dtype)
        if place.kv_slice is not None:
            head = place.kv_slice
            value = collectives.local_kv_head(value, head.dim, head.num_heads)
        if place.cut is None:
            return value
        return collectives.gather(value, place.cut.axes, place.cut.dim)

    return jax.tree.map(one, model, gradient_reductions)


@jax.named_scope("reduce_gradients")
def reduce_gradients(gradients: Model, gradient_reductions) -> Model:
    """Sum each gradient over the devices that hold its parameter: one collective per set of axes.

    Where a Reduction has a cut, each device keeps the part of its master. The sums are float32,
    rounded to `parallel.gradient_dtype` in every collective.
    """
    leaves, tree = jax.tree.flatten(gradients)
    flat = jax.tree.leaves(gradient_reductions)
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for i, place in enumerate(flat):
        if place.cut is not None or collectives.present(place.sum_axes):
            leaves[i] = leaves[i].astype(place.dtype)
        if place.cut is not None:
            leaves[i] = collectives.scatter(leaves[i], place.cut.axes, place.cut.dim)
        if place.kv_slice is not None:
            head = place.kv_slice
            leaves[i] = collectives.at_kv_head(leaves[i], head.dim, head.num_heads)
        by_axes.setdefault(collectives.present(place.sum_axes), []).append(i)
    for axes, members in by_axes.items():
        sums = collectives.sum_over([leaves[i] for i in members], axes)
        for i, total in zip(members, sums, strict=True):
            leaves[i] = total.astype(jnp.float32)
    return jax.tree.unflatten(tree, leaves)


def local_gradients(
    model: Model,
    batch: Batch,
    raw_key: jax.Array,
    config: Config,
    objective: Objective,
    gradient_reductions=None,
):
    """(float32 gradients of the trained part, sums and auxiliary values), both combined over the
    microbatches. The stack's parameters are given as ZeRO-1 cuts them (gradient_reductions None:
    not at all); their gradients are reduced over the axes of these cuts, and all over fsdp."""
    schedule = (
        SCHEDULES[config.parallel.schedule.value] if config.parallel.pipe > 1 else one_f_one_b
    )
    gradients, sums = through_stages(
        model, batch, raw_key, config, objective, schedule, gradient_reductions
    )
    return jax.tree.map(lambda g: g.astype(jnp.float32), gradients), sums


def local_sums(model: Model, batch: Batch, config: Config, objective: Objective) -> Metrics:
    """Sums of losses and tokens over the microbatches, without dropout."""
    return through_stages(model, batch, None, config, objective, forward_only)[1]


def through_stages(
    model: Model,
    batch: Batch,
    raw_key,
    config: Config,
    objective: Objective,
    schedule: Callable,
    gradient_reductions=None,
) -> tuple[typing.Any, Metrics]:
    """local_gradients on the stages of a pipeline, one without `parallel.pipe`, in the order of a
    schedule. Without a backward lane the gradients are None.
    """
    outer, stack = partition(trained(model))
    fixed_outer, fixed_stack = partition(fixed(model))
    units = model.stack

    def embed(outer: Model, microbatch: Batch):
        return joined(outer, fixed_outer).embed(microbatch, context(microbatch, raw_key))

    def shared(microbatch: Batch):
        return microbatch, units.with_rotations(context(microbatch, raw_key)).rotations

    def unit(params, x_BLD, given, prevent_cse: bool):
        (microbatch, rotations), layer, rest = given
        whole = collectives.whole(joined(params, rest))
        ctx = dataclasses.replace(context(microbatch, raw_key), rotations=rotations)
        x_BLD, aux = units.run_unit(whole, x_BLD, ctx, layer, prevent_cse=prevent_cse)
        return x_BLD, aux

    def later(outer: Model, microbatch: Batch):
        whole, ctx = joined(outer, fixed_outer), context(microbatch, raw_key)
        return objective.later(whole, microbatch, ctx)

    def output(outer: Model):
        return joined(outer, fixed_outer).output_weight()

    def head(outer: Model, output_VD, x_BLD, later: list, microbatch: Batch):
        whole, ctx = joined(outer, fixed_outer), context(microbatch, raw_key)
        whole.set_output_weight(output_VD)
        further, aux = objective.further(whole, x_BLD, later, microbatch, ctx)
        x_BLD, further = from_last_stage((x_BLD, further))
        h_BLD = whole.outputs(x_BLD, ctx)
        loss, sums = objective.loss(whole, h_BLD, microbatch, config.train, ctx, *further)
        return loss, sums | aux

    if gradient_reductions is None:
        gradient_reductions = jax.tree.map(lambda _: Reduction(None, ()), model)
    parts = stack, fixed_stack, partition(trained(gradient_reductions))[1]
    groups = [tuple(part.stack.groups) for part in parts]
    program = Program(
        outer,
        *groups,
        batches=dataclasses.replace(batch, max_targets=config.data.max_targets),
        embed=embed,
        shared=shared,
        unit=unit,
        output=output,
        head=head,
        later=later,
        unroll=units.unroll,
        offloaded=offloaded_alone(config.model.recompute),
        divide=first_sublayer,
    )
    parallel = config.parallel
    table = schedule(batch.tokens.shape[0], parallel.pipe, parallel.chunks)
    (outer_sums, group_sums), sums, aux = run_pipeline(program, table, units.layout)
    if schedule is forward_only:
        return None, sums
    stack = jax.tree.unflatten(jax.tree.structure(stack), jax.tree.leaves(group_sums))
    return joined(outer_sums, stack), sums | {"stack_aux": aux}


def partition(model: Model) -> tuple[Model, Model]:
    """(the model without its stack, its stack alone), None in place of the other's arrays."""

    def keep(inside: bool):
        def one(path, array):
            return array if (path[0].name == "stack") == inside else None

        return jax.tree_util.tree_map_with_path(one, model)

    return keep(False), keep(True)


def without_cuts_of_stack(gradient_reductions):
    """The Reductions of a model, without the cuts that the executor gathers and scatters."""
    outer, stack = partition(gradient_reductions)
    return joined(outer, jax.tree.map(lambda r: dataclasses.replace(r, cut=None), stack))


def make_gradients(
    config: Config, mesh: Mesh, model: Model, objective: Objective | None = None
) -> Callable:
    """(model, batch, key, scale) -> (gradients of the global loss times scale for the trained part,
    sums), both as global arrays. sums["stack_aux"] holds the auxiliary values of the layers in
    model order. scale: None is 1.

    `model` is abstract with shardings. Batch arrays are [microbatch, sample, length]. objective:
    None means the one that data.objective names.
    """
    objective = objective or OBJECTIVES[config.data.objective]
    gradient_reductions = reductions(model, mesh, config.parallel.zero1)
    outside_stages = without_cuts_of_stack(gradient_reductions)
    cuts_layers = any(place.cut for place in jax.tree.leaves(partition(gradient_reductions)[1]))
    specs = jax.tree.map(lambda a: a.sharding.spec, model)
    dtype, recipe = jnp.dtype(config.model.dtype.value), recipe_of(config.train.quantization)

    def local(model, batch, raw_key, scale):
        masks, reduction = objective.masks(model, batch), config.train.loss_reduction
        scale = 1.0 if scale is None else scale
        batch = complete(batch, reduction, batch_shards(mesh), masks, scale)
        computing = compute_model(model, outside_stages, dtype)
        if cuts_layers:
            batch = collectives.after(batch, partition(computing)[0])
        computing, places = fuse(computing, gradient_reductions, mesh)
        computing, places = with_codes(computing, places, recipe, batch, raw_key)
        gradients, sums = local_gradients(computing, batch, raw_key, config, objective, places)
        gradients = separate(without_codes(gradients), trained(specs))
        # Each stage has the auxiliary values of its own layers; all else is the same on all stages.
        pipe = (collectives.PIPE_AXIS,)
        of_layers = {name: sums[name] for name in ("stack_aux", "mtp_aux") if name in sums}
        sums = auxiliary.counted_once(sums, pipe) | of_layers
        sums = auxiliary.over_devices(sums, (*pipe, *TOKEN_AXES))
        if cuts_layers:
            outer, stack = partition(gradients)
            gradients = joined(collectives.after(outer, stack), stack)
        return reduce_gradients(gradients, trained(outside_stages)), sums

    def gradients(model, batch, raw_key, scale=None):
        batch_specs = jax.tree.map(lambda array: batch_spec(array.ndim), batch)
        run = spmd(local, mesh, (specs, batch_specs, P(), P()), (trained(specs), P()))
        return run(model, batch, raw_key, scale)

    return gradients


def make_train_step(
    config: Config,
    mesh: Mesh,
    optimizer,
    abstract: TrainState,
    objective: Objective | None = None,
) -> Callable:
    """The jitted (state, batch, controls) -> (state, metrics); the old state is donated.

    Where the loss or the gradient norm is not finite the step is skipped: parameters, moments and
    the state of layers keep their bits; only the step number and the loss scale change.

    controls: learning_rate and weight_decay, scalars; stop, one flag per device. metrics: those of
    the objective (loss: the token mean), grad_norm (before clipping), tokens, skipped (0 or 1),
    stop (number of flags that are set), and layers: the auxiliary values by name, a row for each
    layer that reports them.
    """
    objective = objective or OBJECTIVES[config.data.objective]
    gradients_of = make_gradients(config, mesh, abstract.model, objective)
    dtype = jnp.dtype(config.model.dtype.value)

    def train_step(state: TrainState, batch: Batch, controls: dict[str, jax.Array]):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        raw_key, scaler = jax.random.key_data(key), state.scaler
        computing = on_device(state.model, dtype, mesh)
        gradients, sums = gradients_of(computing, batch, raw_key, scaler and scaler.scale)
        gradients, norm = clip(unscaled(gradients, scaler), config.optim.clip_norm)
        metrics = objective.metrics(sums)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
        rates = {name: controls[name] for name in ("learning_rate", "weight_decay")}
        old = Parts(saved(state.model), state.remainders, state.optimizer, state.ema)
        parts, aux = (optimizer, config.optim, gradients, old), state.model.aux_of(sums)
        with jax.named_scope("optimizer"):
            new = update(*parts, aux, finite, mesh, key=key, **rates)
        metrics |= {
            "grad_norm": norm,
            "tokens": sums["tokens"],
            "skipped": 1.0 - finite,
            "stop": jnp.sum(controls["stop"]),
            "layers": auxiliary.by_layer(sums),
            **({"loss_scale": scaler.scale} if scaler else {}),
        }
        samples = batch.tokens.shape[0] * batch.tokens.shape[1]
        scaler = scaler and next_scaler(scaler, finite, samples, config.optim.loss_scale)
        model = joined(new.model, frozen(state.model))
        rest = state.key, scaler, new.remainders, new.ema
        return TrainState(state.step + 1, model, new.moments, *rest), metrics

    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(jax.tree.map(result_sharding, shardings_of(abstract)), None),
        compiler_options=compiler_options(
            abstract.model,
            mesh,
            config.parallel.zero1,
            fp8=recipe_of(config.train.quantization) is not None,
        ),
    )


def make_compute_copy(config: Config, mesh: Mesh, model: Model) -> Callable:
    """The model -> the model that all batches of an evaluation read, made by one program.

    Weights are cast to the compute dtype and, under ZeRO-1, gathered; fsdp and tensor shard them as
    before. Arrays that are neither cast nor gathered are shared with the model. `model` is abstract
    with shardings.
    """
    zero1, dtype = config.parallel.zero1, jnp.dtype(config.model.dtype.value)
    # The eval step cuts key/value heads itself: their arrays then keep the shape of the model's.
    places = jax.tree.map(
        lambda place: dataclasses.replace(place, kv_slice=None), reductions(model, mesh, zero1)
    )
    is_copied = jax.tree.map(
        lambda place, a: place.cut is not None or not (place.exact or a.dtype == dtype),
        places,
        model,
    )

    def arrays(tree, copied: bool):
        return jax.tree.map(lambda leaf, is_it: leaf if is_it == copied else None, tree, is_copied)

    if not any(jax.tree.leaves(is_copied)):
        return lambda model: model
    local = functools.partial(compute_model, gradient_reductions=arrays(places, True), dtype=dtype)
    before = jax.tree.map(lambda a: a.sharding.spec, arrays(model, True))
    after = arrays(storage_specs(model, mesh, zero1=False), True)
    copy = jax.jit(spmd(local, mesh, (before,), after))
    return lambda model: joined(copy(arrays(model, True)), arrays(model, False))


def make_eval_step(
    config: Config,
    mesh: Mesh,
    model: Model,
    byte_lengths: np.ndarray | None = None,
    objective: Objective | None = None,
) -> Callable:
    """The jitted (model, batch, stop) -> sums of losses and tokens, without dropout.

    `model` is abstract with shardings; the step takes the model's `make_compute_copy`, or the model
    itself, which each call then casts. Batch arrays are [microbatch, sample, length]. byte_lengths:
    bytes of the text of each id; then the bytes of the targets are summed too. stop: None, or one
    flag per device, whose sum is returned too. objective: None means the one that data.objective
    names.
    """
    objective = objective or OBJECTIVES[config.data.objective]
    gradient_reductions = reductions(model, mesh, zero1=False)
    specs = storage_specs(model, mesh, zero1=False)
    dtype, recipe = jnp.dtype(config.model.dtype.value), recipe_of(config.train.quantization)

    def local(model, batch):
        reduction = config.train.loss_reduction
        batch = complete(batch, reduction, batch_shards(mesh), [batch.loss_mask])
        computing = compute_model(model, gradient_reductions, dtype)
        computing, _ = with_codes(computing, gradient_reductions, recipe, batch)
        sums = local_sums(computing, batch, config, objective)
        return auxiliary.over_devices(sums, TOKEN_AXES)

    def eval_step(model, batch, stop=None):
        batch_specs = jax.tree.map(lambda array: batch_spec(array.ndim), batch)
        sums = spmd(local, mesh, (specs, batch_specs), P())(model, batch)
        if byte_lengths is not None and config.data.objective.predicts_tokens:
            lengths = jnp.asarray(byte_lengths)[batch.targets]
            sums |= {"bytes": jnp.sum(lengths * batch.loss_mask)}
        return sums if stop is None else {**sums, "stop": jnp.sum(stop)}

    options = compiler_options(model, mesh, fp8=True) if recipe else {}
    return jax.jit(eval_step, compiler_options=options)
