"""Settings of products in 8-bit floats. No JAX."""

import dataclasses
import enum

from maxmeg.config.setting import setting


class QuantizationRecipe(enum.Enum):
    none = "none"
    tensorwise = "tensorwise"
    blockwise = "blockwise"
    mxfp8 = "mxfp8"


class Fp8Format(enum.Enum):
    hybrid = "hybrid"
    e4m3 = "e4m3"


@dataclasses.dataclass
class QuantizationConfig:
    """Matrix products of 8-bit floats in the layers."""

    recipe: QuantizationRecipe = setting(
        QuantizationRecipe.none,
        "tensorwise: the layers' projections multiply 8-bit inputs, weights and gradients, with "
        "one scale per tensor; attention, embedding, output layer, router and norms stay in "
        "model.dtype; needs GPUs of compute capability 8.9 or newer (CPUs emulate it) | blockwise: "
        "E4M3, one scale per 128 inputs or gradients and per 128 x 128 weights (DeepSeek-V3); "
        "emulated with 16-bit products, so it saves memory and communication but no time | mxfp8: "
        "E4M3, one scale per 32 elements; needs compute capability 10.0 or newer",
        "--fp8-recipe",
    )
    format: Fp8Format = setting(
        Fp8Format.hybrid,
        "hybrid: E4M3, and E5M2 for gradients of outputs | e4m3: E4M3 for all",
        "--fp8-format",
        needs="recipe=tensorwise",
    )
    dispatch: bool = setting(
        False,
        "send tokens to experts in E4M3, and in backward the gradients of their outputs; what "
        "experts send back stays in model.dtype (DeepSeek-V3). Needs parallel.expert",
        needs="recipe",
    )
