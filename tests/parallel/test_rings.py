"""Products in parts beside transfers: values and gradients of gather + product + scatter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.collectives import gather_sequence, scatter_sequence
from maxmeg.parallel.mesh import AXES, TENSOR_AXES, make_mesh
from maxmeg.parallel.rings import gather_matmul, matmul_scatter, multiply
from maxmeg.parallel.spmd import spmd

TOLERANCES = {"float32": 1e-6, "bfloat16": 2**-6}  # of the largest value: sums in another order
B, L, D, O = 2, 8, 12, 16
SHARD, COLUMNS, ROWS = P(None, TENSOR_AXES), P(None, TENSOR_AXES), P(TENSOR_AXES)


def plain_gather_matmul(x_BlD, weights):
    x_BLD = gather_sequence(x_BlD)
    return tuple(multiply(x_BLD, w) for w in weights)


def plain_matmul_scatter(x_BLI, w_ID):
    return scatter_sequence(multiply(x_BLI, w_ID))


def results(tensor: int, fold: int, dtype: str, column, row):
    """Output and gradients of row(column(x)) on a mesh, with two column-parallel weights."""
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"tensor": tensor}, jax.devices()[:tensor], fold)
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (B, L, D), (D, O), (D, O), (O, D), (B, L, D)
    arrays = [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]

    def local(x_BlD, up, gate, out, slope_BlD):
        def run(x_BlD, up, gate, out):
            up_BLO, gate_BLO = column(x_BlD, (up, gate))
            return row(up_BLO * jnp.tanh(gate_BLO), out)

        y_BlD, pull = jax.vjp(run, x_BlD, up, gate, out)
        return y_BlD, *pull(slope_BlD)

    parts = SHARD, COLUMNS, COLUMNS, ROWS
    run = jax.jit(spmd(local, mesh, (*parts, SHARD), (SHARD, *parts)))
    text = str(run.trace(*arrays).jaxpr)
    return [np.asarray(x) for x in run(*arrays)], text


@functools.cache
def wanted(dtype: str) -> list[np.ndarray]:
    return results(1, 1, dtype, plain_gather_matmul, plain_matmul_scatter)[0]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tensor", "fold"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_rings_are_the_products_with_gathers_and_scatters(tensor, fold, dtype):
    found, jaxpr = results(tensor, fold, dtype, gather_matmul, matmul_scatter)
    assert jaxpr.count("ppermute[") == 4 * (tensor - 1)
    assert "reduce_scatter" not in jaxpr and jaxpr.count("all_gather[") == (tensor > 1)
    for one, other in zip(found, wanted(dtype), strict=True):
        assert one.dtype == other.dtype == dtype
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.abs(one - other).max() <= TOLERANCES[dtype] * np.abs(other).max()
