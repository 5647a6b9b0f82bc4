"""The recipes of train.quantization by name."""

import dataclasses

from maxmeg.config.quantization import (
    AmaxAlgorithm,
    Fp8Format,
    QuantizationConfig,
    QuantizationRecipe,
)
from maxmeg.ops.backend import BLACKWELL
from maxmeg.ops.fp4 import Mxfp4, Nvfp4
from maxmeg.ops.quantized import BLOCK, MX_BLOCK, AmaxHistory, Recipe
from maxmeg.ops.straight_through import Int8, straight_through

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
RECIPES = {
    QuantizationRecipe.tensorwise: Recipe(backward=E4M3),
    QuantizationRecipe.delayed: Recipe(backward=E4M3),
    QuantizationRecipe.blockwise: Recipe(
        backward=E4M3, block=BLOCK, square=True, multiplies_codes=False
    ),
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
    is_delayed = config.recipe is QuantizationRecipe.delayed
    if recipe and (is_delayed or config.recipe is QuantizationRecipe.tensorwise):
        history = None
        if is_delayed:
            latest = config.amax_algorithm is AmaxAlgorithm.most_recent
            history = AmaxHistory(config.amax_history_length, latest, config.margin)
        backward = E5M2 if config.format is Fp8Format.hybrid else E4M3
        recipe = dataclasses.replace(recipe, backward=backward, history=history)
    return recipe
