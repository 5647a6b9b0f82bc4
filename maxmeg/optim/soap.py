"""SOAP (Vyas et al., 2024): AdamW in the eigenbases of Shampoo's two factors of each matrix.

Formulas are those of NVIDIA's Emerging-Optimizers, which Megatron-LM uses: the eigenbases are
refined by one power iteration and a QR decomposition, after `eigh` in the first step. Matrices of
layers, of attention projections and of experts, each have their own; AdamW updates the rest. Each
device updates whole matrices (distributed/whole_matrices.py).
"""

import typing
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from maxmeg.config.schema import OptimConfig, SoapConfig
from maxmeg.distributed.whole_matrices import on_whole_matrices
from maxmeg.optim.trees import factor, map_variables, part
from maxmeg.parallel.parameter import Side


class SoapState(typing.NamedTuple):
    """count: number of updates. mu, nu: AdamW's moments, for matrices in the eigenbases. left
    [..., m, m], right [..., n, n]: running means of G G^T and G^T G or, with soap.kl, of
    G R^-1 G^T / n and G^T L^-1 G / m. left_basis, right_basis: their eigenvectors, as columns.
    None of them for a side longer than soap.max_precond_dim: its basis is the identity."""

    count: jax.Array
    mu: typing.Any
    nu: typing.Any
    left: typing.Any
    right: typing.Any
    left_basis: typing.Any
    right_basis: typing.Any


def scale_by_soap(
    config: OptimConfig, mesh: Mesh | None = None, zero1: bool = False
) -> optax.GradientTransformation:
    """The optax transform from gradients to update directions.

    mesh, zero1: how the parameters are sharded. mesh None: every device has whole parameters.
    """
    beta1, beta2, factor_beta = config.beta1, config.beta2, config.soap.factor_beta

    def init(params) -> SoapState:
        zeros = jax.tree.map(jnp.zeros_like, params)

        def one(p: nnx.Variable) -> tuple:
            sides = factored_sides(p.shape, config)
            bases = [jnp.broadcast_to(jnp.eye(n), (*p.shape[:-2], n, n)) for n in p.shape[-2:]]
            pairs = zip([*map(jnp.zeros_like, bases), *bases], [*Side] * 2, strict=True)
            return tuple(factor(p, a, s) if s in sides else p.replace(None) for a, s in pairs)

        return SoapState(jnp.int32(0), zeros, zeros, *map_variables(one, part(params, True)))

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        corrections = [1 - b ** count.astype(jnp.float32) for b in (beta1, beta2, factor_beta)]
        lead = (1 - factor_beta) / corrections[2]  # of the newest product in the factors

        def adam(g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple:
            mu, nu = beta1 * mu + (1 - beta1) * g, beta2 * nu + (1 - beta2) * g * g
            root = jnp.sqrt(nu / corrections[1]) + config.eps
            return mu / corrections[0] / root, mu, nu

        def of_matrices(g, mu, nu, *arrays) -> tuple:
            sides = factored_sides(g.shape, config)
            factors = dict(zip(sides, arrays[: len(sides)], strict=True))
            bases = dict(zip(sides, arrays[len(sides) :], strict=True))
            mu = rotated(mu, {side: basis.mT for side, basis in bases.items()})
            views = {Side.left: (g, Side.right), Side.right: (g.mT, Side.left)}
            inverses = {
                s: inverse(factors[s], bases[s], config.eps) for s in sides if config.soap.kl
            }
            for side in sides:
                rows, other = views[side]
                weighted = rows @ inverses[other] if other in inverses else rows
                factors[side] += lead * (weighted @ rows.mT - factors[side])
                bases[side] = refined(factors[side], bases[side], state.count, config.soap)
            u, mu, nu = adam(rotated(g, bases), rotated(mu, bases), nu)
            u = rotated(u, {side: basis.mT for side, basis in bases.items()})
            return u, mu, nu, *factors.values(), *bases.values()

        def of_variable(*variables: nnx.Variable) -> tuple:
            arrays = [v for v in variables if v.get_value() is not None]
            function, over = (of_matrices, mesh) if len(arrays) > 3 else (adam, None)
            with jax.default_matmul_precision("highest"):
                results = iter(on_whole_matrices(function, arrays, over, zero1))
            return tuple(v if v.get_value() is None else next(results) for v in variables)

        u, *results = map_variables(of_variable, updates, *state[1:])
        return u, SoapState(count, *results)

    return optax.GradientTransformation(init, update)


def factored_sides(shape: Sequence[int], config: OptimConfig) -> dict[Side, int]:
    """Sizes of the sides of matrices [..., m, n] that have a factor and an eigenbasis."""
    sizes = zip(Side, shape[-2:], strict=True)
    return {side: size for side, size in sizes if size <= config.soap.max_precond_dim}


def rotated(x: jax.Array, bases: Mapping[Side, jax.Array]) -> jax.Array:
    """Matrices [..., m, n] in the bases of their rows and columns, as far as these have one."""
    x = bases[Side.left].mT @ x if Side.left in bases else x
    return x @ bases[Side.right] if Side.right in bases else x


def eigenvalues(factor: jax.Array, basis: jax.Array) -> jax.Array:
    """Eigenvalues [..., m] of symmetric matrices [..., m, m], from approximate eigenvectors."""
    return jnp.sum(basis * (factor @ basis), axis=-2)


def inverse(factor: jax.Array, basis: jax.Array, eps: float) -> jax.Array:
    """[..., m, m]: the inverses of factors, by eigenvalues of at least eps, divided by m."""
    values = jnp.maximum(eigenvalues(factor, basis), eps) * factor.shape[-1]
    return basis / values[..., None, :] @ basis.mT


@jax.named_scope("soap_basis")
def refined(factor: jax.Array, basis: jax.Array, count: jax.Array, soap: SoapConfig) -> jax.Array:
    """Eigenvectors of symmetric matrices [..., m, m], those of the largest eigenvalues first: by
    eigh in the first step (count 0), by a power iteration in every precondition_frequency-th."""

    def first() -> jax.Array:
        return jnp.linalg.eigh(factor, symmetrize_input=False)[1][..., ::-1]

    def later() -> jax.Array:
        q = jnp.linalg.qr(factor @ basis)[0]
        order = jnp.argsort(eigenvalues(factor, q), axis=-1, descending=True)
        return jnp.take_along_axis(q, order[..., None, :], axis=-1)

    index = jnp.int32(count > 0) + (count % soap.precondition_frequency > 0)
    return jax.lax.switch(index, [first, later, lambda: basis])
