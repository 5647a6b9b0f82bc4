"""Tables of the mixture-of-experts decoder families of transformers (tables.py: the dense ones)."""

import dataclasses

from maxmeg.config.mixers import Activation, QkNorm, RouterScore
from maxmeg.config.model import NormPlace
from maxmeg.hf.families.binding import Consecutive
from maxmeg.hf.families.experts import (
    HEAD_NORM,
    MTP_LAYERS,
    NORMALIZED_SOFTMAX,
    AuxAlpha,
    AuxLoss,
    DenseLayers,
    FirstDense,
    Flag,
    Groups,
    ListedDense,
    MoeLayers,
    Normalized,
    RoutingMethod,
    ScaledStd,
    SharedExperts,
    num_experts,
)
from maxmeg.hf.families.keys import Fixed, Ignored, Key, Part
from maxmeg.hf.families.mamba import GRANITE_SCALES
from maxmeg.hf.families.rotary import LATENT, ORIGINAL, LatentRotary, Rotary, RotaryWidth
from maxmeg.hf.families.tables import (
    ATTENTION_BIAS,
    ATTENTION_BIASES,
    ATTENTION_DROPOUT,
    GATED_MLP,
    HEAD_DIM,
    HEAD_NORMS,
    LLAMA_LAYER,
    OPTIONAL_HEAD_DIM,
    POST_NORMS,
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
from maxmeg.hf.families.windows import (
    AlternatingWindow,
    LateWindow,
    ListedWindow,
    SwitchedWindow,
)

EXPERTS = {
    "moe.experts.gate": "mlp.experts.{}.gate_proj.weight",
    "moe.experts.up": "mlp.experts.{}.up_proj.weight",
    "moe.experts.out": "mlp.experts.{}.down_proj.weight",
}
EXPERT_FFN = "moe_intermediate_size", "moe.ffn_size"


def shared_expert(name: str) -> dict[str, str]:
    """The modules of a shared expert that transformers calls `name`."""
    names = {"gate": "gate_proj", "up": "up_proj", "out": "down_proj"}
    return {f"moe.shared.{ours}": f"mlp.{name}.{theirs}" for ours, theirs in names.items()}


def expert_sizes(*defaults) -> list[Key]:
    """As `sizes`, where intermediate_size is the width of an expert."""
    *keys, width = sizes(*defaults)
    return [*keys, dataclasses.replace(width, field=("moe.ffn_size", "mlp.ffn_size"))]


MIXTRAL = Family(
    model_type="mixtral",
    parts=expert_sizes(32000, 4096, 32, 32, 8, 14336)
    + numerics(131072, 1e-5)
    + [HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False), Key(*WINDOW, None, null=True)]
    + num_experts(8, 2, "num_local_experts", "num_experts")
    + [AuxLoss(), Fixed("router_jitter_noise", 0.0), Rotary(default=1e6)],
    layers={**PROJECTIONS, **PRE_NORMS},
    constants=ROOT,
    arrays={"moe.router": "block_sparse_moe.gate.weight"},
    experts={
        "moe.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
        "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight",
        "moe.experts.out": "block_sparse_moe.experts.{}.w2.weight",
    },
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    parts=sizes(151936, 2048, 24, 16, 16, 5632)
    + numerics(32768, 1e-6)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False)]
    + [Key("qkv_bias", "attention.bias_qkv", True), LateWindow(even=True)]
    + num_experts(60, 4, "num_experts")
    + [Key(*EXPERT_FFN, 1408), Flag(*NORMALIZED_SOFTMAX), DenseLayers()]
    + [Key("shared_expert_intermediate_size", "moe.shared_ffn_size", 5632)]
    + [AuxLoss(), Rotary()],
    layers={
        **LLAMA_LAYER,
        **shared_expert("shared_expert"),
        "moe.shared_gate": "mlp.shared_expert_gate",
    },
    constants={**ROOT, "moe.shared_gate": True},
    arrays={"moe.router": "mlp.gate.weight"},
    experts=EXPERTS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    parts=sizes(151936, 2048, 24, 32, 4, 6144)
    + numerics(32768, 1e-6)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False)]
    + [SwitchedWindow(), Ignored("max_window_layers")]
    + num_experts(128, 8, "num_experts", "num_local_experts")
    + [Key(*EXPERT_FFN, 768), Flag(*NORMALIZED_SOFTMAX), DenseLayers()]
    + [AuxLoss(), Rotary()],
    layers={**LLAMA_LAYER, **HEAD_NORMS},
    constants={**ROOT, "attention.qk_norm": QkNorm.head},
    arrays={"moe.router": "mlp.gate.weight"},
    experts=EXPERTS,
)
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}
GPT_OSS = Family(
    model_type="gpt_oss",
    parts=expert_sizes(201088, 2880, 36, 64, 8, 2880)
    + numerics(131072, 1e-5)
    + [Key("head_dim", "attention.head_dim", 64), Fixed("hidden_act", "silu"), ATTENTION_DROPOUT]
    + [Key("attention_bias", ATTENTION_BIASES, True), tied(False)]
    + [AlternatingWindow(2, default=128), Fixed("swiglu_alpha", 1.702)]
    + [Key("swiglu_limit", "mlp.activation_clamp", 7.0)]
    + num_experts(128, 4, "num_local_experts", "num_experts")
    + [AuxLoss(), Ignored("initial_context_length", "experts_per_token")]
    + [Rotary(default=150000.0, missing=GPT_OSS_YARN)],
    layers={**PROJECTIONS, **PRE_NORMS},
    constants={
        **ROOT,
        "mlp.activation": Activation.quick_geglu,
        "mlp.glu_offset": 1.0,
        "mlp.bias": True,
        "attention.sinks": True,
        "moe.logit_bias": True,
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
SIGMOID = {**ROOT, "moe.score": RouterScore.sigmoid, "moe.bias_balancing": True}
CORRECTED = {
    "moe.router": "mlp.gate.weight",
    "moe.bias": "mlp.gate.e_score_correction_bias",
}
GLM4_MOE = Family(
    model_type="glm4_moe",
    parts=sizes(151552, 4096, 46, 96, 8, 10944)
    + numerics(131072, 1e-5)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False), HEAD_NORM]
    + [Key("attention_bias", "attention.bias_qkv", False)]
    + num_experts(128, 8, "n_routed_experts", "num_local_experts")
    + [Key(*EXPERT_FFN, 1408), SharedExperts(1), Groups(2), Normalized()]
    + [Key("routed_scaling_factor", "moe.scale", 1.0), FirstDense(1)]
    + [MTP_LAYERS, Rotary(fraction_default=0.5)],
    layers={**LLAMA_LAYER, **HEAD_NORMS, **shared_expert("shared_experts")},
    constants=SIGMOID,
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
DEEPSEEK = {**ROOT, "mla.norm_eps": 1e-6}  # of the latents' norms, whatever rms_norm_eps is
DEEPSEEK_PARTS: list[Part] = [
    *LATENT,
    Ignored("head_dim", "qk_head_dim", "ep_size"),
    SILU,
    tied(False),
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    Fixed("pretraining_tp", 1),
    Fixed("moe_layer_freq", 1),
    AuxAlpha(),
]
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    parts=sizes(129280, 7168, 61, 128, 128, 18432)
    + numerics(4096, 1e-6)
    + DEEPSEEK_PARTS
    + num_experts(256, 8, "n_routed_experts", "num_local_experts")
    + [Key(*EXPERT_FFN, 2048), SharedExperts(1)]
    + [Groups(2, 8, 4), Normalized(), Key("routed_scaling_factor", "moe.scale", 2.5)]
    + [Fixed("scoring_func", "sigmoid"), Fixed("topk_method", "noaux_tc"), FirstDense(3)]
    + [MTP_LAYERS, Key("rope_interleave", "rotary.interleaved", True), LatentRotary()],
    layers={**GATED_MLP, **PRE_NORMS, **LATENT_ATTENTION, **shared_expert("shared_experts")},
    constants={**SIGMOID, **DEEPSEEK},
    grouped=frozenset({"self_attn.kv_b_proj"}),
    arrays=CORRECTED,
    experts=EXPERTS,
    code=r"(configuration|modeling)_deepseek\.",
)
LATENT_SIZES = {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
DEEPSEEK_V2 = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    parts=sizes(102400, 4096, 32, 32, None, 11008)
    + numerics(2048, 1e-6)
    + DEEPSEEK_PARTS
    + [Fixed("mlp_bias", False)]
    + num_experts(64, None, "n_routed_experts", "num_experts")
    + [Key(*EXPERT_FFN, 1407), SharedExperts(2), RoutingMethod()]
    + [Fixed("norm_topk_prob", False), Key("routed_scaling_factor", "moe.scale", 1.0)]
    + [Fixed("scoring_func", "softmax"), FirstDense(0), LatentRotary()],
    constants={**DEEPSEEK, "moe.softmax_before_topk": True, "rotary.interleaved": True},
    arrays={"moe.router": "mlp.gate.weight"},
)
GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    parts=sizes(154880, 2048, 47, 20, 20, 10240)
    + numerics(202752, 1e-5)
    + [dataclasses.replace(key, default=LATENT_SIZES.get(key.name, key.default)) for key in LATENT]
    + [Ignored("head_dim", "qk_head_dim", "ep_size"), SILU, tied(False), ATTENTION_BIAS]
    + [ATTENTION_DROPOUT, Fixed("pretraining_tp", 1), ListedDense(1)]
    + num_experts(64, 4, "n_routed_experts", "num_local_experts")
    + [Key(*EXPERT_FFN, 1536), SharedExperts(1), Groups(2), Normalized()]
    + [Key("routed_scaling_factor", "moe.scale", 1.8), Fixed("topk_method", "noaux_tc")]
    + [MTP_LAYERS, Key("rope_interleave", "rotary.interleaved", True)]
    + [LatentRotary(fraction_default=1.0)],
    code="",
)
OLMOE = Family(
    model_type="olmoe",
    parts=expert_sizes(50304, 2048, 16, 16, None, 2048)
    + numerics(4096, 1e-5)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False)]
    + num_experts(64, 8, "num_experts", "num_local_experts")
    + [Flag(*NORMALIZED_SOFTMAX), AuxLoss(0.01), Fixed("clip_qkv", None), Rotary()],
    layers={**PROJECTIONS, **HEAD_NORMS, **PRE_NORMS},
    constants={**ROOT, "attention.qk_norm": QkNorm.heads},
    arrays={"moe.router": "mlp.gate.weight"},
    experts=EXPERTS,
)
GRANITE_MOE = Family(
    model_type="granitemoe",
    parts=expert_sizes(32000, 4096, 32, 32, None, 11008)
    + numerics(2048, 1e-6)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False), *GRANITE_SCALES]
    + num_experts(8, 2, "num_local_experts", "num_experts")
    + [AuxLoss(), Rotary()],
    layers={**PROJECTIONS, **PRE_NORMS},
    constants=ROOT,
    arrays={"moe.router": "block_sparse_moe.router.layer.weight"},
    experts={
        ("moe.experts.gate", "moe.experts.up"): "block_sparse_moe.input_linear.weight",
        "moe.experts.out": "block_sparse_moe.output_linear.weight",
    },
    stacking=Consecutive,
)
GRANITE_MOE_SHARED = dataclasses.replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    parts=[
        *GRANITE_MOE.parts,
        Key("shared_intermediate_size", "moe.shared_ffn_size", 0, zero=True),
    ],
    layers={
        **GRANITE_MOE.layers,
        ("moe.shared.gate", "moe.shared.up"): "shared_mlp.input_linear",
        "moe.shared.out": "shared_mlp.output_linear",
    },
)
FLEX_OLMO = dataclasses.replace(
    OLMOE,
    model_type="flex_olmo",
    parts=expert_sizes(100352, 4096, 32, 32, None, 11008)
    + numerics(4096, 1e-6)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False)]
    + num_experts(7, 5, "num_experts", "num_local_experts")
    + [Flag(*NORMALIZED_SOFTMAX), AuxLoss(0.01), Rotary(default=500000.0)],
    layers={**PROJECTIONS, **HEAD_NORMS, **POST_NORMS},
    constants={**OLMOE.constants, "norm_place": NormPlace.post},
)
DOTS1 = dataclasses.replace(
    GLM4_MOE,
    model_type="dots1",
    parts=sizes(152064, 4608, 62, 32, 32, 10944)
    + numerics(2048, 1e-6)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_BIAS, ATTENTION_DROPOUT, tied(False)]
    + [LateWindow(switch=False, default=62)]
    + num_experts(None, None, "n_routed_experts", "num_local_experts")
    + [Key(*EXPERT_FFN, 1408), SharedExperts(None), Groups(2), Normalized(False)]
    + [Key("routed_scaling_factor", "moe.scale", 1.0), FirstDense(0), Rotary()],
    constants={**SIGMOID, "attention.qk_norm": QkNorm.head},
)
SOLAR_OPEN = dataclasses.replace(
    GLM4_MOE,
    model_type="solar_open",
    parts=expert_sizes(196608, 4096, 48, 64, 8, None)[:-1]
    + numerics(131072, 1e-5)
    + [Key("head_dim", "attention.head_dim", 128), SILU, ATTENTION_DROPOUT, tied(False)]
    + [Key("attention_bias", "attention.bias_qkv", False)]
    + num_experts(128, 8, "n_routed_experts", "num_local_experts")
    + [Key("moe_intermediate_size", ("moe.ffn_size", "mlp.ffn_size"), 1280), SharedExperts(1)]
    + [Groups(2), Normalized(), Key("routed_scaling_factor", "moe.scale", 1.0)]
    + [Ignored("first_k_dense_replace", "intermediate_size"), Fixed("use_qk_norm", False)]
    + [Rotary(default=1e6, fraction_default=1.0)],
    layers={**PROJECTIONS, **PRE_NORMS, **shared_expert("shared_experts")},
)
EXAONE_MOE = dataclasses.replace(
    GLM4_MOE,
    model_type="exaone_moe",
    parts=sizes(102400, 4096, 32, 32, 32, 16384)
    + numerics(2048, 1e-5)
    + [OPTIONAL_HEAD_DIM, SILU, ATTENTION_DROPOUT, tied(False), ListedWindow(4)]
    + num_experts(64, 8, "num_experts")
    + [Key(*EXPERT_FFN, 1024), SharedExperts(1, "num_shared_experts"), Groups(2), Normalized()]
    + [Key("routed_scaling_factor", "moe.scale", 2.5), ListedDense(1), Rotary()],
    constants={**SIGMOID, "attention.qk_norm": QkNorm.head},
    arrays={**CORRECTED, "moe.bias": "mlp.e_score_correction_bias"},
    ignored=(*GLM4_MOE.ignored, r"^mtp\."),
)
ERNIE_MOE = Family(
    model_type="ernie4_5_moe",
    parts=sizes(103424, 2560, 28, 20, 4, 12288)
    + numerics(131072, 1e-5)
    + [OPTIONAL_HEAD_DIM, SILU, tied(True), Fixed("use_bias", False)]
    + [
        Key("moe_num_experts", "moe.num_experts", 64, aliases=("num_experts",)),
        Key("moe_k", "moe.top_k", 6, aliases=("num_experts_per_tok",)),
        *[Key(*EXPERT_FFN, 1536), SharedExperts(2, "moe_num_shared_experts"), MoeLayers()],
        *[Fixed("moe_norm_min", 1e-12), AuxLoss(), Rotary(default=500000.0)],
    ],
    layers={**LLAMA_LAYER, **shared_expert("shared_experts")},
    constants={
        **ROOT,
        "rotary.interleaved": True,
        "moe.softmax_before_topk": True,
        "moe.normalize_weights": True,
        "moe.bias_balancing": True,
    },
    arrays={
        "moe.router": "mlp.gate.weight",
        "moe.bias": "mlp.moe_statics.e_score_correction_bias",
    },
    shapes={"mlp.moe_statics.e_score_correction_bias": (1, -1)},
    experts=EXPERTS,
    ignored=(*GLM4_MOE.ignored, r"^model\.mtp_", r"^mtp"),
)
MINIMAX_M2 = dataclasses.replace(
    MIXTRAL,
    model_type="minimax_m2",
    parts=expert_sizes(200064, 3072, 62, 48, 8, 1536)
    + numerics(196608, 1e-6)
    + [Key("head_dim", "attention.head_dim", 128), SILU, ATTENTION_DROPOUT, tied(False)]
    + num_experts(256, 8, "num_local_experts", "num_experts")
    + [Fixed("use_qk_norm", True), Fixed("scoring_func", "sigmoid"), AuxLoss()]
    + [Fixed("router_jitter_noise", 0.0), RotaryWidth(default=5e6, fraction_default=1.0)],
    layers={**MIXTRAL.layers, **HEAD_NORMS},
    constants={**SIGMOID, "moe.normalize_weights": True, "attention.qk_norm": QkNorm.heads},
    arrays={**MIXTRAL.arrays, "moe.bias": "block_sparse_moe.e_score_correction_bias"},
)
YOUTU = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="youtu",
    parts=sizes(128256, 2048, 32, 16, 16, 6144)
    + numerics(131072, 1e-6)
    + [ScaledStd(), *LATENT, Ignored("head_dim", "qk_head_dim"), SILU, tied(True), ATTENTION_BIAS]
    + [ATTENTION_DROPOUT, Ignored("embedding_initializer_range")]
    + [Key("rope_interleave", "rotary.interleaved", True), LatentRotary()],
    layers={**GATED_MLP, **PRE_NORMS, **LATENT_ATTENTION},
    constants={**ROOT, **DEEPSEEK},
    arrays={},
    experts={},
    code="",
)

SPARSE: dict[str, Family] = {
    "Dots1ForCausalLM": DOTS1,
    "Ernie4_5_MoeForCausalLM": ERNIE_MOE,
    "ExaoneMoeForCausalLM": EXAONE_MOE,
    "FlexOlmoForCausalLM": FLEX_OLMO,
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "SolarOpenForCausalLM": SOLAR_OPEN,
    "YoutuForCausalLM": YOUTU,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "OlmoeForCausalLM": OLMOE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE_SHARED,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
}
