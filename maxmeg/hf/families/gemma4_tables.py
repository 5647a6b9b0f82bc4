"""Gemma 4's text models. Local and global layers have different head sizes."""

import dataclasses

from maxmeg.config.layers import SHARED
from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import ModelConfig, NormPlace
from maxmeg.hf.families.binding import Columns, Consecutive
from maxmeg.hf.families.keys import (
    Choice,
    Fields,
    Fixed,
    Json,
    Key,
    Keys,
    Part,
    ScaledEmbedding,
    checked,
    refused,
)
from maxmeg.hf.families.rotary import KINDS, UnscaledLocal
from maxmeg.hf.families.tables import (
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    ENDS,
    GATED,
    GATED_MLP,
    GEMMA_LAYER,
    HEAD_NORMS,
    ROOT,
    SEEING,
    Family,
    numerics,
    sizes,
    tied,
)
from maxmeg.hf.families.windows import FULL, SLIDING, AlternatingWindow

KEYS_AS_VALUES = "attention_k_eq_v"
HEAD_DIM, KV_HEADS = "global_head_dim", "num_global_key_value_heads"


class GlobalHeads(Part):
    """Size and number of the key/value heads of layers without a sliding window, in which the key
    projection may be the value projection too."""

    def read(self, keys: Keys, fields: Fields) -> None:
        head_dim, kv_heads = keys.read("head_dim", 256, int), fields["attention.num_kv_heads"]
        shared = keys.read(KEYS_AS_VALUES, False, bool)
        heads = self.of_global_layers(keys, fields)
        fields["attention.head_dim"] = checked(HEAD_DIM, heads.get("head_dim", head_dim), int)
        own_kv_heads = checked(KV_HEADS, heads.get("num_key_value_heads", kv_heads), int)
        fields["attention.num_kv_heads"] = own_kv_heads
        fields["attention.keys_as_values"] = shared and not all(fields["local"])
        if any(fields["local"]):
            fields |= {"attention.local_head_dim": head_dim, "attention.local_kv_heads": kv_heads}

    def of_global_layers(self, keys: Keys, fields: Fields) -> Json:
        """The settings of global layers, which are listed by layer in newer files."""
        head_dim, kv_heads = keys.read(HEAD_DIM, 512, int), keys.take(KV_HEADS)
        keys.fixed.pop("per_layer_config", None)
        if (entries := keys.take("per_layer_config")) is None:
            if kv_heads is None or not keys.values.get(KEYS_AS_VALUES):
                return {"head_dim": head_dim}
            return {"head_dim": head_dim, "num_key_value_heads": kv_heads}
        if entries == {}:  # the heads of local layers
            return {}
        is_map = isinstance(entries, dict) and all(str(number).isdecimal() for number in entries)
        by_layer = {int(number): heads for number, heads in entries.items()} if is_map else {}
        heads = next(iter(by_layer.values()), None)
        layers = {number for number, is_local in enumerate(fields["local"]) if not is_local}
        if not isinstance(heads, dict) or by_layer != dict.fromkeys(layers, heads):
            raise refused("per_layer_config", entries, f"it must be the same in all {FULL}")
        return heads

    def write(self, model: ModelConfig) -> Json:
        heads = model.attention
        local = (heads.local_head_dim or model.head_size, heads.local_kv_heads or model.kv_heads)
        return {
            "head_dim": local[0],
            "num_key_value_heads": local[1],
            HEAD_DIM: model.head_size,
            KV_HEADS: model.kv_heads if heads.keys_as_values else None,
            KEYS_AS_VALUES: heads.keys_as_values,
        }


class Experts(Part):
    """Experts beside the MLP of each layer, which is their shared expert (26B-A4B)."""

    name, top_k = "enable_moe_block", "top_k_experts"
    sizes = (
        Key("num_experts", "moe.num_experts", None),
        Key(top_k, "moe.top_k", None),
        Key("moe_intermediate_size", "moe.ffn_size", None),
    )

    def read(self, keys: Keys, fields: Fields) -> None:
        if not keys.read(self.name, False, bool):
            keys.read_names.update(key.name for key in self.sizes)
            return
        for key in self.sizes:
            key.read(keys, fields)
        fields |= {"moe.norms": True, "moe.shared_ffn_size": fields["mlp.ffn_size"]}

    def write(self, model: ModelConfig) -> Json:
        if not model.has("moe"):
            return {self.name: False}
        entries = {name: value for key in self.sizes for name, value in key.write(model).items()}
        return {self.name: True, "intermediate_size": model.moe.shared_ffn_size, **entries}


