"""Settings of products in 8 and 4 bits. No JAX."""

import dataclasses
import enum

from maxmeg.config.setting import Section, setting


class QuantizationRecipe(enum.Enum):
    none = "none"
    tensorwise = "tensorwise"
    blockwise = "blockwise"
    mxfp8 = "mxfp8"
    nvfp4 = "nvfp4"
    mxfp4 = "mxfp4"
    qat_nvfp4 = "qat_nvfp4"
    qat_mxfp4 = "qat_mxfp4"
    qat_int8 = "qat_int8"


class BlockBackend(enum.Enum):
    auto = "auto"
    xla = "xla"
    mosaic = "mosaic"


class Fp8Format(enum.Enum):
    hybrid = "hybrid"
    e4m3 = "e4m3"


@dataclasses.dataclass(repr=False)
class QuantizationConfig(Section):
    """Matrix products of 8-bit and 4-bit numbers in the layers."""

    recipe: QuantizationRecipe = setting(
        QuantizationRecipe.none,
        "tensorwise: the layers' projections multiply 8-bit inputs, weights and gradients, with "
        "one scale per tensor; attention, embedding, output layer, router and norms stay in "
        "model.dtype; needs GPUs of compute capability 8.9 or newer (CPUs emulate it) | blockwise: "
        "E4M3, one scale per 128 inputs or gradients and per 128 x 128 weights (DeepSeek-V3); "
        "see backend | mxfp8: E4M3, one scale per 32 elements; needs compute capability 10.0 or "
        "newer | nvfp4: E2M1, one E4M3 scale per 16 elements, Hadamard transforms before weight "
        "gradients, gradients rounded stochastically; needs compute capability 10.0 or newer | "
        "mxfp4: forward rounds weights and inputs to E2M1 with one scale per 32 elements, backward "
        "multiplies them in model.dtype; emulated with 16-bit products, so it saves memory and "
        "communication but no time | qat_nvfp4, qat_mxfp4, qat_int8: quantization-aware training "
        "for a model that will be served in this format: forward rounds weights and inputs "
        "(qat_mxfp4: weights alone), backward multiplies them in model.dtype",
        "--fp8-recipe, --fp4-recipe",
    )
    format: Fp8Format = setting(
        Fp8Format.hybrid,
        "hybrid: E4M3, and E5M2 for gradients of outputs | e4m3: E4M3 for all",
        "--fp8-format",
        needs="recipe=tensorwise",
    )
    dispatch: bool = setting(
        False,
        "send tokens to experts in E4M3, and in backward the gradients of the experts' outputs; "
        "the way back stays in model.dtype (DeepSeek-V3). Needs parallel.expert",
        needs="recipe=tensorwise|blockwise|mxfp8",
    )
    backend: BlockBackend = setting(
        BlockBackend.auto,
        "matrix products of blockwise. xla: operands are dequantized to 16 bits, which saves "
        "memory and communication but no time | mosaic: our kernel for Hopper multiplies the 8-bit "
        "operands (of experts with model.moe.backend=batched or mosaic); it has not run on a GPU "
        "yet | auto: xla, or the backend that benchmarks/gpu.py --choices has measured as faster",
        needs="recipe=blockwise",
    )
