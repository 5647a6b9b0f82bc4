"""One layer's output and gradients, also on meshes, and whether others are equal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.mesh import AXES, BATCH_AXES, TENSOR_AXES, make_mesh
from maxmeg.parallel.rules import reductions, storage_specs
from maxmeg.parallel.spmd import spmd
from maxmeg.parallel.trainable import joined, trained
from maxmeg.weights.transforms import enter, leave, whole_weights

TOLERANCE = 1e-5  # of the largest value, float32: the order of sums differs


def drawn(make: Callable, deviation: float, seed: int = 1) -> Any:
    """The layer that make(key) returns with every array random, made without compiling."""
    shapes, rng = jax.eval_shape(make, jax.random.key(0)), np.random.default_rng(seed)
    return jax.tree.map(
        lambda a: jnp.asarray(deviation * rng.normal(size=a.shape), a.dtype), shapes
    )


def with_gradients(output: Callable, layer, x_BLD: jax.Array, slope_BLD: jax.Array) -> tuple:
    """output(layer, x), and gradients of its sum weighed by the slope."""

    def loss(layer, x_BLD):
        y_BLD = output(layer, x_BLD)
        return jnp.sum(y_BLD * slope_BLD), y_BLD

    (_, y_BLD), slopes = jax.value_and_grad(loss, (0, 1), has_aux=True)(layer, x_BLD)
    return y_BLD, *slopes


def on_mesh(output: Callable, layer, sizes: dict[str, int], fold: int = 1) -> Any:
    """What makes the same of (layer, x, slope) on a mesh, sequences sharded over tensor; `output`
    sees a device's part."""
    sizes = dict.fromkeys(AXES, 1) | sizes
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = make_mesh(sizes, devices, fold)
    specs, places = storage_specs(layer, mesh, zero1=False), reductions(layer, mesh, zero1=False)
    transforms = whole_weights(places, jnp.float32)
    rows = P(BATCH_AXES, TENSOR_AXES)

    def local(layer, x_BLD, slope_BLD):
        weights = enter(transforms, layer)
        y_BLD, gradients, into = with_gradients(output, weights, x_BLD, slope_BLD)
        reduced = leave(transforms, trained(gradients))
        return y_BLD, joined(reduced, gradients), into  # state has none but zeros

    return jax.jit(spmd(local, mesh, (specs, rows, rows), (rows, specs, rows)))


def check_equal(found, wanted) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        limit = TOLERANCE * max(np.abs(np.asarray(other)).max(), 1e-3)
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)
