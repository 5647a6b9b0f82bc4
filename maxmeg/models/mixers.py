"""The table of mixers, and the pattern of a stack, from a ModelConfig."""

import dataclasses
import functools
import math
from collections.abc import Callable

from maxmeg.config.context import KINDS, strategy_of
from maxmeg.config.layers import ENCODER
from maxmeg.config.mixers import AttentionConfig, ExpertDrop, QkNorm
from maxmeg.config.model import ModelConfig, Position
from maxmeg.config.parallel import ParallelConfig, Schedule
from maxmeg.distributed.attention.context_choice import ContextStrategy
from maxmeg.layers.attention import AttentionSpec
from maxmeg.layers.chunked import ChunkedCrossSpec, NeighbourAttentionSpec
from maxmeg.layers.cross import CrossSpec
from maxmeg.layers.delta import DeltaSpec, KdaSpec
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
from maxmeg.ops.attention.temperature import Temperature
from maxmeg.ops.experts.routing import RoutingSpec, Score
from maxmeg.ops.rope import RotaryScaling, RotarySpec


def norm_spec(config: ModelConfig) -> NormSpec:
    return NormSpec(config.norm.value, config.norm_eps, config.norm_one_plus, config.norm_bias)


def rotary_spec(config: ModelConfig, local: bool = False) -> RotarySpec:
    spec = RotarySpec(
        base=config.rotary.base,
        fraction=config.rotary.fraction,
        interleaved=config.rotary.interleaved,
    )
    if local and config.rotary.local_base:
        return dataclasses.replace(spec, base=config.rotary.local_base)
    scaling = RotaryScaling(
        kind=config.rotary.scaling.value,
        factor=config.rotary.factor,
        original_length=config.rotary.original_length,
        low=config.rotary.low,
        high=config.rotary.high,
        attention_factor=config.rotary.attention_factor,
        truncate=config.rotary.truncate,
        short_factors=config.rotary.short_factors,
        long_factors=config.rotary.long_factors,
    )
    return dataclasses.replace(spec, scaling=scaling)


def hidden_std(config: ModelConfig) -> float:
    """Standard deviation of the initial weights of the layers' matrices that read a width."""
    return config.init_std / config.width_multiplier**0.5


def output_std(config: ModelConfig) -> float:
    """Standard deviation of the initial weights of a sublayer's output projection."""
    depth = (2 * config.num_layers) ** 0.5 if config.scaled_output_init else 1
    return hidden_std(config) / depth


def temperature_of(heads: AttentionConfig) -> Temperature:
    offset = heads.temperature_offset
    return Temperature(heads.temperature_scale, heads.temperature_length, offset)


def attention_spec(
    config: ModelConfig, parallel: ParallelConfig, mixer: str = "attention"
) -> AttentionSpec:
    local, is_rotary = mixer.startswith("local"), config.position is Position.rotary
    is_nope, heads, norm = mixer == "nope_attention", config.attention, norm_spec(config)
    is_rotary &= not is_nope
    normalizes = heads.qk_norm not in (QkNorm.none, *[QkNorm.l2] * is_nope)
    grown = heads.temperature_length and (is_nope or not config.has("nope_attention"))
    relative = config.relative if config.position is Position.relative else None
    return AttentionSpec(
        hidden_size=config.hidden_size,
        num_heads=heads.num_heads,
        num_kv_heads=(heads.local_kv_heads if local else 0) or config.kv_heads,
        head_dim=config.local_head_size if local else config.head_size,
        rotary=rotary_spec(config, local) if is_rotary else None,
        qk_norm=norm if normalizes else None,
        qk_norm_over=heads.qk_norm.value,
        keys_as_values=heads.keys_as_values and not local,
        value_norm=norm if heads.value_norm else None,
        bias_qkv=heads.bias_qkv,
        bias_out=heads.bias_out,
        dropout=heads.dropout,
        causal=heads.causal,
        window=heads.window if local else 0,
        chunk=heads.chunk if local else 0,
        temperature=temperature_of(heads) if grown else None,
        softcap=heads.softcap,
        scale=config.without_mup().attention.scale,
        sinks=heads.sinks,
        output_gate=heads.output_gate,
        buckets=relative.buckets if relative else 0,
        distance=relative.distance if relative else 0,
        backend=heads.backend.value,
        context=ContextStrategy(strategy_of(parallel, mixer), parallel.context_inner),
        std=hidden_std(config),
        out_std=output_std(config),
    )


