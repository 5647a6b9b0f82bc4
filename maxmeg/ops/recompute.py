"""Recomputation that holds inside any `jax.checkpoint` around it.

A `jax.checkpoint` nested in another one is ruled by the outer one's policy, so its intermediates
would be stored after all. A custom vjp that keeps only its inputs is not.
"""

import functools
from collections.abc import Callable

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recomputed(function: Callable, inputs: tuple, others: tuple):
    """function(*inputs, *others), differentiable in `inputs`; backward stores the two and no more.

    `function` must be hashable and close over no traced value.
    """
    return function(*inputs, *others)


def forward(function, inputs, others):
    return function(*inputs, *others), (inputs, others)


def backward(function, residuals, cotangent):
    inputs, others = residuals
    _, transpose = jax.vjp(lambda *arrays: function(*arrays, *others), *inputs)
    return transpose(cotangent), None


recomputed.defvjp(forward, backward)
