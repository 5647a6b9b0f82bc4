"""Small optimizer states: moments of 8 or 16 bits, and masters as bfloat16 weights + remainders.

Moments of matrices are decoded to float32 for each update, and encoded after it with stochastic
rounding. Their random bits are a hash of the step's key and of global indices, so that they are the
same on every mesh. Vectors, which are few, stay in float32. ops/stochastic_rounding.py has the
formats: in 8 bits first moments have a sign, second moments are squares.
"""

import re
import zlib

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxmeg.config.schema import Moments
from maxmeg.ops.random import fold
from maxmeg.ops.stochastic_rounding import (
    element_bits,
    joined_float32,
    of_float8,
    of_squares,
    split_float32,
    to_bfloat16,
    to_float8,
    to_squares,
)
from maxmeg.parallel.ordering import together
from maxmeg.parallel.parameter import info, is_variable, replaced

FIRST, SECOND = ("mu", "trace"), ("nu",)  # fields of optimizer states
STACKED = re.compile(r"stack\.groups\.(\d+)\.")
Layers = tuple[tuple[int, ...], ...] | dict[int, jax.Array]  # by group, as `orders` returns them


def stored(
    inner: optax.GradientTransformationExtraArgs, moments: Moments
) -> optax.GradientTransformationExtraArgs:
    """`inner` with the moments of its state as `moments` says. Its update takes a `key` for
    stochastic rounding, a new one for each step."""
    if moments is Moments.float32:
        return inner

    def init(params):
        state = together(inner.init(params))  # XLA would encode zeros slowly
        return encode(state, moments, jax.random.key(0))

    def update(updates, state, params=None, **rates):
        key, layers = rates.pop("key"), rates.pop("layers", orders(params))
        updates, state = inner.update(updates, decode(state, moments), params, **rates)
        return updates, encode(state, moments, key, layers)

    return optax.GradientTransformationExtraArgs(init, update)


def orders(params) -> tuple[tuple[int, ...], ...]:
    """The model's layer in each row of the stacked parameters of each group; (): in that order."""
    return params.stack.layout.orders if hasattr(params, "stack") else ()


def encode(state, moments: Moments, key: jax.Array, layers: Layers = ()):
    """The state of an optimizer, a tuple, with its moments encoded; for float8 with one more
    element, the scales of blocks. layers: see `orders`."""
    if moments is Moments.float32:
        return state

    drawn: dict[str, jax.Array] = {}  # both moments of a parameter are rounded by the same bits

    def one(path, leaf) -> tuple:
        field, name = _field_and_name(path, leaf)
        if not field:
            return leaf, leaf.replace(None) if is_variable(leaf) else None
        x, group = leaf.get_value(), STACKED.match(name)
        if name not in drawn:
            order = layers[int(group[1])] if group and layers else None
            drawn[name] = element_bits(x.shape, fold(key, zlib.crc32(name.encode())), order)
        if moments is Moments.bfloat16:
            return leaf.replace(to_bfloat16(x, drawn[name])), leaf.replace(None)
        codes, scales = (to_squares if field in SECOND else to_float8)(x, drawn[name])
        block = x.shape[-1] // scales.shape[-1]
        return leaf.replace(codes), replaced(leaf, scales, block_size=block)

    leaves, structure = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)
    parts = zip(*[one(path, leaf) for path, leaf in leaves], strict=True)
    codes, scales = (jax.tree.unflatten(structure, part) for part in parts)
    return codes if moments is Moments.bfloat16 else (*codes, {"scales": scales})


def decode(state, moments: Moments):
    """The state with float32 moments, from that of `encode`."""
    if moments is Moments.float32:
        return state
    if moments is Moments.bfloat16:
        return jax.tree.map(
            lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, state
        )

    def one(leaf, scale):
        if not is_variable(leaf) or scale.get_value() is None:
            return leaf
        codes = leaf.get_value()
        decoded = of_squares if codes.dtype == jnp.uint8 else of_float8
        return leaf.replace(decoded(codes, scale.get_value()))

    *codes, extra = state
    leaves, structure = jax.tree.flatten(tuple(codes), is_leaf=is_variable)
    scales = structure.flatten_up_to(extra["scales"])
    return jax.tree.unflatten(structure, map(one, leaves, scales))


def _field_and_name(path, leaf) -> tuple[str, str]:
    """The field of the state that a moment of a matrix is in, and its parameter's name; "" for all
    else."""
    if is_variable(leaf) and leaf.get_value() is not None and info(leaf).has_matrices:
        fields = [key.name for key in path if getattr(key, "name", "") in FIRST + SECOND]
        if fields:
            return fields[0], parameter_name(path)
    return "", ""


def parameter_name(path) -> str:
    """The name of the parameter at a path in a model, or of that whose moment is there."""
    names = [getattr(key, "name", "") for key in path]
    first = next((i + 1 for i, name in enumerate(names) if name in FIRST + SECOND), 0)
    return jax.tree_util.keystr(path[first:], simple=True, separator=".")


def has_remainder(variable: nnx.Variable) -> bool:
    """Whether optim.masters=remainders divides the variable: weights that are trained and computed
    in bfloat16."""
    return (
        variable.get_value() is not None
        and info(variable).is_trained
        and not info(variable).is_exact
    )


def divided(model):
    """(the model with bfloat16 weights, a tree of remainders, uint16), from float32 masters, as of
    `split_float32`. `merged` is the inverse."""

    def one(variable: nnx.Variable, weights: bool) -> nnx.Variable:
        if not has_remainder(variable):
            return variable if weights else variable.replace(None)
        return variable.replace(split_float32(variable.get_value())[0 if weights else 1])

    return tuple(
        jax.tree.map(lambda v, w=weights: one(v, w), model, is_leaf=is_variable)
        for weights in (True, False)
    )


def merged(model, remainders):
    """The model with float32 masters, bit for bit. remainders None: the model."""
    if remainders is None:
        return model

    def one(weight, remainder):
        return weight if remainder is None else joined_float32(weight, remainder)

    return jax.tree.map(one, model, remainders, is_leaf=lambda leaf: leaf is None)