def encoder_attention_spec(config: ModelConfig, parallel: ParallelConfig) -> AttentionSpec:
    spec = dataclasses.replace(attention_spec(config, parallel), causal=False)
    if not config.has_neighbours:
        return spec
    return NeighbourAttentionSpec(**vars(spec), length=config.retro.neighbour_length)


def cross_spec(config: ModelConfig, parallel: ParallelConfig) -> CrossSpec:
    spec = dataclasses.replace(attention_spec(config, parallel), causal=False, rotary=None)
    return CrossSpec(**vars(dataclasses.replace(spec, buckets=0, distance=0)))


def chunked_cross_spec(
    config: ModelConfig, parallel: ParallelConfig, of_neighbours: bool = False
) -> ChunkedCrossSpec:
    spec = vars(cross_spec(config, parallel))
    return ChunkedCrossSpec(
        **spec, chunk_length=config.retro.chunk_length, of_neighbours=of_neighbours
    )


def encoder_norm_spec(config: ModelConfig, parallel: ParallelConfig) -> EncoderNormSpec:
    return EncoderNormSpec(config.hidden_size, norm_spec(config))


def mla_spec(config: ModelConfig, parallel: ParallelConfig, mixer: str = "mla") -> MlaSpec:
    norm, mla = norm_spec(config), config.mla
    return MlaSpec(
        **vars(attention_spec(config, parallel, mixer)),
        query_rank=mla.query_rank,
        kv_rank=mla.kv_rank,
        rotary_size=mla.rotary_size,
        value_size=config.value_size,
        norm=dataclasses.replace(norm, eps=mla.norm_eps or norm.eps),
    )


def conv_spec(config: ModelConfig, parallel: ParallelConfig) -> ShortConvSpec:
    return ShortConvSpec(
        hidden_size=config.hidden_size,
        kernel_size=config.conv.kernel_size,
        bias=config.conv.bias,
        std=hidden_std(config),
        out_std=output_std(config),
    )


def mamba_spec(config: ModelConfig, parallel: ParallelConfig) -> MambaSpec:
    mamba = config.mamba
    return MambaSpec(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_heads,
        head_dim=mamba.head_dim,
        num_groups=config.mamba_groups,
        state_size=mamba.state_size,
        kernel_size=mamba.kernel_size,
        bias=mamba.bias,
        conv_bias=mamba.conv_bias,
        norm_eps=config.norm_eps if mamba.norm else None,
        chunk=mamba.chunk,
        backend=mamba.backend.value,
        steps=(mamba.min_step, mamba.max_step or math.inf),
        scales=mamba.scales or (1.0,) * 5,
        std=hidden_std(config),
        out_std=output_std(config),
    )


def delta_spec(config: ModelConfig, parallel: ParallelConfig) -> DeltaSpec:
    delta = config.delta
    return DeltaSpec(
        hidden_size=config.hidden_size,
        num_heads=delta.num_heads,
        num_key_heads=config.delta_key_heads,
        key_size=delta.key_size,
        value_size=config.delta_value_size,
        kernel_size=delta.kernel_size,
        norm_eps=config.norm_eps,
        chunk=delta.chunk,
        backend=delta.backend.value,
        std=hidden_std(config),
        out_std=output_std(config),
    )


def kda_spec(config: ModelConfig, parallel: ParallelConfig) -> KdaSpec:
    return KdaSpec(**vars(delta_spec(config, parallel)), rank=config.delta_rank)


def mlp_spec(config: ModelConfig, parallel: ParallelConfig) -> MlpSpec:
    mlp = config.mlp
    return MlpSpec(
        hidden_size=config.hidden_size,
        ffn_size=config.ffn,
        activation=mlp.activation.value,
        bias=mlp.bias,
        std=hidden_std(config),
        out_std=output_std(config),
        clamp=mlp.activation_clamp,
        offset=mlp.glu_offset,
        gate_scale=mlp.gate_scale,
    )


