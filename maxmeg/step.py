"""The pure steps: loss, gradients in the local view, one reduction, the update in the global view.

Gradients are computed inside one shard_map, each device differentiating its own share of the loss.
They accumulate in float32, unreduced, over all microbatches and are then reduced once.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxmeg.config.parallel import LaneOrder
from maxmeg.config.recompute import offloaded_alone
from maxmeg.config.schema import Config
from maxmeg.layers import auxiliary
from maxmeg.layers.balance import progress
from maxmeg.models.stack import first_sublayer
from maxmeg.objectives.microbatch import context, with_divisors
from maxmeg.objectives.objective import Metrics, Model, Objective
from maxmeg.objectives.table import OBJECTIVES
from maxmeg.ops.recipes import recipe_of
from maxmeg.optim.build import clip
from maxmeg.optim.scaling import next_scaler, unscaled
from maxmeg.optim.update import Parts, on_device, update
from maxmeg.parallel import collectives, ordering
from maxmeg.parallel.batch import Batch, batch_spec
from maxmeg.parallel.mesh import TENSOR_AXES, TOKEN_AXES, batch_shards
from maxmeg.parallel.spmd import spmd
from maxmeg.parallel.trainable import fixed, frozen, joined, partition, saved, trained
from maxmeg.pipeline.executor import run_pipeline
from maxmeg.pipeline.last_stage import from_last_stage
from maxmeg.pipeline.program import Program
from maxmeg.pipeline.schedule import SCHEDULES, forward_only, one_f_one_b
from maxmeg.processes.host import result_sharding
from maxmeg.runtime.gpu_environment import compiler_options
from maxmeg.state import TrainState, shardings_of
from maxmeg.weights.quantized import Quantize
from maxmeg.weights.transforms import enter, leave, training_transforms
from maxmeg.weights.zero1 import has_shards


def local_gradients(
    model: Model,
    batch: Batch,
    raw_key: jax.Array | None,
    config: Config,
    objective: Objective,
    schedule: Callable,
) -> tuple[typing.Any, Metrics]:
    """(gradients of the trained part, sums and auxiliary values), both combined over the
    microbatches, on the stages of a pipeline (one without `parallel.pipe`), in the order of a
    schedule. model: what computes, with ZeRO-1's shards in the stack. Without a backward lane the
    gradients are None. raw_key: None in evaluation."""
    outer, stack = partition(trained(model))
    fixed_outer, fixed_stack = partition(fixed(model))
    units = model.stack

    def embed(outer: Model, microbatch: Batch):
        return joined(outer, fixed_outer).embed(microbatch, context(microbatch, raw_key))

    def shared(microbatch: Batch):
        dtype = jnp.dtype(config.model.dtype.value)
        return microbatch, units.with_tables(context(microbatch, raw_key), dtype).tables

    def unit(params, x, constants, prevent_cse: bool):
        (microbatch, tables), layer, rest, after = constants
        unit_params = collectives.mark_gathered(joined(params, rest))
        ctx = context(microbatch, raw_key)
        after = after if config.parallel.experts_cross_nodes else None
        ctx = dataclasses.replace(ctx, tables=tables, experts_after=after)
        return units.run_unit(unit_params, x, ctx, layer, prevent_cse=prevent_cse)

    def head_inputs(outer: Model, microbatch: Batch):
        model, ctx = joined(outer, fixed_outer), context(microbatch, raw_key)
        return objective.head_inputs(model, microbatch, ctx)

    def output(outer: Model):
        return joined(outer, fixed_outer).output_weight()

    def head(outer: Model, output_VD, x, head_inputs: list, microbatch: Batch):
        model, ctx = joined(outer, fixed_outer), context(microbatch, raw_key)
        model.set_output_weight(output_VD)
        loss_inputs, aux = objective.loss_inputs(model, x, head_inputs, microbatch, ctx)
        x, loss_inputs = from_last_stage(({name: x[name] for name in model.reads}, loss_inputs))
        h_BLD = model.outputs(x, ctx)
        loss, sums = objective.loss(model, h_BLD, microbatch, config.train, ctx, *loss_inputs)
        return loss, sums | aux

    program = Program(
        outer,
        tuple(stack.stack.groups),
        tuple(fixed_stack.stack.groups),
        batches=dataclasses.replace(batch, max_targets=config.data.max_targets),
        embed=embed,
        shared=shared,
        unit=unit,
        output=output,
        head=head,
        head_inputs=head_inputs,
        unroll=units.unroll,
        offloaded=offloaded_alone(config.model.recompute),
        divide=first_sublayer,
        progress=progress,
    )
    parallel = config.parallel
    table = schedule(batch.tokens.shape[0], parallel.pipe, parallel.chunks)
    (outer_sums, group_sums), sums, aux = run_pipeline(program, table, units.layout)
    if schedule is forward_only:
        return None, sums
    stack = jax.tree.unflatten(jax.tree.structure(stack), jax.tree.leaves(group_sums))
    return joined(outer_sums, stack), sums | {"stack_aux": aux}


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
    dtype, recipe = jnp.dtype(config.model.dtype.value), recipe_of(config.train.quantization)
    stored = training_transforms(model, mesh, config.parallel.zero1, dtype, recipe)
    specs = jax.tree.map(lambda a: a.sharding.spec, model)
    pipelined, parallel = SCHEDULES[config.parallel.schedule.value], config.parallel
    together = parallel.lanes is LaneOrder.together
    schedule = functools.partial(pipelined if parallel.pipe > 1 else one_f_one_b, together=together)

    def local(model, batch, raw_key, scale):
        masks, reduction = objective.masks(model, batch), config.train.loss_reduction
        scale = 1.0 if scale is None else scale
        batch = with_divisors(batch, reduction, batch_shards(mesh), masks, scale)
        weights = enter(stored, model)
        if has_shards(weights):
            batch = ordering.after(batch, partition(weights)[0])
        transforms = [*stored, Quantize(recipe, batch, raw_key)]
        weights = enter(transforms[-1:], weights)
        gradients, sums = local_gradients(weights, batch, raw_key, config, objective, schedule)
        # Devices along pipe and tensor have their own share of the layers' auxiliary values; all
        # else is the same on them.
        same = (collectives.PIPE_AXIS, *TENSOR_AXES)
        of_layers = {name: sums[name] for name in ("stack_aux", "mtp_aux") if name in sums}
        sums = auxiliary.counted_once(sums, same) | of_layers
        sums = auxiliary.over_devices(sums, (*same, *TOKEN_AXES))
        return leave(transforms, gradients), sums

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
        aux = state.model.aux_of(sums)
        optimize = functools.partial(optimizer.update, key=key, **rates)
        with jax.named_scope("optimizer"):
            new = update(optimize, config.optim, gradients, old, aux, finite, mesh, state.step)
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

    is_fp8 = recipe_of(config.train.quantization) is not None
    two_lanes = config.parallel.lanes is LaneOrder.together
    zero1 = config.parallel.zero1
    options = compiler_options(abstract.model, mesh, zero1, is_fp8, two_lanes)
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(jax.tree.map(result_sharding, shardings_of(abstract)), None),
        compiler_options=options,
    )
