"""Memory, FLOPs and communication of the optimizer's update (optim/*.py)."""

import functools
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from maxmeg.config.schema import Masters, OptimConfig, Optimizer
from maxmeg.config.setting import walk, with_fields
from maxmeg.distributed.whole_matrices import Plan, plan
from maxmeg.ops.newton_schulz import coefficients
from maxmeg.optim.build import make_optimizer
from maxmeg.optim.muon import exchanged_over, parts
from maxmeg.optim.soap import factored_sides
from maxmeg.optim.storage import has_remainder
from maxmeg.optim.trees import factor, is_matrix
from maxmeg.parallel.mesh import MESH_AXES, mesh_shape
from maxmeg.parallel.parameter import info, is_variable
from maxmeg.parallel.rules import shard_over_context, storage_axes
from maxmeg.planning.cost.loss import FLOAT32
from maxmeg.planning.cost.parameters import Parameter
from maxmeg.planning.cost.workload import ITEMSIZE, Shard, Workload


def state_bytes(work: Workload) -> int:
    """Bytes of the optimizer state and of the average that optim.ema keeps, on a device."""
    trained = [shard for shard in work.shards if shard.trained]
    every = tuple((shard.parameter, shard.variable.shape) for shard in trained)
    config, mesh = work.config, abstract_mesh(work)
    optim = frozenset((path, value) for path, value, _ in walk(config.optim))
    averaged = FLOAT32 * sum(shard.stored for shard in trained)
    total = _state_bytes(every, optim, mesh, config.parallel.zero1, config.parallel.fsdp_context)
    return total + averaged * (config.optim.ema.decay > 0)


@functools.lru_cache(maxsize=4096)
def _state_bytes(
    every: tuple, optim: frozenset, mesh: AbstractMesh, zero1: bool, over_context: bool
) -> int:
    total = 0
    for state in states(every, optim, over_context):
        axes = itertools.chain(*storage_axes(state, mesh, zero1))
        count = math.prod(state.shape) // math.prod(mesh.shape[axis] for axis in axes)
        total += state.dtype.itemsize * count
    return total


@functools.lru_cache(maxsize=1024)
def states(
    every: tuple[tuple[Parameter, tuple], ...], optim: frozenset, over_context: bool
) -> list[nnx.Variable]:
    """The abstract arrays that the optimizer holds of parameters with these shapes. optim: fields
    of OptimConfig."""
    parts: dict[str, dict[str, nnx.Variable]] = {}
    for parameter, shape in every:
        variable = parameter.variable.replace(jax.ShapeDtypeStruct(shape, jnp.float32))
        if over_context:
            shard_over_context(variable)
        parts.setdefault(parameter.path[0], {})[str(parameter.path)] = variable
    optimizer = make_optimizer(with_fields(OptimConfig(), dict(optim)))
    arrays = jax.tree.leaves(jax.eval_shape(optimizer.init, parts), is_leaf=is_variable)
    return [one for one in arrays if is_variable(one) and one.get_value() is not None]


def factors(variable: nnx.Variable, optim: OptimConfig) -> list[nnx.Variable]:
    """SOAP's factors of the matrices of a parameter, abstract."""
    shapes = {
        side: jax.ShapeDtypeStruct((*variable.shape[:-2], size, size), jnp.float32)
        for side, size in factored_sides(variable.shape, optim).items()
    }
    return [factor(variable, shape, side) for side, shape in shapes.items()]


def abstract_mesh(work: Workload) -> AbstractMesh:
    return AbstractMesh(mesh_shape(work.axes, work.config.parallel.fold), MESH_AXES)


def is_halved(work: Workload, shard: Shard) -> bool:
    """Whether the parameter's master is a weight of the compute dtype and a remainder."""
    variable = shard.parameter.variable
    return work.config.optim.masters is Masters.remainders and has_remainder(variable)


def host_master_bytes(work: Workload, shard: Shard) -> int:
    """Bytes of a trained parameter's master that optim.offload moves to the host: of its remainder,
    or all of it if a step computes with a copy in 16 bits."""
    if is_halved(work, shard):
        return 2 * shard.stored
    is_rounded = work.itemsize != FLOAT32 and not info(shard.parameter.variable).is_exact
    return FLOAT32 * shard.stored if is_rounded else 0


