"""Adafactor (Shazeer and Stern, 2018): the second moment of a matrix [m, n] as m row means and n
column means. Vectors have whole second moments.

Stacked matrices, of layers and experts, are factored each. Means over sharded dimensions are
all-reduced. Rows that pad a vocabulary have no gradients, and do not change the others' moments.
"""

import typing

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxmeg.config.optimizers import AdafactorConfig
from maxmeg.optim.trees import map_variables, without_matrix
from maxmeg.parallel.parameter import info

TINY = 1e-30  # added to squared gradients
SMALLEST_RMS = 1e-3  # of a parameter that scales its updates


class AdafactorState(typing.NamedTuple):
    """count: of updates. mu: first moments, None without momentum. nu: second moments of vectors.
    rows [..., m], columns [..., n]: of matrices."""

    count: jax.Array
    mu: typing.Any
    nu: typing.Any
    rows: typing.Any
    columns: typing.Any


def scale_by_adafactor(config: AdafactorConfig) -> optax.GradientTransformation:
    """The optax transform from gradients to update directions g / sqrt(v). The decay of v is
    1 - count**-config.decay; `clip` limits the RMS of each matrix's update."""

    def init(params) -> AdafactorState:
        def one(p: nnx.Variable) -> tuple:
            zeros, none = p.replace(jnp.zeros_like(p.get_value())), p.replace(None)
            mu = zeros if config.momentum else none
            if not info(p).has_matrices:
                return mu, zeros, none, none
            rows, columns = (jnp.zeros((*p.shape[:-2], p.shape[dim])) for dim in (-2, -1))
            return mu, none, without_matrix(p, rows), without_matrix(p, columns)

        return AdafactorState(jnp.int32(0), *map_variables(one, params))

    def update(updates, state, params=None):
        count = state.count + 1
        decay = 1 - count.astype(jnp.float32) ** -config.decay

        def blend(old: nnx.Variable, new: jax.Array) -> jax.Array:
            return decay * old.get_value() + (1 - decay) * new

        def one(gradient, parameter, mu, nu, rows, columns) -> tuple:
            g, p = gradient.get_value(), parameter.get_value()
            square, dims = g * g + TINY, (-1,)
            if nu.get_value() is not None:
                nu = nu.replace(blend(nu, square))
                u = g / jnp.sqrt(nu.get_value())
            else:
                dims = (-2, -1)
                row, column = blend(rows, square.mean(-1)), blend(columns, square.mean(-2))
                rows, columns = rows.replace(row), columns.replace(column)
                ratio = row / row.mean(-1, keepdims=True)
                u = g / jnp.sqrt(ratio)[..., None] / jnp.sqrt(column)[..., None, :]
            if config.clip:
                u = u / jnp.maximum(1, rms(u, dims) / config.clip)
            if config.momentum:
                u = config.momentum * mu.get_value() + (1 - config.momentum) * u
                mu = mu.replace(u)
            if config.scale_by_parameter:
                u = u * jnp.maximum(rms(p, dims), SMALLEST_RMS)
            return gradient.replace(u), mu, nu, rows, columns

        directions, *moments = map_variables(one, updates, params, *state[1:])
        return directions, AdafactorState(count, *moments)

    return optax.GradientTransformation(init, update)


def rms(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(x * x, axis=dims, keepdims=True))
