"""The specs of mixers by name, and the pattern of a stack, from a ModelConfig."""

import dataclasses

from maxmeg.config.context import KINDS
from maxmeg.config.layers import ENCODER, MIXERS
from maxmeg.config.model import ModelConfig
from maxmeg.config.model_rules import MLP
from maxmeg.config.parallel import ParallelConfig, Schedule
from maxmeg.layers.attention import AttentionSpec
from maxmeg.layers.chunked import ChunkedCrossSpec, NeighbourAttentionSpec
from maxmeg.layers.cross import CrossSpec
from maxmeg.layers.delta import DeltaSpec, KdaSpec
from maxmeg.layers.layer_embedding import LayerEmbeddingSpec
from maxmeg.layers.mamba import MambaSpec
from maxmeg.layers.mixer import MixerSpec
from maxmeg.layers.mla import MlaSpec
from maxmeg.layers.mlp import MlpSpec
from maxmeg.layers.moe import MoeSpec
from maxmeg.layers.norm import NormSpec
from maxmeg.layers.residual import ResidualSpec
from maxmeg.layers.short_conv import ShortConvSpec
from maxmeg.layers.stream import EncoderNormSpec, Side
from maxmeg.models.stack import Pattern, UnitSpec

SPECS: tuple[type[MixerSpec], ...] = (AttentionSpec, ChunkedCrossSpec, CrossSpec, DeltaSpec)
SPECS += (EncoderNormSpec, KdaSpec, LayerEmbeddingSpec, MambaSpec, MlaSpec, MlpSpec, MoeSpec)
SPECS += (ShortConvSpec,)
BY_NAME = {spec.__name__: spec for spec in SPECS}


def mixer_spec(config: ModelConfig, parallel: ParallelConfig, mixer: str) -> MixerSpec:
    of_neighbours = mixer == "encoder_attention" and config.has_neighbours
    kind = NeighbourAttentionSpec if of_neighbours else BY_NAME[MIXERS[mixer][0]]
    return kind.of(config, parallel, mixer)


def pattern(config: ModelConfig, parallel: ParallelConfig | None = None) -> Pattern:
    """((residual sublayers of a unit, number of repeats), ...) of the stack.

    Under tensor parallelism, backward of a unit of several layers computes the weight gradients of
    each layer before it goes on to the layer before: else the whole sequences that they read, two
    for each sublayer, would wait in memory. Not where a schedule has a lane for these gradients.
    """
    parallel = parallel or ParallelConfig()
    split = parallel.pipe > 1 and parallel.schedule is Schedule.zero_bubble
    one_by_one = parallel.tensor > 1 and not split

    def sublayers(layers):
        specs = [[sublayer_spec(config, parallel, names) for names in kind] for kind in layers]
        for layer in specs if config.layer_scale else ():
            layer[-1] = dataclasses.replace(layer[-1], has_scale=True)
        for layer in specs[1:]:
            layer[0] = dataclasses.replace(layer[0], after_gradients=one_by_one * len(layer))
        return tuple(spec for layer in specs for spec in layer)

    return tuple((sublayers(layers), repeats) for layers, repeats in config.groups)


def mtp_unit(config: ModelConfig, parallel: ParallelConfig | None = None) -> UnitSpec:
    """The sublayers of each MTP layer."""
    parallel = parallel or ParallelConfig()
    return tuple(sublayer_spec(config, parallel, names) for names in config.mtp_layer)


def unit_costs(config: ModelConfig) -> tuple[int, ...]:
    """Of a unit of each group of the stack: number of weights that a token is multiplied with."""
    units = [unit for unit, _ in pattern(config)]
    return tuple(sum(one.weights() for part in unit for one in part.mixers) for unit in units)


def side_of(mixers: tuple[str, ...]) -> Side:
    """The side that a sublayer belongs to: the source's in an encoder-decoder's encoder."""
    return "source" if set(mixers) <= set(ENCODER) else "target"


def sublayer_spec(
    config: ModelConfig, parallel: ParallelConfig, mixers: tuple[str, ...]
) -> ResidualSpec:
    specs = [mixer_spec(config, parallel, name) for name in mixers]
    scales = {"mamba": config.mamba.output_scale} | dict.fromkeys(MLP, config.mlp.output_scale)
    scales |= dict.fromkeys(KINDS, config.attention.output_scale)
    place = "none" if "raw_attention" in mixers else config.norm_place.value
    of_output = "layer_embedding" in mixers or ("moe" in mixers and config.moe.norms)
    return ResidualSpec(
        NormSpec.of(config),
        tuple(specs),
        dropout=config.dropout_hidden,
        place="post" if of_output else place,
        own_norms=config.parallel_norms and len(mixers) > 1,
        side=side_of(mixers),
        adds="encoder_norm" not in mixers,
        scales=tuple(config.residual_scale * scales.get(name, 1.0) for name in mixers),
    )
