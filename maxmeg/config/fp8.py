"""Settings of products in 8-bit floats. No JAX."""

import dataclasses
import enum

from maxmeg.config.setting import setting


class Fp8Recipe(enum.Enum):
    none = "none"
    tensorwise = "tensorwise"


class Fp8Format(enum.Enum):
    hybrid = "hybrid"
    e4m3 = "e4m3"


@dataclasses.dataclass
class Fp8Config:
    """Which products of the layers round their operands to 8-bit floats."""

    recipe: Fp8Recipe = setting(
        Fp8Recipe.none,
        "tensorwise: projections of the layers multiply inputs, weights and gradients in 8 bits, "
        "each with one scale; attention, embedding, output layer, router and norms do not; needs "
        "GPUs from Ada or Hopper on (CPUs compute the same numbers, slowly)",
        "--fp8-recipe",
    )
    format: Fp8Format = setting(
        Fp8Format.hybrid,
        "hybrid: E4M3, and E5M2 for gradients of outputs | e4m3: E4M3 for all",
        "--fp8-format",
        needs="recipe=tensorwise",
    )