class Layers(Part):
    """Embeddings of each layer, and layers at the end that read the keys and values of the last one
    of their kind before them, with an MLP of twice the width (E2B) or not (E4B)."""

    shared, wide = "num_kv_shared_layers", "use_double_wide_mlp"
    size, vocabulary = "hidden_size_per_layer_input", "vocab_size_per_layer_input"

    def read(self, keys: Keys, fields: Fields) -> None:
        first_shared = fields["num_layers"] - keys.read(self.shared, 0, int, zero=True)
        is_wide, size = keys.read(self.wide, False, bool), keys.read(self.size, 256, int, zero=True)
        vocabulary, has_experts = keys.read(self.vocabulary, 262144, int), "moe.top_k" in fields
        if size and vocabulary != fields["vocab_size"]:
            raise refused(self.vocabulary, vocabulary, "it must be vocab_size")
        kinds = []
        for number, is_local in enumerate(fields.pop("local")):
            is_shared, first = number >= first_shared, "local" if is_local else "attention"
            if is_shared and is_wide and has_experts:
                raise refused(self.wide, True, "with enable_moe_block=true it must be false")
            second = "moe" if has_experts else "wide_mlp" if is_shared and is_wide else "mlp"
            kind = (f"shared_{first}" if is_shared else first,), (second,)
            kinds.append((*kind, ("layer_embedding",)) if size else kind)
        fields |= {"kinds": kinds, "layer_embedding.size": size}

    def write(self, model: ModelConfig) -> Json:
        size = model.layer_embedding.size if model.has("layer_embedding") else 0
        layers = map(model.mixers, range(model.num_layers))
        return {
            self.shared: sum(not SHARED.keys().isdisjoint(mixers) for mixers in layers),
            self.wide: model.has("wide_mlp"),
            self.size: size,
            self.vocabulary: model.vocab_size,
        }


MISSING = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    SLIDING: {"rope_theta": 10000.0},
}


@dataclasses.dataclass(frozen=True)
class ProportionalRotary(UnscaledLocal):
    """In global layers a fraction of the frequencies rotates: `factor` is one over it."""

    kinds: tuple[str, ...] = ("proportional", *KINDS)
    parts = "rope_parameters", "partial_rotary_factor"

    def read(self, keys: Keys, fields: Fields) -> None:
        name, fraction = self.parts
        settings = keys.values.get(name, MISSING)
        full = dict(settings.get(FULL) or {}) if isinstance(settings, dict) else {}
        if full.get("rope_type") == "proportional":
            full["factor"] = 1 / checked(fraction, full.pop(fraction, 1.0), float)
            keys.values = {**keys.values, name: {**settings, FULL: full}}
        super().read(keys, fields)

    def write(self, model: ModelConfig) -> Json:
        name, fraction = self.parts
        entries = super().write(model)
        entries.pop("rope_scaling")
        full = entries[name][FULL]
        if full["rope_type"] == "proportional":
            full[fraction] = 1 / full.pop("factor")
        return entries


BLOCK_NORMS = {
    "moe.norms.shared": "pre_feedforward_layernorm",
    "moe.norms.shared_out": "post_feedforward_layernorm_1",
    "moe.norms.experts": "pre_feedforward_layernorm_2",
    "moe.norms.experts_out": "post_feedforward_layernorm_2",
}
LAYER_EMBEDDING = {
    "layer_embedding.gate": "per_layer_input_gate",
    "layer_embedding.out": "per_layer_projection",
    "layer_embedding.post_norm": "post_per_layer_input_norm",
}
SHARED_MLP = {name.replace("mlp", "moe.shared"): theirs for name, theirs in GATED_MLP.items()}
GEMMA4 = Family(
    model_type="gemma4_text",
    parts=sizes(262144, 2304, 30, 8, 4, 9216)
    + numerics(131072, 1e-6)
    + [AlternatingWindow(6, default=512), GlobalHeads()]
    + [ATTENTION_BIAS, ATTENTION_DROPOUT, tied(True), ScaledEmbedding()]
    + [Choice("hidden_activation", "mlp.activation", "gelu_pytorch_tanh", GATED)]
    + [Key("final_logit_softcapping", "logit_softcap", None, null=True)]
    + [Experts()]
    + [Fixed("use_bidirectional_attention", "vision")]
    + [ProportionalRotary(default=1e6), Layers()],
    layers={**GEMMA_LAYER, **HEAD_NORMS, **BLOCK_NORMS, **SHARED_MLP, **LAYER_EMBEDDING},
    ends={**ENDS, "embedding_norm": "model.per_layer_projection_norm"},
    by_layer={
        "layer_embedding.table": ("model.embed_tokens_per_layer.weight", Columns),
        "layer_embedding.projection.weight": (
            "model.per_layer_model_projection.weight",
            Consecutive,
        ),
    },
    constants={
        **ROOT,
        "norm_place": NormPlace.sandwich,
        "attention.qk_norm": QkNorm.head,
        "attention.value_norm": True,
        "attention.scale": 1.0,
        "layer_scale": True,
    },
    arrays={
        "mlp.scale": "layer_scalar",
        "layer_embedding.scale": "layer_scalar",
        "moe.router": "router.proj.weight",
        "moe.norms.router.weight": "router.scale",
        "moe.expert_scale": "router.per_expert_scale",
    },
    experts={
        ("moe.experts.gate", "moe.experts.up"): "experts.gate_up_proj",
        "moe.experts.out": "experts.down_proj",
    },
    stacking=Consecutive,
    ignored=(*SEEING["ignored"], r"^(model\.)?(audio_tower|embed_vision|embed_audio)\."),
    renamed=SEEING["renamed"],
)
