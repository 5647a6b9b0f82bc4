"""The recipes of train.quantization by name."""

import dataclasses

from maxmeg.config.quantization import Fp8Format, QuantizationConfig, QuantizationRecipe
from maxmeg.ops.backend import BLACKWELL
from maxmeg.ops.fp4 import Mxfp4, Nvfp4
from maxmeg.ops.quantized import BLOCK, E4M3, E5M2, MX_BLOCK, Recipe
from maxmeg.ops.straight_through import Int8, straight_through

RECIPES = {
    QuantizationRecipe.tensorwise: Recipe(backward=E4M3),
    QuantizationRecipe.blockwise: Recipe(backward=E4M3, block=BLOCK, square=True),
    QuantizationRecipe.mxfp8: Recipe(
        backward=E4M3, block=MX_BLOCK, copies=2, capability=(BLACKWELL, 0)
    ),
    QuantizationRecipe.nvfp4: Nvfp4(square=True),
    QuantizationRecipe.mxfp4: straight_through(Mxfp4()),
    QuantizationRecipe.qat_nvfp4: straight_through(Nvfp4()),
    QuantizationRecipe.qat_mxfp4: straight_through(Mxfp4(), rounds_inputs=False),
    QuantizationRecipe.qat_int8: straight_through(Int8()),
}


def recipe_of(config: QuantizationConfig) -> Recipe | None:
    """The recipe that the settings name; None: products are not quantized."""
    recipe = RECIPES.get(config.recipe)
    if recipe is None:
        return None
    is_tensorwise = config.recipe is QuantizationRecipe.tensorwise
    is_hybrid = is_tensorwise and config.format is Fp8Format.hybrid
    return dataclasses.replace(
        recipe,
        backward=E5M2 if is_hybrid else recipe.backward,
        backend=config.backend.value,
        dispatch=config.dispatch,
    )
