"""Rotary position embedding (Su et al., 2021) and its extensions to longer sequences."""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Change of the frequencies for sequences up to `factor` times longer than `original_length`.

    kind:
    - "none"; "linear": positions / factor (Chen et al., 2023).
    - "ntk": base * factor^(d / (d - 2)). "dynamic": the same with a factor by the row's length.
    - "llama3": divide frequencies with fewer than `low` turns in original_length by `factor`, keep
      frequencies with more than `high`, interpolate between.
    - "yarn": the same by dimension; `low` is beta slow, `high` beta fast; `truncate`: round to
      whole dimensions (Peng et al., 2023).
    - "proportional": the first 1 / factor of the frequencies, then zeros (Gemma 4).
    - "longrope": divide each frequency by its short_factors entry, or by its long_factors entry in
      rows longer than original_length (Ding et al., 2024).

    With "dynamic" and "longrope" the length of a row changes the rotation of all its positions.
    For generated text (inference/engine.py) it is, with "longrope", the most that the row may
    have; with "dynamic", the tokens so far, and cached keys stay, as in transformers.
    attention_factor multiplies cos and sin; 0: the factor of the YaRN and LongRoPE papers.
    """

    kind: str = "none"
    factor: float = 1.0
    original_length: int = 0
    low: float = 1.0
    high: float = 4.0
    attention_factor: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def amplitude(self) -> float:
        """Factor of cos and sin."""
        if self.attention_factor or self.factor <= 1:
            return self.attention_factor or 1.0
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return 1.0


@dataclasses.dataclass(frozen=True)
class RotarySpec:
    """Rotate the first d = fraction * head_dim elements of each head by position * base^(-2i/d).

    The pairs are (i, i + d/2), or (2i, 2i + 1) if interleaved.
    """

    base: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: RotaryScaling = RotaryScaling()


PLAIN = RotarySpec()


class Rotation(typing.NamedTuple):
    """Cosines and sines of each token's angles times the amplitude, float32 [B, L, 1, size / 2]."""

    cos: jax.Array
    sin: jax.Array


def rotation(
    positions_BL: Int[Array, "B L"],
    head_size: int,
    spec: RotarySpec = PLAIN,
    lengths_B: Int[Array, " B"] | None = None,
) -> Rotation:
    """The rotation of heads of `head_size` elements at these positions, in rows of these lengths
    (None: up to the last position)."""
    size = int(head_size * spec.fraction) // 2 * 2
    if lengths_B is None:
        lengths_B = 1 + jnp.max(positions_BL, axis=1)
    frequency = frequencies(spec, size, lengths_B)  # [size / 2], or per row [B, 1, 1, size / 2]
    angle = positions_BL[:, :, None, None].astype(jnp.float32) * frequency
    amplitude = spec.scaling.amplitude
    return Rotation(amplitude * jnp.cos(angle), amplitude * jnp.sin(angle))


def rotate(
    x_BLHK: Float[Array, "B L H K"], rotation: Rotation, interleaved: bool = False
) -> jax.Array:
    """x with the first `size` elements of each head rotated, in x's dtype."""
    cos, sin = rotation
    size = 2 * cos.shape[-1]
    rotated, rest = x_BLHK[..., :size], x_BLHK[..., size:]
    if interleaved:
        pairs = rotated.astype(jnp.float32).reshape(*rotated.shape[:-1], size // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(rotated.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        out = jnp.stack(turned, axis=-1).reshape(rotated.shape)
    else:
        out = jnp.concatenate(turned, axis=-1)
    return jnp.concatenate((out.astype(x_BLHK.dtype), rest), axis=-1)


def frequencies(spec: RotarySpec, size: int, lengths_B: jax.Array) -> jax.Array:
    """Radians per position; per row if they depend on its length."""
    scaling = spec.scaling
    exponents = np.arange(0, size, 2) / size
    plain = spec.base**-exponents
    if scaling.kind in STATIC:
        return jnp.asarray(STATIC[scaling.kind](scaling, plain, spec.base), jnp.float32)
    lengths_B111 = lengths_B[:, None, None, None]
    original = scaling.original_length
    if scaling.kind == "longrope":
        short, long = (plain / np.array(f) for f in (scaling.short_factors, scaling.long_factors))
        return jnp.where(lengths_B111 > original, jnp.float32(long), jnp.float32(short))
    assert scaling.kind == "dynamic", scaling.kind
    ratio_B111 = jnp.maximum(lengths_B111, original).astype(jnp.float32) / original
    growth_B111 = (scaling.factor * ratio_B111 - (scaling.factor - 1)) ** (size / (size - 2))
    return jnp.float32(plain) * growth_B111 ** -jnp.float32(exponents)


def ntk(scaling: RotaryScaling, plain: np.ndarray, base: float) -> np.ndarray:
    size = 2 * plain.size
    return plain * scaling.factor ** (-np.arange(0, size, 2) / (size - 2))


def llama3(scaling: RotaryScaling, plain: np.ndarray, base: float) -> np.ndarray:
    turns = scaling.original_length * plain / (2 * math.pi)
    weights = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return plain * (weights + (1 - weights) / scaling.factor)


def yarn(scaling: RotaryScaling, plain: np.ndarray, base: float) -> np.ndarray:
    size = 2 * plain.size

    def dimension(turns: float) -> float:
        """The fractional dimension with this number of turns in original_length."""
        waves = scaling.original_length / (2 * math.pi * turns)
        return size * math.log(waves) / (2 * math.log(base))

    first, last = dimension(scaling.high), dimension(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 * (first == last)
    divided = np.clip((np.arange(plain.size) - first) / (last - first), 0, 1)
    return plain * (1 - divided + divided / scaling.factor)


def proportional(scaling: RotaryScaling, plain: np.ndarray, base: float) -> np.ndarray:
    rotated = int(plain.size / scaling.factor + 1e-6)
    return np.where(np.arange(plain.size) < rotated, plain, 0)


STATIC = {
    "proportional": proportional,
    "none": lambda scaling, plain, base: plain,
    "linear": lambda scaling, plain, base: plain / scaling.factor,
    "ntk": ntk,
    "llama3": llama3,
    "yarn": yarn,
}
