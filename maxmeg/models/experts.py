"""How a ModelConfig describes a layer's mixture of experts."""

from maxmeg.config.model import ExpertDrop, ModelConfig
from maxmeg.layers.moe import MoeSpec, RoutingSpec, Score


def moe_spec(config: ModelConfig, out_std: float) -> MoeSpec:
    routing = RoutingSpec(
        num_experts=config.num_experts,
        top_k=config.experts_per_token,
        score=Score(config.router_score.value),
        before=config.router_over_all,
        normalize=config.router_normalize,
        scale=config.router_scale,
        groups=config.router_groups,
        groups_kept=config.router_groups_kept,
        group_best=config.router_group_best,
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
        z_loss=config.router_z_loss,
        capacity=config.expert_capacity,
        by_weight=config.expert_drop is ExpertDrop.weight,
        backend=config.expert_backend.value,
        std=config.init_std,
        out_std=out_std,
        clamp=config.activation_clamp,
        offset=config.glu_offset,
        logit_bias=config.router_logit_bias,
    )
