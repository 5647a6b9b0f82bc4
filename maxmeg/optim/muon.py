"""Muon (Jordan et al., 2024): Newton-Schulz iterations orthogonalize the momentum of each matrix.

Formulas, coefficients and scales are those of NVIDIA's Emerging-Optimizers, which Megatron-LM uses.
Muon updates the weight matrices of layers; each attention projection (with `per_head` each head of
it) and each expert is a matrix.
AdamW updates embeddings, output layers, convolutions and vectors.

Newton-Schulz iterations need whole matrices, but fsdp, tensor and ZeRO-1 shard the momentum inside
of them: devices exchange them (optim/whole_matrices.py).
"""

import functools
import itertools
import math
import typing
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from maxmeg.config.optimizers import MuonConfig, MuonScale, NewtonSchulz
from maxmeg.config.schema import OptimConfig
from maxmeg.optim.trees import part
from maxmeg.optim.whole_matrices import Axes, on_whole_matrices
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.parameter import info, is_variable
from maxmeg.parallel.trainable import joined

EPSILON = 1e-15  # smallest Frobenius norm
COEFFICIENTS = {  # (a, b, c) of each step: X -> a X + b (X X^T) X + c (X X^T)^2 X
    NewtonSchulz.simple: [(3.4445, -4.7750, 2.0315)],
    NewtonSchulz.quintic: [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    NewtonSchulz.polar_express: [
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ],
    NewtonSchulz.cans: [
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ],
    NewtonSchulz.aol: [
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ],
    NewtonSchulz.deepseek_v4: [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2,
    NewtonSchulz.cubic: [
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ],
}
ENDS_REPEATED = (NewtonSchulz.polar_express, NewtonSchulz.cans, NewtonSchulz.deepseek_v4)


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
    blocks = jnp.split(x, np.cumsum(parts)[:-1], axis=-1)
    x = jnp.concatenate([factor(b.shape, muon) * newton_schulz(b, muon) for b in blocks], axis=-1)
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


@jax.named_scope("newton_schulz")
def newton_schulz(x: jax.Array, muon: MuonConfig) -> jax.Array:
    """Approximate U V^T for matrices U S V^T [..., in, out]; float32.

    Products have operands in `muon.dtype` and are summed in float32. A zero matrix stays zero.
    """
    transposed = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if transposed else x
    x = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
    x = (x / jnp.maximum(norm, EPSILON)).astype(muon.dtype.value)
    for a, b, c in coefficients(muon):
        gram = product("...ij,...kj->...ik", x, x)
        polynomial = b * gram + c * product("...ij,...jk->...ik", gram, gram) if c else b * gram
        x = a * x + product("...ij,...jk->...ik", polynomial.astype(x.dtype), x)
    x = x.astype(jnp.float32)
    return jnp.swapaxes(x, -1, -2) if transposed else x


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum, summed in float32 and rounded once to the dtype of the operands."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def coefficients(muon: MuonConfig) -> list[tuple[float, float, float]]:
    """(a, b, c) of each of `muon.steps` steps. Past its end a set starts again, or its last step is
    repeated (ENDS_REPEATED)."""
    rows = COEFFICIENTS[muon.coefficients]
    if muon.coefficients in ENDS_REPEATED:
        rows = rows + [rows[-1]] * muon.steps
    return list(itertools.islice(itertools.cycle(rows), muon.steps))
