"""Families with Mamba-2 layers."""

import typing

from maxmeg.config.mixers import RouterScore
from maxmeg.config.model import Position
from maxmeg.hf.families.binding import Consecutive
from maxmeg.hf.families.experts import Groups, Normalized, num_experts
from maxmeg.hf.families.keys import Choice, Fixed, Ignored, Key, Part
from maxmeg.hf.families.mamba import (
    GRANITE_SCALES,
    Expansion,
    GraniteExperts,
    GranitePositions,
    HeadSize,
    LetteredLayers,
    LetteredMtp,
    ListedAttention,
    Multipliers,
    NamedLayers,
    ParallelLayers,
    PureLayers,
    Scale,
    StepLimits,
    WithExperts,
)
from maxmeg.hf.families.rotary import Rotary
from maxmeg.hf.families.tables import (
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    ENDS,
    GATED_MLP,
    OPTIONAL_HEAD_DIM,
    PROJECTIONS,
    ROOT,
    UNGATED,
    Family,
    MtpNames,
    numerics,
    sizes,
    tied,
)


def mamba(prefix: str) -> dict[typing.Any, str]:
    """The modules of a Mamba-2 mixer."""
    names = ("gate", "value", "key", "query", "step")
    return {
        tuple(f"mamba.{name}" for name in names): f"{prefix}.in_proj",
        tuple(f"mamba.{name}_conv" for name in names[1:4]): f"{prefix}.conv1d",
        "mamba.gated_norm": f"{prefix}.norm",
        "mamba.out": f"{prefix}.out_proj",
    }


def mamba_arrays(prefix: str) -> dict[str, str]:
    return {
        "mamba.decay_log": f"{prefix}.A_log",
        "mamba.skip": f"{prefix}.D",
        "mamba.step_bias": f"{prefix}.dt_bias",
    }


BACKBONE = {"embedding": "backbone.embeddings", "final_norm": "backbone.norm_f"}
BACKBONE |= {"output": "lm_head"}
PLAIN = {**ROOT, "position": Position.none}
FIRST_VALUES = ("time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual")
CHUNK, LOGITS = "mamba.chunk", "logit_scale"

