"""The families of decoders with experts that transformers has, as tables.py has the dense ones."""

import dataclasses

from maxmeg.config.model import Activation, QkNorm, RouterScore
from maxmeg.hf.experts import (
    HEAD_NORM,
    NORMALIZED_SOFTMAX,
    AuxAlpha,
    AuxLoss,
    DenseLayers,
    Flag,
    Groups,
    Methods,
    Normalized,
    NumExperts,
    Predicted,
    SharedExperts,
    SwitchedWindow,
)
from maxmeg.hf.keys import Fixed, Ignored, Key
from maxmeg.hf.latent import LATENT, LatentRotary
from maxmeg.hf.rotary import ORIGINAL, Rotary
from maxmeg.hf.tables import (
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    ENDS,
    GATED_MLP,
    HEAD_DIM,
    HEAD_NORMS,
    LLAMA_LAYER,
    OWN_HEAD_DIM,
    PRE_NORMS,
    PROJECTIONS,
    ROOT,
    SILU,
    WINDOW,
    Family,
    numerics,
    sizes,
    tied,
)
from maxmeg.hf.windows import AlternatingWindow, LateWindow

EXPERTS = {
    "moe.experts.gate": "mlp.experts.{}.gate_proj.weight",
    "moe.experts.up": "mlp.experts.{}.up_proj.weight",
    "moe.experts.out": "mlp.experts.{}.down_proj.weight",
}
EXPERT_FFN = "moe_intermediate_size", "expert_ffn_size"


def shared_expert(name: str) -> dict[str, str]:
    parts = {"gate": "gate_proj", "up": "up_proj", "out": "down_proj"}
    return {f"moe.shared.{ours}": f"mlp.{name}.{theirs}" for ours, theirs in parts.items()}


def of_experts(parts: tuple) -> tuple:
    """Sizes whose inner width is that of an expert."""
    return tuple(
        dataclasses.replace(part, field=("expert_ffn_size", "ffn_size"))
        if part.field == "ffn_size"
        else part
        for part in parts
    )


