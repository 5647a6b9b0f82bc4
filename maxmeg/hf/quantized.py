"""Weights in full, whatever they are stored in: the one place that chooses among the views."""

import typing
from collections.abc import Callable, Mapping

from maxmeg.hf.fp8 import Fp8Weights
from maxmeg.hf.keys import REMEDIES, refused
from maxmeg.hf.mxfp4 import Mxfp4Weights

QUANTIZATION = "quantization_config"
Config = Mapping[str, typing.Any]
# What stands for the weights, of the weights themselves and of what config.json says of them.
VIEWS: Mapping[str, Callable[[typing.Any, Config], typing.Any]] = {
    "mxfp4": lambda weights, _: Mxfp4Weights(weights),
    "fp8": Fp8Weights,
}


def in_full(config: Config, weights: typing.Any) -> tuple[Config, typing.Any]:
    """config.json and weights of a model that is no longer quantized; the same ones if it is not.

    ValueError naming a method that is not read.
    """
    settings = config.get(QUANTIZATION)
    if settings is None:
        return config, weights
    view = VIEWS.get(str(settings.get("quant_method"))) if isinstance(settings, dict) else None
    if view is None:
        raise refused(QUANTIZATION, settings, REMEDIES[QUANTIZATION])
    rest = {name: value for name, value in config.items() if name != QUANTIZATION}
    return rest, view(weights, settings)
