"""Small optimizer states: moments of 8 or 16 bits, and masters as bfloat16 weights + remainders.

Moments of matrices are decoded to float32 for each update, and encoded after it with stochastic
rounding. Their random bits are a hash of the step's key and of global indices, so that they are the
same on every mesh. Vectors, which are few, stay in float32.

Codes of 8 bits have a scale, a power of two, for each block of at most 128 neighbours along the
last dimension. First moments are float8_e4m3fn; second moments, which have no sign, have 5 bits of
exponent and 3 of mantissa (uint8). Both are rounded without bias: if instead their square roots
were, beta2 = 0.999 would inflate the second moment without limit.
"""

import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxmeg.config.schema import Moments
from maxmeg.ops.random import fold, random_bits
from maxmeg.parallel.ordering import together
from maxmeg.parallel.parameter import info, is_variable, replaced

BLOCK = 128  # largest number of elements with one scale
FIRST, SECOND = ("mu", "trace"), ("nu",)  # fields of optimizer states
MIN_SECOND = 768  # code 1 of a second moment is the float32 with the upper bits 769, 2**-31 * 1.125
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


def element_bits(shape: tuple[int, ...], key: jax.Array, order=None) -> jax.Array:
    """32 random bits of each element. order: the layer in each row, if not the row's number."""
    row = jnp.uint32(0)
    for dim, size in enumerate(shape[:-1]):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape[:-1], dim)
        if dim == 0 and order is not None:
            layers = jnp.asarray(order, jnp.int32).reshape(-1, *[1] * (len(shape) - 2))
            index = jnp.broadcast_to(layers, shape[:-1]).astype(jnp.uint32)  # padding is -1
        row = row * size + index
    return random_bits(shape, key, row)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """float32 numbers, stochastically rounded: up with the probability of the part cut off."""
    upper = (_bits(x) + (bits >> 16)) >> 16
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)


def block_size(size: int) -> int:
    """Elements of a block along a dimension: the largest divisor of its size up to BLOCK."""
    return max(n for n in range(1, min(size, BLOCK) + 1) if size % n == 0)


def scale_of(x: jax.Array, largest: int) -> jax.Array:
    """[..., blocks]: the powers of two s with max |x| / s in [2**largest, 2**(largest + 1))."""
    blocks = x.reshape(*x.shape[:-1], -1, block_size(x.shape[-1]))
    exponent = (_bits(jnp.max(jnp.abs(blocks), axis=-1)) >> 23).astype(jnp.int32)
    return _float(jnp.clip(exponent - largest, 1, 254) << 23)


def of_elements(scale: jax.Array, size: int) -> jax.Array:
    """[..., size]: the scale of each element's block."""
    return jnp.repeat(scale, size // scale.shape[-1], axis=-1)


def to_float8(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(float8_e4m3fn codes, scales) of float32 numbers, stochastically rounded."""
    scale = scale_of(x, 7)
    y = x / of_elements(scale, x.shape[-1])
    exponent = jnp.maximum((_bits(y) >> 23) & 255, 127 - 6)  # that of subnormal codes, or more
    step = _float((exponent - 3) << 23)
    uniform = (bits >> 12).astype(jnp.float32) * np.float32(2**-20)  # the sum below is exact
    steps = jnp.floor(jnp.abs(y) / step + uniform).astype(jnp.uint32)  # 8 to 16, or of a subnormal
    codes = (_bits(y) >> 31 << 7) + (exponent - 121) * 8 + steps
    return jax.lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn), scale


def of_float8(codes: jax.Array, scale: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32) * of_elements(scale, codes.shape[-1])


def to_squares(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(uint8 codes, scales) of float32 numbers >= 0, stochastically rounded. Code 0 is 0 alone:
    numbers too small for code 1 are rounded up to it, as a root of 0 would be divided by."""
    scale = scale_of(x, -1)
    upper = (_bits(x / of_elements(scale, x.shape[-1])) + (bits >> 12)) >> 20
    codes = jnp.clip(upper.astype(jnp.int32) - MIN_SECOND, 1, 255)
    return jnp.where(x > 0, codes, 0).astype(jnp.uint8), scale


def of_squares(codes: jax.Array, scale: jax.Array) -> jax.Array:
    y = _float((codes.astype(jnp.uint32) + MIN_SECOND) << 20)
    return jnp.where(codes > 0, y * of_elements(scale, codes.shape[-1]), 0)


def has_remainder(variable: nnx.Variable) -> bool:
    """Whether optim.masters=remainders divides the variable: weights that are trained and computed
    in bfloat16."""
    return (
        variable.get_value() is not None
        and info(variable).is_trained
        and not info(variable).is_exact
    )


def divided(model):
    """(the model with bfloat16 weights, a tree of remainders, uint16), from float32 masters.

    A weight is its master, rounded to the nearest (ties away from zero); the remainder is the
    master's low 16 bits. `merged` is the inverse.
    """

    def one(variable: nnx.Variable, weights: bool) -> nnx.Variable:
        if not has_remainder(variable):
            return variable if weights else variable.replace(None)
        bits = _bits(variable.get_value())
        if not weights:
            return variable.replace(bits.astype(jnp.uint16))
        upper = ((bits + 0x8000) >> 16).astype(jnp.uint16)
        return variable.replace(jax.lax.bitcast_convert_type(upper, jnp.bfloat16))

    return tuple(
        jax.tree.map(lambda v, w=weights: one(v, w), model, is_leaf=is_variable)
        for weights in (True, False)
    )


def merged(model, remainders):
    """The model with float32 masters, bit for bit. remainders None: the model."""
    if remainders is None:
        return model

    def one(weight, remainder):
        if remainder is None:
            return weight
        upper = jax.lax.bitcast_convert_type(weight, jnp.uint16) - (remainder >> 15)
        return _float((upper.astype(jnp.uint32) << 16) | remainder)

    return jax.tree.map(one, model, remainders, is_leaf=lambda leaf: leaf is None)
