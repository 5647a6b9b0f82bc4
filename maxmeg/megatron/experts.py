"""Experts in Megatron-LM's checkpoints: the names of their tensors, and their arguments.

An expert has tensors of its own (`experts.experts.3.linear_fc1.weight`), or they are stacked over
experts, or over layers and experts: `locate` of convert.py finds each of these forms.
"""

import typing
from collections.abc import Mapping

from maxmeg.config.mixers import ExpertDrop, RouterScore

Arguments = Mapping[str, typing.Any]
Names = dict[str | tuple[str, ...], str]

FIRST, LAST = "mlp.experts.experts.{}.linear_fc1", "mlp.experts.experts.{}.linear_fc2"
SHARED = "mlp.shared_experts."
ROUTER = {
    "moe.router": "mlp.router.weight",
    "moe.logit_bias": "mlp.router.bias",
    "moe.bias": "mlp.router.expert_bias",
    "moe.shared_gate.weight": f"{SHARED}gate_weight",
}
SCORES = {
    "softmax": RouterScore.softmax,
    "sigmoid": RouterScore.sigmoid,
    "sqrtsoftplus": RouterScore.sqrt_softplus,
}
DROPS = {"probs": ExpertDrop.weight, "position": ExpertDrop.position}
# Arguments of features that maxmeg lacks, and the values that switch them off.
WITHOUT_EFFECT: dict[str, tuple] = {
    "moe_latent_size": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_router_force_load_balancing": (None, False),
}


def unsupported(arguments: Arguments, without_effect: Mapping[str, tuple]) -> list[str]:
    """Return the arguments that switch on features that maxmeg lacks, as errors show them."""
    return [
        f"{name}={arguments[name]!r}"
        for name, values in without_effect.items()
        if name in arguments and arguments[name] not in values
    ]


def chosen(
    arguments: Arguments,
    name: str,
    default: str,
    table: Mapping[str, typing.Any],
    refused: list[str],
) -> typing.Any:
    """Return the table's entry for an argument; append a value that is not in it to `refused`."""
    value = arguments.get(name) or default
    if value not in table:
        refused.append(f"{name}={value!r} (supported are {', '.join(table)})")
    return table.get(value)


def names(gated: bool) -> tuple[Names, Names, Names]:
    """Return `layers`, `arrays` and `experts` of a Family."""

    def first(start: str, end: str = "") -> str | tuple[str, ...]:
        """Return the names fused in the first projection: [gate; up] are one tensor."""
        return (f"{start}gate{end}", f"{start}up{end}") if gated else f"{start}up{end}"

    modules: Names = {
        first("moe.shared."): f"{SHARED}linear_fc1",
        "moe.shared.out": f"{SHARED}linear_fc2",
    }
    experts: Names = {
        first("moe.experts."): f"{FIRST}.weight",
        "moe.experts.out": f"{LAST}.weight",
        first("moe.experts.", "_bias"): f"{FIRST}.bias",
        "moe.experts.out_bias": f"{LAST}.bias",
    }
    return modules, {**ROUTER}, experts


def expert_fields(arguments: Arguments, refused: list[str]) -> dict[str, typing.Any]:
    """Return fields of ModelConfig, none without experts; append unsupported ones to `refused`."""
    if not arguments.get("num_experts"):
        return {}
    refused += unsupported(arguments, WITHOUT_EFFECT)
    count = arguments.get("moe_router_topk") or 2
    score = chosen(arguments, "moe_router_score_function", "softmax", SCORES, refused)
    softmax = score is RouterScore.softmax
    balanced = arguments.get("moe_router_load_balancing_type") or ()
    fields = {
        "moe.num_experts": arguments["num_experts"],
        "moe.top_k": count,
        "moe.ffn_size": arguments.get("moe_ffn_hidden_size") or 0,
        "moe.shared_ffn_size": arguments.get("moe_shared_expert_intermediate_size") or 0,
        "moe.shared_gate": bool(arguments.get("moe_shared_expert_gate")),
        "moe.score": score,
        "moe.softmax_before_topk": softmax and bool(arguments.get("moe_router_pre_softmax")),
        "moe.normalize_weights": not softmax and count > 1,
        "moe.scale": float(arguments.get("moe_router_topk_scaling_factor") or 1.0),
        "moe.bias_balancing": bool(arguments.get("moe_router_enable_expert_bias")),
        "moe.logit_bias": bool(arguments.get("add_bias_linear", True)),
        "moe.sinkhorn": balanced in ("sinkhorn", ["sinkhorn"]),
        "moe.scale_inputs": bool(arguments.get("moe_apply_probs_on_input")),
        **placement(arguments, refused),
    }
    if topk_groups := arguments.get("moe_router_group_topk"):
        fields["moe.num_groups"] = arguments.get("moe_router_num_groups") or 1
        fields["moe.topk_groups"] = topk_groups
    if capacity := arguments.get("moe_expert_capacity_factor"):
        fields["moe.capacity_factor"] = float(capacity)
        drop_policy = chosen(arguments, "moe_token_drop_policy", "probs", DROPS, refused)
        fields["moe.drop_policy"] = drop_policy
        fields["moe.pad_to_capacity"] = bool(arguments.get("moe_pad_expert_input_to_capacity"))
    return fields


def placement(arguments: Arguments, refused: list[str]) -> dict[str, typing.Any]:
    """Return which layers are dense: moe_layer_freq is n (every n-th) or a list of 0 and 1."""
    every, layers = arguments.get("moe_layer_freq"), arguments["num_layers"]
    every = 1 if every is None else every
    if type(every) is int and every > 0:
        return {"dense": {layer for layer in range(layers) if layer % every}}
    if isinstance(every, list) and len(every) == layers and {*every} <= {0, 1}:
        return {"dense": {layer for layer in range(layers) if not every[layer]}}
    refused.append(f"moe_layer_freq={every!r} of {layers} layers")
    return {}
