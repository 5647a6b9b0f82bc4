"""Memory, FLOPs and communication of the optimizer's update (optim/build.py, optim/muon.py)."""

import math
from collections.abc import Iterator

from maxmeg.config.schema import Optimizer
from maxmeg.optim.muon import coefficients, is_matrix
from maxmeg.planning.cost.workload import ITEMSIZE, Shard, Workload


def moments(work: Workload, shard: Shard) -> int:
    """Number of float32 arrays of a trained parameter's size in the optimizer state: 2 of AdamW;
    1 of SGD, and of a matrix that Muon orthogonalizes."""
    kind = work.config.optim.optimizer
    return 1 if kind is Optimizer.sgd or is_orthogonalized(work, shard) else 2


def is_orthogonalized(work: Workload, shard: Shard) -> bool:
    """Whether Muon orthogonalizes the parameter."""
    muon, parameter = work.config.optim.optimizer is Optimizer.muon, shard.parameter
    return muon and shard.trained and is_matrix(parameter.path[0], parameter.axes)


def whole_matrices(work: Workload, shard: Shard) -> int:
    """Number of whole matrices of a parameter that a device orthogonalizes, padding included."""
    rows, columns = shard.parameter.variable.shape[-2:]
    return math.ceil(shard.stored / (rows * columns))


def newton_schulz_flops(work: Workload) -> float:
    """FLOPs of a device's Newton-Schulz iterations in a step: of a matrix of m <= n, 4 m^2 n and,
    unless c is zero, 2 m^3 for each step."""
    sets, total = coefficients(work.config.optim.muon), 0.0
    for shard in work.shards:
        if is_orthogonalized(work, shard):
            m, n = sorted(shard.parameter.variable.shape[-2:])
            each = sum(4 * m**2 * n + 2 * m**3 * (c != 0) for _, _, c in sets)
            total += each * whole_matrices(work, shard)
    return total


def exchanged(work: Workload) -> Iterator[tuple[tuple[str, ...], int]]:
    """(mesh axes, bytes of the device's block) of each all-to-all in which devices exchange parts
    of matrices for whole ones, or back."""
    for shard in work.shards:
        if not is_orthogonalized(work, shard):
            continue
        cuts = [names for names in shard.cuts[-2:] if names]
        rows, columns = shard.parameter.variable.shape[-2:]
        size = whole_matrices(work, shard) * rows * columns
        for names in cuts:
            yield names, ITEMSIZE[work.config.optim.muon.dtype] * size