def has_whole_matrices(work: Workload, shard: Shard) -> bool:
    """Whether devices update whole matrices of the parameter (distributed/whole_matrices.py)."""
    optim, parameter = work.config.optim, shard.parameter
    if not shard.trained or not is_matrix(parameter.path[0], parameter.axes):
        return False
    has_factors = optim.optimizer is Optimizer.soap and factored_sides(shard.variable.shape, optim)
    return optim.optimizer is Optimizer.muon or bool(has_factors)


def exchange_plan(work: Workload, shard: Shard) -> tuple[Plan, list[int], int]:
    """(how devices exchange a parameter's matrices, elements of a matrix in each array that they
    exchange, matrices that a device updates). Of matrices whose heads lie on several devices along
    tensor, a device of Muon's has the columns of its heads."""
    variable, mesh = shard.variable, abstract_mesh(work)
    optim, zero1 = work.config.optim, work.config.parallel.zero1
    rows, columns = variable.shape[-2:]
    if optim.optimizer is Optimizer.muon:
        widths, names = parts(variable, optim.muon), storage_axes(variable, mesh, zero1)[-1]
        over = functools.partial(exchanged_over, columns=columns, parts=widths)
        split = set(names) - set(over(names, mesh.shape))
        sizes = [rows * columns // math.prod(mesh.shape[axis] for axis in split)]
        exchange = plan([variable], mesh, zero1, over)
    else:
        others = factors(variable, optim) * 2
        sizes = [rows * columns] * 3 + [other.shape[-1] ** 2 for other in others]
        exchange = plan([variable] * 3 + others, mesh, zero1)
    devices = math.prod(mesh.shape[axis] for axes, _ in exchange.routes[0] for axis in axes)
    return exchange, sizes, exchange.number // devices


def newton_schulz_flops(work: Workload) -> float:
    """FLOPs of a device's Newton-Schulz iterations in a step: of a matrix of m <= n, 4 m^2 n and,
    unless c is zero, 2 m^3 for each step."""
    muon = work.config.optim.muon
    sets, total = coefficients(muon.coefficients, muon.steps), 0.0
    for shard in work.shards:
        if work.config.optim.optimizer is Optimizer.muon and has_whole_matrices(work, shard):
            rows = shard.parameter.variable.shape[-2]
            _, (size,), number = exchange_plan(work, shard)
            widths = parts(shard.parameter.variable, muon)
            for m, n in (sorted((rows, width)) for width in widths):
                each = sum(4 * m**2 * n + 2 * m**3 * (c != 0) for _, _, c in sets)
                total += each * (size // rows) // sum(widths) * number
    return total


def soap_flops(work: Workload) -> float:
    """FLOPs in float32 of a device's updates by SOAP: of a matrix of m x n, for each side of size s
    with a factor, 10 m n s for the changes of bases and the product of gradients and, in every
    precondition_frequency-th step, 20/3 s^3 for the power iteration, the QR decomposition with its
    Q, and the eigenvalues. `kl` adds 2 m n s for weighted gradients and 4 s^3 for inverses where
    both sides have factors."""
    soap, total = work.config.optim.soap, 0.0
    for shard in work.shards:
        if work.config.optim.optimizer is Optimizer.soap and has_whole_matrices(work, shard):
            m, n = shard.parameter.variable.shape[-2:]
            sides = factored_sides((m, n), work.config.optim).values()
            kl, refined = soap.kl and len(sides) == 2, 20 / 3 / soap.precondition_frequency
            each = sum((10 + 2 * kl) * m * n * s + (refined + 4 * kl) * s**3 for s in sides)
            total += each * exchange_plan(work, shard)[2]
    return total


def exchanged(work: Workload) -> Iterator[tuple[bool, tuple[str, ...], int]]:
    """(whether it is an all-to-all or an all-gather, mesh axes, bytes of the device's block, with
    all-gathers of the result) of each collective that returns updated matrices to their shards. An
    all-to-all has an inverse that gives devices whole matrices."""
    optim, mesh = work.config.optim, abstract_mesh(work)
    itemsize = ITEMSIZE[optim.muon.dtype] if optim.optimizer is Optimizer.muon else FLOAT32
    for shard in filter(functools.partial(has_whole_matrices, work), work.shards):
        (_, routes), sizes, number = exchange_plan(work, shard)
        for route, size in zip(routes, sizes, strict=True):
            block = itemsize * size * number
            for axes, dim in reversed(route):
                names = tuple(axis for axis in axes if mesh.shape[axis] > 1)
                block *= 1 if dim else math.prod(mesh.shape[axis] for axis in names)
                yield dim is not None, names, block