MAMBA2 = Family(
    model_type="mamba2",
    parts=[
        Key("vocab_size", "vocab_size", 32768),
        Key("hidden_size", "hidden_size", 4096),
        Key("num_hidden_layers", "num_layers", 64),
        Key("num_heads", "mamba.num_heads", 128),
        Key("head_dim", "mamba.head_dim", 64),
        Key("n_groups", "mamba.num_groups", 8),
        Key("state_size", "mamba.state_size", 128),
        Key("conv_kernel", "mamba.kernel_size", 4),
        Key("use_bias", "mamba.bias", False),
        Key("use_conv_bias", "mamba.conv_bias", True),
        Key("chunk_size", CHUNK, 256),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("initializer_range", "init_std", 0.1, zero=True),
        tied(False),
        Expansion(),
        StepLimits(),
        PureLayers(),
        Fixed("hidden_act", "silu"),
        Ignored(*FIRST_VALUES, "time_step_min", "residual_in_fp32"),
    ],
    layers={**mamba("mixer"), "attention.norm": "norm"},
    constants=PLAIN,
    ends=BACKBONE,
    layer="backbone.layers.",
    arrays=mamba_arrays("mixer"),
    renamed=((r"^backbone\.embedding\.", "backbone.embeddings."),),
)
NEMOTRON_EXPERTS: list[Part] = [
    *num_experts(8, 2, "n_routed_experts", "num_local_experts"),
    Key("moe_intermediate_size", "moe.ffn_size", 7688),
    Key("moe_shared_expert_intermediate_size", "moe.shared_ffn_size", 7688),
    Key("moe_latent_size", "moe.latent_size", None, null=True),
    Key("routed_scaling_factor", "moe.scale", 1.0),
    Groups(2),
    Normalized(),
]
NEMOTRON_H = Family(
    model_type="nemotron_h",
    parts=[
        Key("vocab_size", "vocab_size", 131072),
        Key("hidden_size", "hidden_size", 4096),
        LetteredLayers(),
        Key("num_attention_heads", "attention.num_heads", 32),
        Key("num_key_value_heads", "attention.num_kv_heads", 8, null=True),
        Key("head_dim", "attention.head_dim", 128, aliases=("attention_head_dim",)),
        Key("intermediate_size", "mlp.ffn_size", 21504),
        Choice("mlp_hidden_act", "mlp.activation", "relu2", UNGATED),
        Key("mlp_bias", "mlp.bias", False),
        ATTENTION_DROPOUT,
        Key("mamba_num_heads", "mamba.num_heads", 128),
        Key("mamba_head_dim", "mamba.head_dim", 64),
        Key("n_groups", "mamba.num_groups", 8),
        Key("ssm_state_size", "mamba.state_size", 128),
        Key("conv_kernel", "mamba.kernel_size", 4),
        Key("use_bias", "mamba.bias", False),
        Key("use_conv_bias", "mamba.conv_bias", True),
        Key("chunk_size", CHUNK, 128),
        Key("time_step_min", "mamba.min_step", 0.001, zero=True),  # transformers clamps to it
        *numerics(4096, 1e-5, eps_name="layer_norm_epsilon"),
        tied(False),
        WithExperts(NEMOTRON_EXPERTS),
        *(Fixed(name, False) for name in ("attention_bias", "mamba_proj_bias")),
        *(Fixed("mamba_hidden_act", "silu"), Fixed("hidden_dropout", 0.0)),
        *(Fixed("sliding_window", None), LetteredMtp()),
        Ignored(*FIRST_VALUES, "time_step_limit", "expand", "residual_in_fp32", "rms_norm_eps"),
        Ignored("use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        Ignored("num_logits_to_keep", "n_shared_experts"),
    ],
    layers={
        **mamba("mixer"),
        **{ours: theirs.replace("self_attn", "mixer") for ours, theirs in PROJECTIONS.items()},
        **{"mlp.up": "mixer.up_proj", "mlp.out": "mixer.down_proj"},
        "moe.shared.up": "mixer.shared_experts.up_proj",
        "moe.shared.out": "mixer.shared_experts.down_proj",
        "moe.latent_down": "mixer.fc1_latent_proj",
        "moe.latent_up": "mixer.fc2_latent_proj",
        **{"attention.norm": "norm", "mlp.norm": "norm"},
    },
    constants={
        **PLAIN,
        "moe.score": RouterScore.sigmoid,
        "moe.bias_balancing": True,
    },
    ends=BACKBONE,
    layer="backbone.layers.",
    arrays={
        **mamba_arrays("mixer"),
        "moe.router": "mixer.gate.weight",
        "moe.bias": "mixer.gate.e_score_correction_bias",
    },
    experts={
        "moe.experts.up": "mixer.experts.{}.up_proj.weight",
        "moe.experts.out": "mixer.experts.{}.down_proj.weight",
    },
    renamed=((r"^model\.", "backbone."),),
    code=r"(configuration|modeling)_nemotron_h\.",
    mtp=MtpNames(
        "mtp.layers.{first}.enorm",
        "mtp.layers.{first}.hnorm",
        "mtp.layers.{first}.eh_proj",
        "mtp.layers.{last}.final_layernorm",
        "mtp.layers.{place}.",
    ),
)
INTERCHANGEABLE = ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier")
INTERCHANGEABLE = (*INTERCHANGEABLE, "ssm_in_multiplier", "ssm_multipliers")
SIZES: list[Part] = [
    Key("mamba_n_heads", "mamba.num_heads", 128),
    Key("mamba_n_groups", "mamba.num_groups", 1),
    Key("mamba_d_state", "mamba.state_size", 256),
    Key("mamba_d_conv", "mamba.kernel_size", 4),
    Key("mamba_conv_bias", "mamba.conv_bias", True),
    Key("mamba_chunk_size", CHUNK, 256),
    StepLimits(),
    Fixed("hidden_act", "silu"),
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    Ignored("num_logits_to_keep", "time_step_rank", "time_step_min", "time_step_max"),
]
MAMBA_LAYER = {**mamba("mamba"), **PROJECTIONS, "attention.norm": "input_layernorm"}
FED = {ours: theirs.replace("mlp.", "feed_forward.") for ours, theirs in GATED_MLP.items()}
FED |= {"mlp.norm": "pre_ff_layernorm"}
BAMBA = Family(
    model_type="bamba",
    parts=sizes(128000, 4096, 32, 32, 8, 14336)
    + numerics(262144, 1e-5)
    + SIZES
    + [HeadSize(), Key("mamba_proj_bias", "mamba.bias", False), Key("mlp_bias", "mlp.bias", False)]
    + [OPTIONAL_HEAD_DIM, tied(False), ListedAttention(), Rotary(fraction_default=0.5)]
    + [Ignored("z_loss_coefficient", "attn_rotary_emb")],
    layers={**MAMBA_LAYER, **FED},
    constants=ROOT,
    ends={**ENDS, "final_norm": "model.final_layernorm"},
    arrays=mamba_arrays("mamba"),
)
GRANITE = Family(
    model_type="granitemoehybrid",
    parts=sizes(32000, 4096, 32, 32, None, 11008)[:-1]
    + numerics(2048, 1e-6)
    + SIZES
    + [HeadSize(), Key("mamba_proj_bias", "mamba.bias", False), OPTIONAL_HEAD_DIM, tied(False)]
    + [GraniteExperts(), NamedLayers(), GranitePositions()]
    + GRANITE_SCALES
    + [Ignored("rope_theta", "normalization_function", "init_method")],
    layers={
        **MAMBA_LAYER,
        "mlp.norm": "post_attention_layernorm",
        ("mlp.gate", "mlp.up"): "shared_mlp.input_linear",
        "mlp.out": "shared_mlp.output_linear",
        ("moe.shared.gate", "moe.shared.up"): "shared_mlp.input_linear",
        "moe.shared.out": "shared_mlp.output_linear",
    },
    constants=ROOT,
    arrays={**mamba_arrays("mamba"), "moe.router": "block_sparse_moe.router.layer.weight"},
    experts={
        ("moe.experts.gate", "moe.experts.up"): "block_sparse_moe.input_linear.weight",
        "moe.experts.out": "block_sparse_moe.output_linear.weight",
    },
    stacking=Consecutive,
)
FALCON_H1 = Family(
    model_type="falcon_h1",
    parts=sizes(128000, 4096, 32, 32, 8, 14336)
    + numerics(8192, 1e-5)
    + SIZES
    + [HeadSize(1024), Key("mlp_bias", "mlp.bias", False), OPTIONAL_HEAD_DIM, tied(False)]
    + [ParallelLayers(), Multipliers(), Rotary()]
    + [Scale("embedding_multiplier", "embedding_scale"), Scale("lm_head_multiplier", LOGITS)]
    + [
        Fixed("mamba_use_mlp", True),
        Fixed("attn_layer_indices", None),
        Ignored("mlp_expansion_factor"),
    ],
    layers={**MAMBA_LAYER, **FED},
    constants=ROOT,
    ends={**ENDS, "final_norm": "model.final_layernorm"},
    arrays=mamba_arrays("mamba"),
    repeated_keys=INTERCHANGEABLE,
)
MAMBA: dict[str, Family] = {
    "Mamba2ForCausalLM": MAMBA2,
    "NemotronHForCausalLM": NEMOTRON_H,
    "BambaForCausalLM": BAMBA,
    "GraniteMoeHybridForCausalLM": GRANITE,
    "FalconH1ForCausalLM": FALCON_H1,
}
