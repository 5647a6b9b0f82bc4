"""Muon (Jordan et al., 2024): Newton-Schulz iterations orthogonalize the momentum of each matrix.

Formulas and scales are those of NVIDIA's Emerging-Optimizers, which Megatron-LM uses. Muon updates
the weight matrices of layers; each attention projection (with `per_head` each head of it) and each
expert is a matrix. AdamW updates embeddings, output layers, convolutions and vectors.

Newton-Schulz iterations need whole matrices, but fsdp, tensor and ZeRO-1 shard the momentum inside
of them: devices exchange them (distributed/whole_matrices.py).
"""

import functools
import math
import typing
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from maxmeg.config.optimizers import MuonConfig, MuonScale
from maxmeg.config.schema import OptimConfig
from maxmeg.distributed.whole_matrices import Axes, on_whole_matrices
from maxmeg.ops.newton_schulz import coefficients, newton_schulz
from maxmeg.optim.trees import part
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.parameter import info, is_variable
from maxmeg.parallel.trainable import joined


class MuonState(typing.NamedTuple):
    """count: of updates. mu: momentum, or AdamW's first moment. nu: AdamW's second moment, None for
    orthogonalized matrices."""

    count: jax.Array
    mu: typing.Any
    nu: typing.Any


def scale_by_muon(
    config: OptimConfig, mesh: Mesh | None = None, zero1: bool = False
) -> optax.GradientTransformation:
    """The optax transform from gradients to update directions: Muon's for the matrices of layers,
    AdamW's for all other parameters.

    mesh, zero1: how the parameters are sharded. mesh None: every device has whole parameters.
    """
    muon, beta1, beta2 = config.muon, config.beta1, config.beta2

    def init(params) -> MuonState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return MuonState(jnp.int32(0), zeros, part(zeros, matrices=False))

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        matrices, others = part(updates, True), part(updates, False)
        momentum, first = part(state.mu, True), part(state.mu, False)

        def blend(rate: float, old, new):
            return jax.tree.map(lambda a, b: rate * a + (1 - rate) * b, old, new)

        momentum, first = blend(muon.momentum, momentum, matrices), blend(beta1, first, others)
        second = blend(beta2, state.nu, jax.tree.map(jnp.square, others))
        inputs = blend(muon.momentum, momentum, matrices) if muon.nesterov else momentum
        corrections = [1 - rate ** count.astype(jnp.float32) for rate in (beta1, beta2)]

        def adam(m, v):
            root = jnp.sqrt(v / corrections[1]) + config.eps
            return (m / corrections[0]) / root

        directions = (orthogonalized(inputs, muon, mesh, zero1), jax.tree.map(adam, first, second))
        return joined(*directions), MuonState(count, joined(momentum, first), second)

    return optax.GradientTransformation(init, update)


def orthogonalized(tree, muon: MuonConfig, mesh: Mesh | None, zero1: bool):
    """The matrices [(layers, experts,) in, out] of a tree of variables, each orthogonalized. They
    are exchanged in `muon.dtype`."""

    def one(variable: nnx.Variable) -> nnx.Variable:
        if (x := variable.get_value()) is None:
            return variable
        widths = parts(variable, muon)
        exchanged = functools.partial(exchanged_over, columns=variable.shape[-1], parts=widths)

        def directions(x: jax.Array) -> tuple[jax.Array]:
            return (direction(x, widths, muon).astype(x.dtype),)

        small = [variable.replace(x.astype(muon.dtype.value))]
        (result,) = on_whole_matrices(directions, small, mesh, zero1, exchanged)
        return result.replace(result.get_value().astype(jnp.float32))

    return jax.tree.map(one, tree, is_leaf=is_variable)


def exchanged_over(
    names: Axes, sizes: Mapping[str, int], columns: int, parts: tuple[int, ...]
) -> Axes:
    """The mesh axes over which devices exchange columns of matrices, out of the axes `names` that
    shard them: not over tensor if the devices along it have whole heads.

    sizes: of the mesh axes. columns: of the parameter. parts: as in `direction`.
    """
    over_tensor = math.prod(sizes[name] for name in names if name in TENSOR_AXES)
    others = tuple(name for name in names if name not in TENSOR_AXES)
    return names if columns // over_tensor % sum(parts) else others


def parts(variable: nnx.Variable, muon: MuonConfig) -> tuple[int, ...]:
    """The widths of the matrices that the columns of a variable are, again and again: with
    `per_head` those of a head's parts (layers.linear), else one for all columns."""
    of_head = info(variable).head_parts if muon.per_head else ()
    return of_head or variable.shape[-1:]


def direction(x: jax.Array, parts: tuple[int, ...], muon: MuonConfig) -> jax.Array:
    """Matrices [..., in, out], orthogonalized and scaled; float32. parts: widths of the matrices in
    the columns."""
    x = x.reshape(*x.shape[:-1], -1, sum(parts)).swapaxes(-3, -2)  # [..., head, in, sum(parts)]
    steps, dtype = coefficients(muon.coefficients, muon.steps), muon.dtype.value
    blocks = jnp.split(x, np.cumsum(parts)[:-1], axis=-1)
    directions = [factor(b.shape, muon) * newton_schulz(b, steps, dtype) for b in blocks]
    x = jnp.concatenate(directions, axis=-1)
    x = x.swapaxes(-3, -2)
    return x.reshape(*x.shape[:-2], -1)


def factor(shape: tuple[int, ...], muon: MuonConfig) -> float:
    """The factor by which Muon multiplies orthogonalized matrices [..., in, out]."""
    rows, columns = shape[-2:]
    scales = {
        MuonScale.spectral: max(rows, columns),
        MuonScale.shape_scaling: max(1, columns / rows),
        MuonScale.unit_rms_norm: columns / rows,
    }
    return muon.extra_scale * math.sqrt(scales[muon.scale])
