"""Experts of Megatron's checkpoints: names of their tensors, and what the arguments say of them.

An expert's tensors lie by themselves (`experts.experts.3.linear_fc1.weight`), stacked under one
name, or stacked with those of all layers: `locate` of megatron.py finds each of them.
"""

import typing
from collections.abc import Mapping

from maxmeg.config.model import ExpertDrop, RouterScore

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
# Arguments that would change the maths, and the values with which they do not.
WITHOUT_EFFECT: dict[str, tuple] = {
    "moe_apply_probs_on_input": (None, False),
    "moe_latent_size": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_router_force_load_balancing": (None, False),
}


def names(gated: bool) -> tuple[Names, Names, Names]:
    """Modules, arrays and experts of a layer, as a Family has them."""

    def first(start: str, end: str = "") -> str | tuple[str, ...]:
        """[gate; up] are one tensor."""
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


def fields(arguments: Arguments, refused: list[str]) -> dict[str, typing.Any]:
    """Fields of ModelConfig; none without experts. What ours has not is added to `refused`."""
    if not arguments.get("num_experts"):
        return {}
    refused += [
        f"{name}={arguments[name]!r}"
        for name, values in WITHOUT_EFFECT.items()
        if name in arguments and arguments[name] not in values
    ]

    def chosen(name: str, default: str, table: Mapping[str, typing.Any]) -> typing.Any:
        value = arguments.get(name) or default
        if value not in table:
            refused.append(f"{name}={value!r} (supported are {', '.join(table)})")
        return table.get(value)

    count = arguments.get("moe_router_topk") or 2
    score = chosen("moe_router_score_function", "softmax", SCORES)
    softmax = score is RouterScore.softmax
    balanced = arguments.get("moe_router_load_balancing_type") or ()
    found = {
        "num_experts": arguments["num_experts"],
        "experts_per_token": count,
        "expert_ffn_size": arguments.get("moe_ffn_hidden_size") or 0,
        "shared_ffn_size": arguments.get("moe_shared_expert_intermediate_size") or 0,
        "shared_gate": bool(arguments.get("moe_shared_expert_gate")),
        "router_score": score,
        "router_over_all": softmax and bool(arguments.get("moe_router_pre_softmax")),
        "router_normalize": not softmax and count > 1,
        "router_scale": float(arguments.get("moe_router_topk_scaling_factor") or 1.0),
        "router_bias": bool(arguments.get("moe_router_enable_expert_bias")),
        "router_logit_bias": bool(arguments.get("add_bias_linear", True)),
        "router_sinkhorn": balanced in ("sinkhorn", ["sinkhorn"]),
        **placement(arguments, refused),
    }
    if kept := arguments.get("moe_router_group_topk"):
        found["router_groups"] = arguments.get("moe_router_num_groups") or 1
        found["router_groups_kept"] = kept
    if capacity := arguments.get("moe_expert_capacity_factor"):
        found["expert_capacity"] = float(capacity)
        found["expert_drop"] = chosen("moe_token_drop_policy", "probs", DROPS)
        found["expert_pad"] = bool(arguments.get("moe_pad_expert_input_to_capacity"))
    return found


def placement(arguments: Arguments, refused: list[str]) -> dict[str, typing.Any]:
    """Which layers have experts: every n-th, or by a list of ones and zeros."""
    every, layers = arguments.get("moe_layer_freq"), arguments["num_layers"]
    every = 1 if every is None else every
    if type(every) is int and every > 0:
        return {"expert_every": every}
    if isinstance(every, list) and len(every) == layers and {*every} <= {0, 1}:
        return {"expert_pattern": tuple(every)}
    refused.append(f"moe_layer_freq={every!r} of {layers} layers")
    return {}
