"""Families with linear attention by the delta rule."""

import dataclasses

from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import ModelConfig, Position
from maxmeg.config.setting import get
from maxmeg.hf.families.expert_tables import (
    DEEPSEEK,
    EXPERT_FFN,
    EXPERTS,
    LATENT_ATTENTION,
    MIXTRAL,
    SIGMOID,
    shared_expert,
)
from maxmeg.hf.families.experts import (
    AuxLoss,
    DenseLayers,
    Flag,
    Groups,
    ListedDense,
    MtpAttention,
    Normalized,
    SharedExperts,
    num_experts,
)
from maxmeg.hf.families.keys import (
    Fields,
    Fixed,
    Ignored,
    Json,
    Key,
    Keys,
    Part,
    Renamed,
    checked,
    refused,
)
from maxmeg.hf.families.rotary import LATENT, Rotary
from maxmeg.hf.families.tables import (
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    GATED_MLP,
    HEAD_NORMS,
    LLAMA_LAYER,
    PRE_NORMS,
    ROOT,
    SILU,
    Family,
    MtpNames,
    numerics,
    sizes,
    tied,
)
from maxmeg.hf.families.windows import FULL

LINEAR = "linear_attention"


class LinearLayers(Part):
    """Which layers have linear attention: listed, or all but every n-th one. After those parts that
    say which layers are dense."""

    name, interval = "layer_types", "full_attention_interval"
    linear, full = "gated_delta", "attention"

    def missing(self, keys: Keys, count: int) -> list[str]:
        """The kinds of layers of a file without a list."""
        every = keys.read(self.interval, 4, int)
        return [LINEAR if (i + 1) % every else FULL for i in range(count)]

    def read(self, keys: Keys, fields: Fields) -> None:
        count, types = fields["num_layers"], keys.take(self.name)
        default = self.missing(keys, count)
        types = default if types is None else types
        is_list = isinstance(types, list) and all(kind in (FULL, LINEAR) for kind in types)
        if not is_list or len(types) != count:
            rule = f"it must be a list of {FULL!r} and {LINEAR!r}, one for each of {count} layers"
            raise refused(self.name, types, rule)
        dense = fields.pop("dense", () if "moe.num_experts" in fields else range(count))
        fields["kinds"] = [
            ((self.linear if kind == LINEAR else self.full,), ("mlp" if i in dense else "moe",))
            for i, kind in enumerate(types)
        ]

    def write(self, model: ModelConfig) -> Json:
        layers = range(model.num_layers)
        return {self.name: [LINEAR if self.linear in model.mixers(i) else FULL for i in layers]}


