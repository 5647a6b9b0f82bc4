"""The evaluation step, and the copy of the weights that it reads."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxmeg.config.schema import Config
from maxmeg.layers import auxiliary
from maxmeg.objectives.microbatch import with_divisors
from maxmeg.objectives.objective import Model, Objective
from maxmeg.objectives.table import OBJECTIVES
from maxmeg.ops.recipes import recipe_of
from maxmeg.parallel.batch import batch_spec
from maxmeg.parallel.mesh import TOKEN_AXES, batch_shards
from maxmeg.parallel.rules import reductions, storage_specs
from maxmeg.parallel.spmd import spmd
from maxmeg.parallel.trainable import joined
from maxmeg.pipeline.schedule import forward_only
from maxmeg.runtime.gpu_environment import compiler_options
from maxmeg.step import local_gradients
from maxmeg.weights.quantized import Quantize
from maxmeg.weights.transforms import enter, whole_weights


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
    transforms = whole_weights(arrays(places, True), dtype)
    local = functools.partial(enter, transforms)
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
    places = reductions(model, mesh, zero1=False)
    specs = storage_specs(model, mesh, zero1=False)
    dtype, recipe = jnp.dtype(config.model.dtype.value), recipe_of(config.train.quantization)

    def local(model, batch):
        reduction = config.train.loss_reduction
        batch = with_divisors(batch, reduction, batch_shards(mesh), [batch.loss_mask])
        weights = enter([*whole_weights(places, dtype), Quantize(recipe, batch)], model)
        _, sums = local_gradients(weights, batch, None, config, objective, forward_only)
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
