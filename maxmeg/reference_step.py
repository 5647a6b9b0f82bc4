"""What a training step computes, on one device: without meshes, pipelines, 8-bit codes, a loss
scale and skipped steps. maxmeg/step.py gives the same numbers (tests/test_reference_step.py)."""

import functools

import jax
import jax.numpy as jnp

from maxmeg.config.schema import Config
from maxmeg.objectives.microbatch import context, with_divisors
from maxmeg.objectives.table import OBJECTIVES
from maxmeg.optim.build import clip
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.maxima import combine, plain
from maxmeg.parallel.parameter import info, is_variable
from maxmeg.parallel.trainable import fixed, joined, trained
from maxmeg.state import TrainState


def reference_step(config: Config, optimizer, state: TrainState, batch: Batch, **rates):
    """(next state, metrics). Batch arrays are [microbatch, sample, length]. rates: learning_rate
    and weight_decay."""
    objective, dtype = OBJECTIVES[config.data.objective], config.model.dtype.value
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    masks = objective.masks(state.model, batch)
    batch = with_divisors(batch, config.train.loss_reduction, 1, masks)

    def cast(variable):
        exact = info(variable).is_exact or variable.get_value() is None
        return variable if exact else variable.replace(variable[...].astype(dtype))

    def loss_of(masters, microbatch: Batch):
        model = jax.tree.map(cast, joined(masters, fixed(state.model)), is_leaf=is_variable)
        ctx = context(microbatch, jax.random.key_data(key))
        x, _, aux = model.stack(model.embed(microbatch, ctx), ctx)
        head_inputs = objective.head_inputs(model, microbatch, ctx)
        loss_inputs, mtp_sums = objective.loss_inputs(model, x, head_inputs, microbatch, ctx)
        h_BLD = model.outputs(x, ctx)
        loss, sums = objective.loss(model, h_BLD, microbatch, config.train, ctx, *loss_inputs)
        return loss, sums | mtp_sums | {"stack_aux": aux}

    masters = trained(state.model)
    microbatches = [jax.tree.map(lambda a, m=m: a[m], batch) for m in range(len(batch.tokens))]
    results = [jax.grad(loss_of, has_aux=True)(masters, each) for each in microbatches]
    gradients, sums = functools.reduce(combine, results)
    sums = plain(sums)
    gradients, norm = clip(gradients, config.optim.clip_norm)
    updates, moments = optimizer.update(gradients, state.optimizer, masters, key=key, **rates)
    model = joined(jax.tree.map(jnp.add, masters, updates), fixed(state.model))
    model.update(model.aux_of(sums))
    metrics = objective.metrics(sums) | {"grad_norm": norm, "tokens": sums["tokens"]}
    return TrainState(state.step + 1, model, moments, state.key, None), metrics
