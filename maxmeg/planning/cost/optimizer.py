"""Memory, FLOPs and communication of the optimizer's update (optim/*.py)."""

import itertools
import math
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from maxmeg.config.schema import Masters, Moments, Optimizer
from maxmeg.ops.delayed import OPERANDS
from maxmeg.optim.muon import coefficients, copied_over, exchanged_over, parts
from maxmeg.optim.storage import block_size, has_remainder
from maxmeg.optim.trees import is_matrix, without_matrix
from maxmeg.parallel.mesh import MESH_AXES, mesh_shape
from maxmeg.parallel.rules import has_matrices, is_exact, storage_axes
from maxmeg.planning.cost.loss import FLOAT32
from maxmeg.planning.cost.workload import ITEMSIZE, Shard, Workload, padded


def moments(work: Workload, shard: Shard) -> int:
    """Number of arrays of a trained parameter's size in the optimizer state: 2 of AdamW; 1 of SGD
    and Lion, and of a matrix that Muon orthogonalizes; of Adafactor 1 for vectors."""
    optim = work.config.optim
    if optim.optimizer is Optimizer.adafactor:
        is_vector = not has_matrices(shard.parameter.variable)
        return is_vector + (optim.adafactor.momentum > 0)
    if optim.optimizer in (Optimizer.sgd, Optimizer.lion) or is_orthogonalized(work, shard):
        return 1
    return 2


def moment_bytes(work: Workload, shard: Shard) -> int:
    """Bytes of the optimizer state of a trained parameter on a device. With float8 those of scales
    too, 4 for each block; devices that share blocks of the last dimension hold its scales as
    copies."""
    kind, variable = work.config.optim.moments, shard.parameter.variable
    others = FLOAT32 * sum(stored_of_others(work, shard))
    if kind is Moments.float32 or not has_matrices(variable):
        return FLOAT32 * shard.stored * moments(work, shard) + others
    if kind is Moments.bfloat16:
        return 2 * shard.stored * moments(work, shard) + others
    sizes, mesh = mesh_shape(work.axes, work.config.parallel.fold), dict[str, int]()
    mesh.update(zip(MESH_AXES, sizes, strict=True))
    size, shards = variable.shape[-1], math.prod(mesh[axis] for axis in shard.cuts[-1])
    block = block_size(size)
    copies = shards if size // block % shards else 1
    scales = FLOAT32 * copies * shard.stored // block
    return (shard.stored + scales) * moments(work, shard) + others


def average_bytes(work: Workload, shard: Shard) -> int:
    """Bytes of the average that optim.ema keeps of a trained parameter on a device."""
    return FLOAT32 * shard.stored if work.config.optim.ema.decay else 0


def history_bytes(work: Workload) -> int:
    """Bytes of the histories of delayed scaling on a device, those of its stage's layers."""
    if work.recipe is None or work.recipe.history is None:
        return 0
    matrices = [shard.parameter for shard in work.shards if shard.parameter.quantizable]
    # Projections that can be fused share one.
    sharing = {(p.group, p.path if p.projections is None else p.projections) for p in matrices}
    quantized = [group for group, _ in sharing]
    layers = [1 if g is None else work.places[g] * work.config.parallel.chunks for g in quantized]
    return FLOAT32 * len(OPERANDS) * (1 + work.recipe.history.length) * sum(layers)


def stored_of_others(work: Workload, shard: Shard) -> Iterator[int]:
    """Numbers of elements on a device of arrays of other shapes than the parameter's: Adafactor's
    means of rows and columns, SOAP's factors and eigenbases."""
    kind, parameter = work.config.optim.optimizer, shard.parameter
    if kind is Optimizer.adafactor and has_matrices(parameter.variable):
        ranks = (1,)
    elif kind is Optimizer.soap and is_matrix(parameter.path[0], parameter.axes):
        ranks = (2, 2)
    else:
        return
    parallel, model = work.config.parallel, work.config.model
    sizes = mesh_shape(work.axes, parallel.fold)
    mesh = typing.cast(Mesh, AbstractMesh(sizes, MESH_AXES))
    places = tuple(number * parallel.chunks for number in work.places)
    vocabulary = model.padded_vocab_size(parallel.tensor, parallel.pipe)
    variable = padded(parameter, places, parallel.pipe, vocabulary)
    for rank, size in itertools.product(ranks, variable.shape[-2:]):
        shape = (*variable.shape[:-2], *[size] * rank)
        other = without_matrix(variable, jax.ShapeDtypeStruct(shape, jnp.float32), rank)
        used = itertools.chain(*storage_axes(other, mesh, parallel.zero1))
        yield math.prod(shape) // math.prod(mesh.shape[axis] for axis in used)


