"""Layers that only the last pipeline stage runs, between the stack and the losses: MTP layers.

All stages then compute the losses together, each for its part of the vocabulary, so the last stage
sends its outputs to all of them. If the last stage has fewer layers of the stack, it runs these
while the other stages still run theirs, and no stage waits.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.layers.auxiliary import start_values
from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import PIPE_AXIS
from maxmeg.parallel.ordering import together
from maxmeg.pipeline.residuals import UnitVjp


def is_piped() -> bool:
    """Whether there is more than one stage."""
    return collectives.axis_size((PIPE_AXIS,)) > 1


def is_last() -> jax.Array | bool:
    """Whether this device belongs to the last stage."""
    return collectives.axis_index((PIPE_AXIS,)) == collectives.axis_size((PIPE_AXIS,)) - 1


@jax.custom_vjp
def from_last_stage(tree):
    """The last stage's arrays, on all stages. The cotangents of the stages are summed too."""
    if not is_piped():
        return tree
    here = is_last()
    return summed(jax.tree.map(lambda x: jnp.where(here, x, 0), tree))


from_last_stage.defvjp(lambda tree: (from_last_stage(tree), None), lambda _, d: (summed(d),))


def summed(tree):
    """Sums over pipe. All are there before any is read: in backward the last stage must not begin
    its own part while the others wait for a sum."""
    return together(collectives.sum_over(tree, (PIPE_AXIS,)))


def on_last_stage(function: Callable, params, x, constants):
    """function(params, x, constants) -> (y, auxiliary values), on the last stage alone, forward and
    backward; elsewhere zeros and start values. Only params and x have gradients.

    Collectives in it must join devices of one stage.
    """
    if not is_piped():
        return function(params, x, constants)
    arrays, structure = jax.tree.flatten(constants)

    def on_arrays(params, x, constants):
        return function(params, x, jax.tree.unflatten(structure, constants))

    vjp = UnitVjp(on_arrays, params, x, arrays)

    def run(params, x, constants):
        y, residuals, aux = branch(lambda: vjp.forward(params, x, constants))
        return (y, aux), (residuals, params, constants)

    def pull(saved, cotangents):
        residuals, params, constants = saved
        run = functools.partial(vjp.backward, residuals, params, constants, cotangents[0])
        return (*branch(run), None)

    alone = jax.custom_vjp(lambda *arguments: run(*arguments)[0])
    alone.defvjp(run, pull)
    return alone(params, x, arrays)


def branch(run: Callable):
    """run() on the last stage; zeros of the same shapes (-inf for a Max) on the others."""
    return lax.cond(is_last(), run, lambda: start_values(jax.eval_shape(run)))
