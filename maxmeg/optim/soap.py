"""SOAP (Vyas et al., 2024): AdamW in the eigenbases of Shampoo's two factors of each matrix.

Formulas are those of NVIDIA's Emerging-Optimizers, which Megatron-LM uses: the eigenbases are
refined by one power iteration and a QR decomposition in every step, after `eigh` in the first one.
Matrices of layers, of attention projections and of experts, each have their own; AdamW updates the
rest. Each device updates whole matrices (optim/whole_matrices.py).
"""

import typing

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from maxmeg.config.schema import OptimConfig
from maxmeg.optim.trees import factor, map_variables, part
from maxmeg.optim.whole_matrices import on_whole_matrices
from maxmeg.parallel.parameter import Side
from maxmeg.parallel.trainable import joined


class SoapState(typing.NamedTuple):
    """count: number of updates. mu, nu: AdamW's moments, for matrices in the eigenbases. left
    [..., m, m], right [..., n, n]: running means of G G^T and G^T G or, with soap.kl, of
    G R^-1 G^T / n and G^T L^-1 G / m. left_basis, right_basis: their eigenvectors, as columns."""

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
            shapes = [(*p.shape[:-2], size, size) for size in p.shape[-2:]]
            arrays = [jnp.zeros(shape) for shape in shapes]
            arrays += [jnp.broadcast_to(jnp.eye(shape[-1]), shape) for shape in shapes]
            return tuple(factor(p, a, side) for a, side in zip(arrays, [*Side] * 2, strict=True))

        return SoapState(jnp.int32(0), zeros, zeros, *map_variables(one, part(params, True)))

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        corrections = [
            1 - beta ** count.astype(jnp.float32) for beta in (beta1, beta2, factor_beta)
        ]
        lead = (1 - factor_beta) / corrections[2]  # of the newest product in the factors

        def adam(g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple:
            mu, nu = beta1 * mu + (1 - beta1) * g, beta2 * nu + (1 - beta2) * g * g
            root = jnp.sqrt(nu / corrections[1]) + config.eps
            return mu / corrections[0] / root, mu, nu

        def of_vector(*variables: nnx.Variable) -> tuple:
            values = adam(*(v.get_value() for v in variables))
            return tuple(v.replace(x) for v, x in zip(variables, values, strict=True))

        def of_matrices(g, mu, nu, left, right, left_basis, right_basis) -> tuple:
            mu = left_basis @ mu @ transposed(right_basis)
            of_left, of_right = g, transposed(g)
            if config.soap.kl:
                of_left = g @ inverse(right, right_basis, config.eps)
                of_right = transposed(g) @ inverse(left, left_basis, config.eps)
            left = left + lead * (of_left @ transposed(g) - left)
            right = right + lead * (of_right @ g - right)
            left_basis, right_basis = (
                refined(factor, basis, state.count == 0)
                for factor, basis in ((left, left_basis), (right, right_basis))
            )
            mu, g = (transposed(left_basis) @ x @ right_basis for x in (mu, g))
            u, mu, nu = adam(g, mu, nu)
            u = left_basis @ u @ transposed(right_basis)
            return u, mu, nu, left, right, left_basis, right_basis

        def of_matrix(*variables: nnx.Variable) -> tuple:
            with jax.default_matmul_precision("highest"):
                return on_whole_matrices(of_matrices, variables, mesh, zero1)

        trees = [part(tree, True) for tree in (updates, state.mu, state.nu)]
        results = map_variables(of_matrix, *trees, *state[3:])
        others = [part(tree, False) for tree in (updates, state.mu, state.nu)]
        rest = map_variables(of_vector, *others)
        u, mu, nu = (joined(a, b) for a, b in zip(results[:3], rest, strict=True))
        return u, SoapState(count, mu, nu, *results[3:])

    return optax.GradientTransformation(init, update)


def transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def eigenvalues(factor: jax.Array, basis: jax.Array) -> jax.Array:
    """Eigenvalues [..., m] of symmetric matrices [..., m, m], from approximate eigenvectors."""
    return jnp.sum(basis * (factor @ basis), axis=-2)


def inverse(factor: jax.Array, basis: jax.Array, eps: float) -> jax.Array:
    """[..., m, m]: the inverses of factors, by eigenvalues of at least eps, divided by m."""
    values = jnp.maximum(eigenvalues(factor, basis), eps) * factor.shape[-1]
    return basis / values[..., None, :] @ transposed(basis)


@jax.named_scope("soap_basis")
def refined(factor: jax.Array, basis: jax.Array, is_first: jax.Array) -> jax.Array:
    """Eigenvectors of symmetric matrices [..., m, m], those of the largest eigenvalues first: by a
    power iteration from `basis`, or of the first step by eigh."""

    def first() -> jax.Array:
        return jnp.linalg.eigh(factor, symmetrize_input=False)[1][..., ::-1]

    def later() -> jax.Array:
        q = jnp.linalg.qr(factor @ basis)[0]
        order = jnp.argsort(eigenvalues(factor, q), axis=-1, descending=True)
        return jnp.take_along_axis(q, order[..., None, :], axis=-1)

    return jax.lax.cond(is_first, first, later)
