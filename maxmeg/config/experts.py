"""Rules of the settings of experts. No JAX."""

from maxmeg.config.architecture import divisors
from maxmeg.config.model import ModelConfig

OPTIONS_OF_EXPERTS = {  # the setting without which these have no effect
    "num_experts": (
        "experts_per_token", "expert_ffn_size", "shared_ffn_size", "first_dense_layers",
        "router_score", "router_over_all", "router_normalize", "router_scale", "router_groups",
        "router_bias", "router_logit_bias", "router_aux_loss", "router_sequence_aux_loss",
        "router_z_loss", "expert_capacity", "expert_backend",
    ),
    "shared_ffn_size": ("shared_gate",),
    "router_groups": ("router_groups_kept", "router_group_best"),
    "router_bias": ("router_bias_rate",),
    "expert_capacity": ("expert_drop",),
}  # fmt: skip


def expert_problems(model: ModelConfig):
    experts, chosen, plain = model.num_experts, model.experts_per_token, ModelConfig()
    for needed, names in OPTIONS_OF_EXPERTS.items():
        if getattr(model, needed) == getattr(plain, needed):
            changed = [n for n in names if getattr(model, n) != getattr(plain, n)]
            if changed:
                shown = ", ".join(f"model.{n}={getattr(model, n)}" for n in changed)
                yield f"{shown} has no effect without model.{needed}: set that, or leave this out"
    if not experts:
        return
    groups, kept = model.router_groups, model.router_groups_kept
    if not 1 <= chosen <= experts:
        yield f"model.experts_per_token={chosen} must be from 1 to num_experts={experts}"
    if groups < 1 or experts % groups:
        yield (
            f"model.router_groups={groups} does not divide num_experts={experts}: choose it in "
            f"{divisors(experts)}"
        )
    elif not 1 <= kept <= groups or chosen > kept * (experts // groups):
        yield (
            f"model.router_groups_kept={kept} of router_groups={groups}, each of "
            f"{experts // groups} experts, must hold experts_per_token={chosen}: keep more groups, "
            f"at most {groups}"
        )
    elif not 0 <= model.router_group_best <= experts // groups:
        yield (
            f"model.router_group_best={model.router_group_best} must be from 0 to the "
            f"{experts // groups} experts of a group"
        )
    if not 0 <= model.first_dense_layers < model.num_layers:
        yield (
            f"model.first_dense_layers={model.first_dense_layers} must leave some of "
            f"num_layers={model.num_layers} for the experts"
        )
    if model.first_dense_layers and model.attention_global_every:
        yield "model.first_dense_layers cannot be beside attention_global_every: set one to 0"
    if model.parallel_block:
        yield "model.num_experts cannot be in a parallel_block: set num_experts=0, or that to false"