def moe_spec(config: ModelConfig, parallel: ParallelConfig) -> MoeSpec:
    moe, score = config.moe, Score(config.moe.score.value)
    if moe.sinkhorn:
        score = Score.sigmoid if moe.top_k == 1 else Score.softmax
    routing = RoutingSpec(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        score=score,
        softmax_before_topk=moe.softmax_before_topk or moe.sinkhorn,
        normalize_weights=moe.normalize_weights,
        scale=moe.scale,
        num_groups=moe.num_groups,
        topk_groups=moe.topk_groups,
        group_score_topk=moe.group_score_topk,
        sinkhorn=moe.sinkhorn,
        force_balance=moe.force_balance,
    )
    return MoeSpec(
        **vars(
            dataclasses.replace(
                mlp_spec(config, parallel), ffn_size=config.expert_ffn, gate_scale=1.0
            )
        ),
        routing=routing,
        shared_ffn_size=moe.shared_ffn_size,
        shared_gate=moe.shared_gate,
        bias_balancing=moe.bias_balancing,
        bias_rate=moe.bias_rate,
        aux_loss=moe.aux_loss,
        sequence_aux_loss=moe.sequence_aux_loss,
        global_aux_loss=moe.global_aux_loss,
        z_loss=moe.z_loss,
        jitter=moe.jitter,
        latent_size=moe.latent_size,
        scale_inputs=moe.scale_inputs,
        norm=norm_spec(config) if moe.norms else None,
        capacity=moe.capacity_factor,
        drop_by_weight=moe.drop_policy is ExpertDrop.weight,
        pad=moe.pad_to_capacity,
        backend=moe.backend.value,
        logit_bias=moe.logit_bias,
        exchange=parallel.expert_exchange.value,
        buffer=parallel.expert_buffer,
        nodes=parallel.nodes_of_experts(moe.num_groups),
    )


MIXERS: dict[str, Callable[[ModelConfig, ParallelConfig], MixerSpec]] = {
    "attention": attention_spec,
    "local": functools.partial(attention_spec, mixer="local"),
    "raw_attention": functools.partial(attention_spec, mixer="raw_attention"),
    "nope_attention": functools.partial(attention_spec, mixer="nope_attention"),
    "mla": mla_spec,
    "local_mla": functools.partial(mla_spec, mixer="local_mla"),
    "conv": conv_spec,
    "mamba": mamba_spec,
    "gated_delta": delta_spec,
    "kda": kda_spec,
    "mlp": mlp_spec,
    "moe": moe_spec,
    "encoder_attention": encoder_attention_spec,
    "encoder_mlp": mlp_spec,
    "encoder_norm": encoder_norm_spec,
    "encoder_cross": functools.partial(chunked_cross_spec, of_neighbours=True),
    "cross": cross_spec,
    "chunked_cross": chunked_cross_spec,
}


def pattern(config: ModelConfig, parallel: ParallelConfig | None = None) -> Pattern:
    """((residual sublayers of a unit, number of repeats), ...) of the stack.

    Under tensor parallelism, backward of a unit of several layers computes the weight gradients of
    each layer before it goes on to the layer before: else the whole sequences that they read, two
    for each sublayer, would wait in memory. Not where a schedule has a lane for these gradients.
    """
    parallel = parallel or ParallelConfig()
    split = parallel.pipe > 1 and parallel.schedule is Schedule.zero_bubble
    apart = parallel.tensor > 1 and not split

    def sublayers(layers):
        specs = [[sublayer_spec(config, parallel, names) for names in kind] for kind in layers]
        for layer in specs if config.layer_scale else ():
            layer[-1] = dataclasses.replace(layer[-1], has_scale=True)
        for layer in specs[1:]:
            layer[0] = dataclasses.replace(layer[0], after_gradients=apart * len(layer))
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
    specs = [MIXERS[name](config, parallel) for name in mixers]
    scales = {"mamba": config.mamba.output_scale, "mlp": config.mlp.output_scale}
    scales |= dict.fromkeys(KINDS, config.attention.output_scale)
    place = "none" if "raw_attention" in mixers else config.norm_place.value
    return ResidualSpec(
        norm_spec(config),
        tuple(specs),
        dropout=config.dropout_hidden,
        place="post" if "moe" in mixers and config.moe.norms else place,
        own_norms=config.parallel_norms and len(mixers) > 1,
        side=side_of(mixers),
        adds="encoder_norm" not in mixers,
        scales=tuple(config.residual_scale * scales.get(name, 1.0) for name in mixers),
    )
