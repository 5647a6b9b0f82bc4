"""Families whose layers do not all have attention."""

import dataclasses

from maxmeg.config.mixers import QkNorm, RouterScore
from maxmeg.config.model import ModelConfig
from maxmeg.hf.families.experts import FirstDense, Normalized, num_experts
from maxmeg.hf.families.keys import Fields, Fixed, Ignored, Json, Key, Keys, Part, refused
from maxmeg.hf.families.rotary import Rotary
from maxmeg.hf.families.tables import ENDS, ROOT, Family, numerics, sizes
from maxmeg.hf.families.windows import FULL

CONV, AUTO = "conv", "block_auto_adjust_ff_dim"
SIZES = (
    "block_dim",
    "conv_dim",
    "conv_dim_out",
)  # transformers has no such fields, vLLM needs them


class AdjustedSize(Part):
    """The MLP's width: intermediate_size, or two thirds of it rounded up (LFM2)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        size = fields["mlp.ffn_size"]
        is_adjusted = keys.read(AUTO, True, bool)
        factor = keys.read("block_ffn_dim_multiplier", 1.0, float, null=1.0)
        multiple = keys.read("block_multiple_of", 256, int)
        if is_adjusted:
            fields["mlp.ffn_size"] = -(-int(factor * int(2 * size / 3)) // multiple) * multiple

    def write(self, model: ModelConfig) -> Json:
        return {AUTO: False}


class ShortConvolutions(Part):
    """Which layers have a short convolution in place of attention, and its kernel (LFM2)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        count, types = fields["num_layers"], keys.take("layer_types")
        places = keys.take("full_attn_idxs")
        if types is None:
            places = list(range(count)) if places is None else places
            if not isinstance(places, list):
                raise refused("full_attn_idxs", places, "it must be a list of numbers of layers")
            types = [FULL if number in places else CONV for number in range(count)]
        is_list = isinstance(types, list) and all(name in (FULL, CONV) for name in types)
        if not is_list or len(types) != count:
            rule = f"it must be a list of {FULL!r} and {CONV!r}, one for each of {count} layers"
            raise refused("layer_types", types, rule)
        for name in SIZES:
            if (size := keys.take(name)) not in (None, fields["hidden_size"]):
                raise refused(name, size, f"it must be hidden_size={fields['hidden_size']}")
        kernel = keys.read("conv_L_cache", 3, int)
        bias = keys.read("conv_bias", False, bool)
        if CONV in types:
            fields |= {"conv.kernel_size": kernel, "conv.bias": bias}
        fields["first"] = ["conv" if name == CONV else "attention" for name in types]

    def write(self, model: ModelConfig) -> Json:
        layers = range(model.num_layers)
        return {
            "layer_types": [CONV if "conv" in model.mixers(i) else FULL for i in layers],
            "conv_L_cache": model.conv.kernel_size,
            "conv_bias": model.conv.bias,
            **dict.fromkeys(SIZES, model.hidden_size),
        }


class AliasedRotary(Rotary):
    """`theta` is another name of `rope_theta` in some files; transformers reads the latter."""

    def write(self, model: ModelConfig) -> Json:
        keys = super().write(model)
        return {**keys, "rope_theta": keys.pop(self.theta)}


LFM2 = Family(
    model_type="lfm2",
    parts=sizes(65536, 2560, 32, 32, 8, 12288)[:-1]
    + numerics(128000, 1e-5, eps_name="norm_eps")
    + [Key("intermediate_size", "mlp.ffn_size", 12288, aliases=("block_ff_dim",))]
    + [Key("tie_word_embeddings", "tied", True, aliases=("tie_embedding",))]
    + [AdjustedSize(), ShortConvolutions(), AliasedRotary("theta", default=1e6)]
    + [Fixed("block_use_swiglu", True), Fixed("use_pos_enc", True)]
    + [Ignored("block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "num_heads")]
    + [Ignored("block_use_xavier_init", "conv_use_xavier_init")],
    layers={
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.out": "self_attn.out_proj",
        "attention.query_norm": "self_attn.q_layernorm",
        "attention.key_norm": "self_attn.k_layernorm",
        ("conv.input_gate", "conv.output_gate", "conv.value"): "conv.in_proj",
        "conv.kernel": "conv.conv",
        "conv.out": "conv.out_proj",
        "mlp.gate": "feed_forward.w1",
        "mlp.up": "feed_forward.w3",
        "mlp.out": "feed_forward.w2",
        "attention.norm": "operator_norm",
        "mlp.norm": "ffn_norm",
    },
    constants={**ROOT, "attention.qk_norm": QkNorm.head},
    ends={**ENDS, "final_norm": "model.embedding_norm"},
)
FED = {"gate": "w1", "up": "w3", "out": "w2"}
LFM2_MOE = dataclasses.replace(
    LFM2,
    model_type="lfm2_moe",
    parts=sizes(65536, 2048, 32, 32, 8, 7168)
    + numerics(128000, 1e-5, eps_name="norm_eps")
    + [Key("tie_word_embeddings", "tied", True, aliases=("tie_embedding",))]
    + [ShortConvolutions(), AliasedRotary("theta", default=1e6)]
    + num_experts(32, 4, "num_experts", "num_local_experts")
    + [Key("moe_intermediate_size", "moe.ffn_size", 1792), FirstDense(2, "num_dense_layers")]
    + [
        Key("routed_scaling_factor", "moe.scale", 1.0),
        Normalized(),
        Fixed("use_expert_bias", True),
    ],
    constants={**LFM2.constants, "moe.score": RouterScore.sigmoid, "moe.bias_balancing": True},
    arrays={"moe.router": "feed_forward.gate.weight", "moe.bias": "feed_forward.expert_bias"},
    experts={
        f"moe.experts.{ours}": f"feed_forward.experts.{{}}.{theirs}.weight"
        for ours, theirs in FED.items()
    },
)

HYBRID: dict[str, Family] = {"Lfm2ForCausalLM": LFM2, "Lfm2MoeForCausalLM": LFM2_MOE}