MIXTRAL = Family(
    "mixtral",
    (
        *of_experts(sizes(32000, 4096, 32, 32, 8, 14336)),
        *numerics(131072, 1e-5),
        *(HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False), Key(*WINDOW, None, null=True)),
        NumExperts(("num_local_experts", "num_experts"), 8, 2),
        *(AuxLoss(), Fixed("router_jitter_noise", 0.0), Rotary(default=1e6)),
    ),
    *(ENDS, "model.layers.", {**PROJECTIONS, **PRE_NORMS}, ROOT),
    arrays={"moe.router": "block_sparse_moe.gate.weight"},
    experts={
        "moe.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
        "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight",
        "moe.experts.out": "block_sparse_moe.experts.{}.w2.weight",
    },
)
QWEN2_MOE = Family(
    "qwen2_moe",
    (
        *sizes(151936, 2048, 24, 16, 16, 5632),
        *numerics(32768, 1e-6),
        *(OWN_HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False), Key("qkv_bias", "bias_qkv", True)),
        *(LateWindow(before=True), NumExperts(("num_experts",), 60, 4)),
        *(Key(*EXPERT_FFN, 1408), Flag(*NORMALIZED_SOFTMAX), DenseLayers()),
        Key("shared_expert_intermediate_size", "shared_ffn_size", 5632),
        *(AuxLoss(), Rotary()),
    ),
    ENDS,
    "model.layers.",
    {
        **LLAMA_LAYER,
        **shared_expert("shared_expert"),
        "moe.shared_gate": "mlp.shared_expert_gate",
    },
    {**ROOT, "shared_gate": True},
    arrays={"moe.router": "mlp.gate.weight"},
    experts=EXPERTS,
)
QWEN3_MOE = dataclasses.replace(
    QWEN2_MOE,
    model_type="qwen3_moe",
    parts=(
        *sizes(151936, 2048, 24, 32, 4, 6144),
        *numerics(32768, 1e-6),
        *(OWN_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False)),
        *(SwitchedWindow(), Ignored(("max_window_layers",))),
        NumExperts(("num_experts", "num_local_experts"), 128, 8),
        *(Key(*EXPERT_FFN, 768), Flag(*NORMALIZED_SOFTMAX), DenseLayers()),
        *(AuxLoss(), Rotary()),
    ),
    layers={**LLAMA_LAYER, **HEAD_NORMS},
    constants={**ROOT, "qk_norm": QkNorm.head},
)
GPT_OSS = Family(
    "gpt_oss",
    (
        *of_experts(sizes(201088, 2880, 36, 64, 8, 2880)),
        *numerics(131072, 1e-5),
        *(Key("head_dim", "head_dim", 64), Fixed("hidden_act", "silu"), ATTENTION_DROPOUT),
        *(Key("attention_bias", ("bias_qkv", "bias_attention_out"), True), tied(False)),
        *(AlternatingWindow(2, default=128), Fixed("swiglu_alpha", 1.702)),
        Key("swiglu_limit", "activation_clamp", 7.0),
        NumExperts(("num_local_experts", "num_experts"), 128, 4),
        *(AuxLoss(), Ignored(("initial_context_length", "experts_per_token"))),
        Rotary(
            default=150000.0,
            bare={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                ORIGINAL: 4096,
            },
        ),
    ),
    *(ENDS, "model.layers.", {**PROJECTIONS, **PRE_NORMS}),
    {
        **ROOT,
        **{"activation": Activation.quick_geglu, "glu_offset": 1.0, "bias_mlp": True},
        **{"attention_sinks": True, "router_logit_bias": True},
    },
    arrays={
        "attention.sinks": "self_attn.sinks",
        "moe.router": "mlp.router.weight",
        "moe.logit_bias": "mlp.router.bias",
    },
    experts={
        ("moe.experts.gate", "moe.experts.up"): "mlp.experts.gate_up_proj",
        ("moe.experts.gate_bias", "moe.experts.up_bias"): "mlp.experts.gate_up_proj_bias",
        "moe.experts.out": "mlp.experts.down_proj",
        "moe.experts.out_bias": "mlp.experts.down_proj_bias",
    },
)
SIGMOID = {**ROOT, "router_score": RouterScore.sigmoid, "router_bias": True}
CORRECTED = {
    "moe.router": "mlp.gate.weight",
    "moe.bias": "mlp.gate.e_score_correction_bias",
}
GLM4_MOE = Family(
    "glm4_moe",
    (
        *sizes(151552, 4096, 46, 96, 8, 10944),
        *numerics(131072, 1e-5),
        *(OWN_HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False), HEAD_NORM),
        Key("attention_bias", "bias_qkv", False),
        NumExperts(("n_routed_experts", "num_local_experts"), 128, 8),
        *(Key(*EXPERT_FFN, 1408), SharedExperts(1), Groups(2), Normalized()),
        Key("routed_scaling_factor", "router_scale", 1.0),
        Key("first_k_dense_replace", "first_dense_layers", 1, zero=True),
        *(Predicted(), Rotary(part_default=0.5)),
    ),
    *(ENDS, "model.layers."),
    {**LLAMA_LAYER, **HEAD_NORMS, **shared_expert("shared_experts")},
    SIGMOID,
    arrays=CORRECTED,
    experts=EXPERTS,
)
LATENT_ATTENTION = {
    "mla.query": "self_attn.q_proj",
    "mla.query_down": "self_attn.q_a_proj",
    "mla.query_norm": "self_attn.q_a_layernorm",
    "mla.query_up": "self_attn.q_b_proj",
    "mla.kv_down": "self_attn.kv_a_proj_with_mqa",
    "mla.kv_norm": "self_attn.kv_a_layernorm",
    ("mla.key_up", "mla.value_up"): "self_attn.kv_b_proj",
    "mla.out": "self_attn.o_proj",
}
DEEPSEEK = {**ROOT, "mla_norm_eps": 1e-6}  # of the latents, whatever the others have
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    (
        *sizes(129280, 7168, 61, 128, 128, 18432),
        *numerics(4096, 1e-6),
        *(*LATENT, Ignored(("head_dim", "qk_head_dim", "ep_size")), SILU, tied(False)),
        *(ATTENTION_BIAS, ATTENTION_DROPOUT, Fixed("pretraining_tp", 1)),
        NumExperts(("n_routed_experts", "num_local_experts"), 256, 8),
        *(Key("moe_intermediate_size", "expert_ffn_size", 2048), SharedExperts(1)),
        *(Groups(2, 8, 4), Normalized(), Key("routed_scaling_factor", "router_scale", 2.5)),
        *(Fixed("scoring_func", "sigmoid"), Fixed("topk_method", "noaux_tc"), AuxAlpha()),
        *(Key("first_k_dense_replace", "first_dense_layers", 3, zero=True), Predicted()),
        Fixed("moe_layer_freq", 1),
        *(Key("rope_interleave", "rotary_interleaved", True), LatentRotary()),
    ),
    *(ENDS, "model.layers."),
    {**GATED_MLP, **PRE_NORMS, **LATENT_ATTENTION, **shared_expert("shared_experts")},
    {**SIGMOID, **DEEPSEEK},
    grouped=frozenset({"self_attn.kv_b_proj"}),
    arrays=CORRECTED,
    experts=EXPERTS,
    code=r"(configuration|modeling)_deepseek\.",
)
DEEPSEEK_V2 = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    parts=(
        *sizes(102400, 4096, 32, 32, None, 11008),
        *numerics(2048, 1e-6),
        *(*LATENT, Ignored(("head_dim", "qk_head_dim", "ep_size")), SILU, tied(False)),
        *(ATTENTION_BIAS, ATTENTION_DROPOUT, Fixed("mlp_bias", False)),
        *(Fixed("pretraining_tp", 1), NumExperts(("n_routed_experts", "num_experts"), 64, None)),
        *(Key("moe_intermediate_size", "expert_ffn_size", 1407), SharedExperts(2)),
        *(Methods(), Fixed("norm_topk_prob", False), AuxAlpha()),
        Key("routed_scaling_factor", "router_scale", 1.0),
        *(Fixed("scoring_func", "softmax"), Fixed("moe_layer_freq", 1)),
        Key("first_k_dense_replace", "first_dense_layers", 0, zero=True),
        LatentRotary(),
    ),
    constants={**DEEPSEEK, "router_over_all": True, "rotary_interleaved": True},
    arrays={"moe.router": "mlp.gate.weight"},
)

SPARSE: dict[str, Family] = {
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
}
