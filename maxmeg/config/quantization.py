"""Settings of products in 8-bit floats. No JAX."""

import dataclasses
import enum

from maxmeg.config.setting import setting


class QuantizationRecipe(enum.Enum):
    none = "none"
    tensorwise = "tensorwise"
    blockwise = "blockwise"
    mxfp8 = "mxfp8"


class BlockBackend(enum.Enum):
    auto = "auto"
    xla = "xla"
    mosaic = "mosaic"


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
        "see backend | mxfp8: E4M3, one scale per 32 elements; needs compute capability 10.0 or "
        "newer",
        "--fp8-recipe",
    )
    format: Fp8Format = setting(
        Fp8Format.hybrid,
        "hybrid: E4M3, and E5M2 for gradients of outputs | e4m3: E4M3 for all",
        "--fp8-format",
        needs="recipe=tensorwise",
    )
    backend: BlockBackend = setting(
        BlockBackend.auto,
        "xla: blockwise's products are of operands dequantized to 16 bits, so it saves memory and "
        "communication but no time | mosaic: our kernel for Hopper multiplies the 8-bit operands; "
        "it has not run on a GPU yet | auto: xla, or what benchmarks/gpu.py --choices has measured "
        "to be faster",
        needs="recipe=blockwise",
    )