KIMI_LISTS = {"kda_layers": LINEAR, "full_attn_layers": FULL}
KIMI_SIZES = {  # names in the group, names outside, fields, defaults
    "num_heads": ("linear_num_heads", "delta.num_heads", 32),
    "head_dim": ("linear_head_dim", "delta.key_size", 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", "delta.kernel_size", 4),
}


class KimiLayers(LinearLayers):
    """Also the sizes of KDA; both stand in a group of their own in the publisher's files, which
    counts layers from 1."""

    linear, full, group = "kda", "mla", "linear_attn_config"

    def grouped(self, keys: Keys) -> Json:
        """The group; ValueError for a key in it that is not known."""
        group = keys.take(self.group)
        group = {} if group is None else group
        if not isinstance(group, dict) or not group.keys() <= {*KIMI_SIZES, *KIMI_LISTS}:
            rule = f"it must be a group of {', '.join([*KIMI_SIZES, *KIMI_LISTS])}"
            raise refused(self.group, group, rule)
        return group

    def missing(self, keys: Keys, count: int) -> list[str]:
        group = self.grouped(keys)
        if not all(name in group for name in KIMI_LISTS):
            return [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
        kinds = {number: kind for name, kind in KIMI_LISTS.items() for number in group[name]}
        return [kinds.get(number, "") for number in range(1, count + 1)]

    def read(self, keys: Keys, fields: Fields) -> None:
        group = self.grouped(keys)
        for name, (outside, field, default) in KIMI_SIZES.items():
            size = keys.read(outside, default, int)
            fields[field] = checked(f"{self.group}.{name}", group.get(name, size), int)
        super().read(keys, fields)

    def write(self, model: ModelConfig) -> Json:
        sizes = {outside: get(model, field) for outside, field, _ in KIMI_SIZES.values()}
        return {**super().write(model), **sizes}


QWEN_DELTA: list[Part] = [
    Key("linear_num_value_heads", "delta.num_heads", 32),
    Key("linear_num_key_heads", "delta.num_key_heads", 16),
    Key("linear_key_head_dim", "delta.key_size", 128),
    Key("linear_value_head_dim", "delta.value_size", 128),
    Key("linear_conv_kernel_dim", "delta.kernel_size", 4),
]
QWEN_PARTS = [Key("head_dim", "attention.head_dim", 256), SILU, ATTENTION_BIAS, ATTENTION_DROPOUT]
QWEN_PARTS = [*QWEN_PARTS, tied(False), *QWEN_DELTA]
QWEN_CONSTANTS = {
    **ROOT,
    "norm_one_plus": True,
    "attention.qk_norm": QkNorm.head,
    "attention.output_gate": True,
}
QWEN_EXPERTS = {**shared_expert("shared_expert"), "moe.shared_gate": "mlp.shared_expert_gate"}
QKV = tuple(f"gated_delta.{name}" for name in ("query", "key", "value"))
QWEN_LAYER = {
    **LLAMA_LAYER,
    **HEAD_NORMS,
    tuple(f"{name}_conv" for name in QKV): "linear_attn.conv1d",
    "gated_delta.gated_norm": "linear_attn.norm",
    "gated_delta.out": "linear_attn.out_proj",
}
QWEN_ARRAYS = {
    "gated_delta.decay_log": "linear_attn.A_log",
    "gated_delta.step_bias": "linear_attn.dt_bias",
}
QWEN_MTP = MtpNames(
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.fc",
    "mtp.norm",
    "mtp.layers.{depth}.",
)
ROUTER = {"moe.router": "mlp.gate.weight"}

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    parts=sizes(151936, 2048, 48, 16, 2, 5632)
    + numerics(32768, 1e-6)
    + QWEN_PARTS
    + [*num_experts(512, 10, "num_experts"), Key(*EXPERT_FFN, 512)]
    + [Key("shared_expert_intermediate_size", "moe.shared_ffn_size", 512)]
    + [Flag("norm_topk_prob", "moe.softmax_before_topk", True, (True, False)), AuxLoss()]
    + [Rotary(fraction_default=0.25), DenseLayers(), LinearLayers()]
    + [Fixed("use_sliding_window", False), MtpAttention("num_nextn_predict_layers")],
    layers={
        **QWEN_LAYER,
        **QWEN_EXPERTS,
        (*QKV, "gated_delta.gate"): "linear_attn.in_proj_qkvz",
        ("gated_delta.beta", "gated_delta.step"): "linear_attn.in_proj_ba",
    },
    constants={**QWEN_CONSTANTS, "moe.shared_gate": True},
    grouped=frozenset({"linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"}),
    arrays={**QWEN_ARRAYS, **ROUTER},
    experts=EXPERTS,
    mtp=QWEN_MTP,
)


class TextRotary(Rotary):
    """The rotary embedding of a model that also sees: the positions of a text's tokens along time,
    height and width are equal, so that it does not matter which dimensions turn by which."""

    names = ("mrope_section", "mrope_interleaved")

    def settings(self, keys: Keys) -> Json:
        settings = super().settings(keys)
        return {name: value for name, value in settings.items() if name not in self.names}


QWEN35_OTHERS: list[Part] = [
    TextRotary(fraction_default=0.25),
    LinearLayers(),
    Fixed("attn_output_gate", True),
    Fixed("mlp_only_layers", []),
    MtpAttention("mtp_num_hidden_layers"),
    Fixed("mtp_use_dedicated_embeddings", False),
    Ignored("mamba_ssm_dtype"),
]
QWEN35 = Family(
    model_type="qwen3_5_text",
    parts=sizes(248320, 4096, 32, 16, 4, 12288)
    + numerics(32768, 1e-6)
    + [*QWEN_PARTS, *QWEN35_OTHERS],
    layers={
        **QWEN_LAYER,
        QKV: "linear_attn.in_proj_qkv",
        "gated_delta.gate": "linear_attn.in_proj_z",
        "gated_delta.beta": "linear_attn.in_proj_b",
        "gated_delta.step": "linear_attn.in_proj_a",
    },
    constants=QWEN_CONSTANTS,
    arrays=QWEN_ARRAYS,
    ignored=(r"rotary_emb\.inv_freq$", r"^model\.visual\."),
    renamed=((r"^model\.language_model\.", "model."),),
    mtp=QWEN_MTP,
)
QWEN35_MOE = dataclasses.replace(
    QWEN35,
    model_type="qwen3_5_moe_text",
    parts=sizes(248320, 2048, 40, 16, 2, 0)[:-1]
    + numerics(32768, 1e-6)
    + [*QWEN_PARTS, *num_experts(256, 8, "num_experts"), Key(*EXPERT_FFN, 512)]
    + [Key("shared_expert_intermediate_size", "moe.shared_ffn_size", 512), AuxLoss()]
    + [*QWEN35_OTHERS, Ignored("intermediate_size")],
    layers={**QWEN35.layers, **QWEN_EXPERTS},
    constants={**QWEN_CONSTANTS, "moe.shared_gate": True},
    arrays={**QWEN_ARRAYS, **ROUTER},
    experts=EXPERTS,
    joined={
        ("moe.experts.gate", "moe.experts.up"): "mlp.experts.gate_up_proj",
        "moe.experts.out": "mlp.experts.down_proj",
    },
)

KIMI_LINEAR = Family(
    model_type="kimi_linear",
    parts=sizes(163840, 2304, 27, 32, None, 9216)
    + numerics(1048576, 1e-5)[1:]
    + [Key("model_max_length", "max_position", 1048576, aliases=("max_position_embeddings",))]
    + [*LATENT[:1], Key("q_lora_rank", "mla.query_rank", None, null=True), *LATENT[2:]]
    + [SILU, tied(False), ATTENTION_BIAS, ATTENTION_DROPOUT, Fixed("pretraining_tp", 1)]
    + [Key("num_experts", "moe.num_experts", 256, aliases=("num_local_experts",))]
    + [Key("num_experts_per_token", "moe.top_k", 8, aliases=("num_experts_per_tok",))]
    + [Key(*EXPERT_FFN, 1024), Renamed(SharedExperts(1), n_shared_experts="num_shared_experts")]
    + [Renamed(Groups(2), n_group="num_expert_group")]
    + [Renamed(Normalized(), norm_topk_prob="moe_renormalize")]
    + [Key("routed_scaling_factor", "moe.scale", 2.446), ListedDense(1), KimiLayers()]
    + [Fixed("moe_router_activation_func", "sigmoid"), Fixed("use_grouped_topk", True)]
    + [Fixed("moe_layer_freq", 1), Fixed("num_nextn_predict_layers", 0)]
    + [Fixed("mla_use_nope", True), Ignored("head_dim", "qk_head_dim")]
    + [Ignored("rope_theta", "rope_scaling", "rope_parameters")],  # without positions
    layers={
        **GATED_MLP,
        **PRE_NORMS,
        **LATENT_ATTENTION,
        **{f"kda.{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")},
        **{f"kda.{name}_conv": f"self_attn.{name[0]}_conv1d" for name in ("query", "key", "value")},
        "kda.step_down": "self_attn.f_a_proj",
        "kda.step": "self_attn.f_b_proj",
        "kda.gate_down": "self_attn.g_a_proj",
        "kda.gate": "self_attn.g_b_proj",
        "kda.beta": "self_attn.b_proj",
        "kda.gated_norm": "self_attn.o_norm",
        "kda.out": "self_attn.o_proj",
        **{
            f"moe.shared.{ours}": f"block_sparse_moe.shared_experts.{theirs}_proj"
            for ours, theirs in (("gate", "gate"), ("up", "up"), ("out", "down"))
        },
    },
    constants={**SIGMOID, **DEEPSEEK, "position": Position.none},
    grouped=frozenset({"self_attn.kv_b_proj"}),
    arrays={
        "moe.router": "block_sparse_moe.gate.weight",
        "moe.bias": "block_sparse_moe.gate.e_score_correction_bias",
        "kda.decay_log": "self_attn.A_log",
        "kda.step_bias": "self_attn.dt_bias",
    },
    shapes={"self_attn.A_log": (1, 1, -1, 1)},
    experts=MIXTRAL.experts,
    # transformers writes dense layers so.
    renamed=((r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj."),),
    code=r"(configuration|modeling)_kimi\.",
)

DELTA: dict[str, Family] = {
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5MoeForCausalLM": QWEN35_MOE,
    "KimiLinearForCausalLM": KIMI_LINEAR,
}
