"""Functions of whole matrices, for arrays that fsdp, tensor and ZeRO-1 shard inside of matrices.

All-to-alls give each device the whole matrices of some layers, and return the results to the
shards. An all-to-all over the devices that shard a dimension divides matrices among them and joins
that dimension. All arrays of a matrix meet on one device: matrices are divided over the same mesh
axes in the same order, whether an array is sharded over an axis (all-to-all) or replicated along it
(the device keeps its part of the matrices; an all-gather returns the results).
"""

import itertools
import math
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import MESH_AXES
from maxmeg.parallel.parameter import Side, info
from maxmeg.parallel.rules import storage_axes
from maxmeg.parallel.spmd import spmd

Axes = tuple[str, ...]
Exchanged = Callable[[Axes, Mapping[str, int]], Axes]


class Plan(typing.NamedTuple):
    """number: matrices of a device's shards, with padding. routes: for each array, the steps that
    divide them: (mesh axes, the dimension of [matrices, rows, columns] that devices along the axes
    shard, or None if they have copies)."""

    number: int
    routes: list[list[tuple[Axes, int | None]]]


def on_whole_matrices(
    function: Callable[..., tuple[jax.Array, ...]],
    variables: Sequence[nnx.Variable],
    mesh: Mesh | None,
    zero1: bool,
    exchanged: Exchanged | None = None,
) -> tuple[nnx.Variable, ...]:
    """The variables with the results of `function`, one for each of them, sharded as before.

    variables: a parameter [..., rows, columns] or arrays like it, and its factors (Side); the
    first is not a factor. function: of arrays [..., rows, columns] of whole matrices. mesh, zero1:
    how the parameter is sharded; mesh None: the arrays are whole. exchanged: picks, from the mesh
    axes that shard the columns and the sizes of all axes, those to exchange columns over; columns
    stay divided over the others. None: all of them.
    """
    arrays = tuple(v.get_value() for v in variables)
    if mesh is None:
        results = function(*arrays)
    else:
        number, routes = plan(variables, mesh, zero1, exchanged)

        def local(*shards: jax.Array) -> tuple[jax.Array, ...]:
            matrices = [gather(x, number, route) for x, route in zip(shards, routes, strict=True)]
            rows = zip(function(*matrices), shards, routes, strict=True)
            return tuple(sharded(x, shard, route) for x, shard, route in rows)

        axes = [storage_axes(v, mesh, zero1) for v in variables]
        specs = tuple(P(*(names or None for names in dims)) for dims in axes)
        results = spmd(local, mesh, specs, specs)(*arrays)
    return tuple(v.replace(x) for v, x in zip(variables, results, strict=True))


def plan(
    variables: Sequence[nnx.Variable],
    mesh: Mesh | AbstractMesh,
    zero1: bool,
    exchanged: Exchanged | None = None,
) -> Plan:
    """The Plan of variables with their global shapes; arguments as of `on_whole_matrices`."""

    def count(axes: Axes) -> int:
        return math.prod(mesh.shape[axis] for axis in axes)

    first, shards = variables[0], storage_axes(variables[0], mesh, zero1)
    stacked = zip(first.shape[:-2], shards[:-2], strict=True)
    number = math.prod(size // count(names) for size, names in stacked)
    rows, columns = shards[-2], exchanged(shards[-1], mesh.shape) if exchanged else shards[-1]
    every = (*rows, *columns)
    copies = copied_over(set(itertools.chain(*shards)), count(every), number, count)
    routes = []
    for variable in variables:
        side, over = info(variable).side, storage_axes(variable, mesh, zero1)[-2]
        route = [(rows, 1), (columns, 2)]
        if side is Side.left:
            route = [(over, 1), (every[len(over) :], None)]
        elif side is Side.right:
            route = [(every[: len(every) - len(over)], None), (over, 1)]
        routes.append([step for step in [(copies, None), *route] if count(step[0]) > 1])
    step = count(every) * count(copies)
    return Plan(number + -number % step, routes)


def copied_over(axes: set[str], devices: int, number: int, count: Callable[[Axes], int]) -> Axes:
    """The mesh axes along which devices with the same shard divide its `number` matrices, which
    `devices` exchange with each other, as long as there are enough matrices for all. axes: those
    that shard them."""
    copies = ()
    for axis in MESH_AXES:
        copied = axis not in axes and count((axis,)) > 1
        if copied and devices * count((*copies, axis)) <= number:
            copies = (*copies, axis)
    return copies


def gather(x: jax.Array, number: int, route) -> jax.Array:
    """The device's matrices [matrices, rows, columns], from its shard [..., rows, columns]."""
    x = x.reshape(-1, *x.shape[-2:])
    x = jnp.pad(x, ((0, number - x.shape[0]), (0, 0), (0, 0)))
    for axes, dim in route:
        x = collectives.exchange(x, axes, 0, dim) if dim else collectives.local_part(x, axes, 0)
    return x


def sharded(x: jax.Array, shard: jax.Array, route) -> jax.Array:
    """The inverse of `gather`: the shard, of the shape of `shard`."""
    for axes, dim in reversed(route):
        x = collectives.exchange(x, axes, dim, 0) if dim else collectives.gather(x, axes, 0)
    return x[: math.prod(shard.shape[:-2])].reshape(shard.shape)
