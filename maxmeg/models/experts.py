"""How a ModelConfig describes a layer's mixture of experts."""

import dataclasses

from maxmeg.config.model import ExpertDrop, ModelConfig
from maxmeg.config.schema import ParallelConfig
from maxmeg.layers.moe import MoeSpec, RoutingSpec, Score


def moe_spec(config: ModelConfig, out_std: float) -> MoeSpec:
    score, over_all = Score(config.router_score.value), config.router_over_all
    if config.router_sinkhorn:
        score = Score.sigmoid if config.experts_per_token == 1 else Score.softmax
    routing = RoutingSpec(
        num_experts=config.num_experts,
        top_k=config.experts_per_token,
        score=score,
        before=over_all or config.router_sinkhorn,
        normalize=config.router_normalize,
        scale=config.router_scale,
        groups=config.router_groups,
        groups_kept=config.router_groups_kept,
        group_best=config.router_group_best,
        sinkhorn=config.router_sinkhorn,
        in_turn=config.benchmark_even_experts,
    )
    return MoeSpec(
        hidden_size=config.hidden_size,
        ffn_size=config.expert_ffn,
        routing=routing,
        activation=config.activation.value,
        bias=config.bias_mlp,
        shared_size=config.shared_ffn_size,
        shared_gate=config.shared_gate,
        biased=config.router_bias,
        aux_loss=config.router_aux_loss,
        sequence_aux_loss=config.router_sequence_aux_loss,
        global_aux_loss=config.router_global_aux_loss,
        z_loss=config.router_z_loss,
        jitter=config.router_jitter,
        latent_size=config.expert_latent_size,
        capacity=config.expert_capacity,
        by_weight=config.expert_drop is ExpertDrop.weight,
        pad=config.expert_pad,
        backend=config.expert_backend.value,
        std=config.init_std,
        out_std=out_std,
        clamp=config.activation_clamp,
        offset=config.glu_offset,
        logit_bias=config.router_logit_bias,
    )


def placed(pattern, parallel: ParallelConfig):
    """A pattern of layers whose experts lie on devices as `parallel` says."""
    options = {
        "exchange": parallel.expert_exchange.value,
        "buffer": parallel.expert_buffer,
    }

    def mixer(spec):
        return dataclasses.replace(spec, **options) if isinstance(spec, MoeSpec) else spec

    def sublayer(spec):
        return dataclasses.replace(spec, mixers=tuple(mixer(one) for one in spec.mixers))

    return tuple((tuple(sublayer(one) for one in unit), repeats) for unit, repeats in pattern)