def is_halved(work: Workload, shard: Shard) -> bool:
    """Whether the parameter's master is a weight of the compute dtype and a remainder."""
    variable = shard.parameter.variable
    return work.config.optim.masters is Masters.remainders and has_remainder(variable)


def host_master_bytes(work: Workload, shard: Shard) -> int:
    """Bytes of a trained parameter's master that optim.offload moves to the host: of its remainder,
    or all of it if a step computes with a copy in 16 bits."""
    if is_halved(work, shard):
        return 2 * shard.stored
    is_rounded = work.itemsize != FLOAT32 and not is_exact(shard.parameter.variable)
    return FLOAT32 * shard.stored if is_rounded else 0


def is_orthogonalized(work: Workload, shard: Shard) -> bool:
    """Whether Muon orthogonalizes the parameter."""
    muon, parameter = work.config.optim.optimizer is Optimizer.muon, shard.parameter
    return muon and shard.trained and is_matrix(parameter.path[0], parameter.axes)


def orthogonalized_columns(work: Workload, shard: Shard) -> tuple[tuple[str, ...], int, int]:
    """(mesh axes over which devices exchange columns of a parameter, columns of the matrices that a
    device orthogonalizes, number of these matrices with padding). Of matrices whose heads lie on
    several devices along tensor, a device has the columns of its heads."""
    variable, cuts = shard.parameter.variable, shard.cuts
    sizes = mesh_shape(work.axes, work.config.parallel.fold)
    mesh: dict[str, int] = dict(zip(MESH_AXES, sizes, strict=True))

    def count(axes: tuple[str, ...]) -> int:
        return math.prod(mesh[axis] for axis in axes)

    rows, columns = (variable.shape[dim] // count(cuts[dim]) for dim in (-2, -1))
    over = exchanged_over(cuts[-1], columns, parts(variable, work.config.optim.muon), count)
    number, devices = shard.stored // (rows * columns), count(cuts[-2]) * count(over)
    copies = copied_over(set(itertools.chain(*cuts)), devices, number, count)
    return over, columns * count(over), math.ceil(number / (devices * count(copies)))


def newton_schulz_flops(work: Workload) -> float:
    """FLOPs of a device's Newton-Schulz iterations in a step: of a matrix of m <= n, 4 m^2 n and,
    unless c is zero, 2 m^3 for each step."""
    muon = work.config.optim.muon
    sets, total = coefficients(muon), 0.0
    for shard in work.shards:
        if is_orthogonalized(work, shard):
            rows = shard.parameter.variable.shape[-2]
            _, columns, number = orthogonalized_columns(work, shard)
            widths = parts(shard.parameter.variable, muon)
            for m, n in (sorted((rows, width)) for width in widths):
                each = sum(4 * m**2 * n + 2 * m**3 * (c != 0) for _, _, c in sets)
                total += each * columns // sum(widths) * number
    return total


def exchanged(work: Workload) -> Iterator[tuple[tuple[str, ...], int]]:
    """(mesh axes, bytes of the device's block) of each all-to-all in which devices exchange parts
    of matrices for whole ones, or back."""
    for shard in work.shards:
        if not is_orthogonalized(work, shard):
            continue
        over, columns, number = orthogonalized_columns(work, shard)
        size = number * shard.parameter.variable.shape[-2] * columns
        for names in filter(None, (shard.cuts[-2], over)):
            yield names, ITEMSIZE[work.config.optim.muon.dtype] * size
