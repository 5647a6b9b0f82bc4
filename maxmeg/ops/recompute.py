"""Recomputation that holds inside any `jax.checkpoint` around it, with or without a loop.

A `jax.checkpoint` nested in another one is ruled by the outer one's policy, so its intermediates
would be stored after all. A custom vjp that keeps only its inputs is not.
"""

import functools
from collections.abc import Callable

import jax
from jax import lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recomputed(function: Callable, inputs: tuple, others: tuple):
    """function(*inputs, *others), differentiable in `inputs`; backward stores the arguments alone.

    `function` must be hashable and close over no traced value.
    """
    return function(*inputs, *others)


def forward(function, inputs, others):
    return function(*inputs, *others), (inputs, others)


def backward(function, residuals, cotangent):
    inputs, others = residuals
    # Without a barrier XLA merges the recomputation with an equal forward in the same computation.
    inputs, cotangent = lax.optimization_barrier((inputs, cotangent))
    _, transpose = jax.vjp(lambda *arrays: function(*arrays, *others), *inputs)
    return transpose(cotangent), None


recomputed.defvjp(forward, backward)
