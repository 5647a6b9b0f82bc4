"""Text models of Llama 4 and Ministral 3, which scale queries by their position."""

import dataclasses

from maxmeg.config.mixers import QkNorm, RouterScore
from maxmeg.config.model import ModelConfig
from maxmeg.hf.families.binding import Columns
from maxmeg.hf.families.expert_tables import num_experts
from maxmeg.hf.families.experts import AuxLoss, Flag
from maxmeg.hf.families.keys import Fields, Fixed, Ignored, Json, Key, Keys, Part, checked, refused
from maxmeg.hf.families.rotary import KINDS, ORIGINAL, Rotary
from maxmeg.hf.families.tables import (
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    LLAMA_LAYER,
    MISTRAL,
    PRE_NORMS,
    PROJECTIONS,
    ROOT,
    SEEING,
    SILU,
    WINDOW,
    Family,
    numerics,
    sizes,
    tied,
)
from maxmeg.hf.families.windows import FULL, UNROTATED, UnrotatedLayers

CHUNKED = "chunked_attention"
LENGTH, SCALE, OFFSET = (f"attention.temperature_{name}" for name in ("length", "scale", "offset"))


class ChunkedLayers(UnrotatedLayers):
    """Layers without a rotary embedding attend to all earlier tokens, with an optional attention
    temperature; the others attend within chunks, unless the chunk size is null."""

    def read(self, keys: Keys, fields: Fields) -> None:
        types, count = keys.take("layer_types"), fields["num_layers"]
        keys.values = {name: value for name, value in keys.values.items() if name != "layer_types"}
        super().read(keys, fields)
        chunk = keys.read("attention_chunk_size", 8192, int, null=0)
        first = ["local" if chunk and name != UNROTATED else name for name in fields["first"]]
        derived = [CHUNKED if name == "local" else FULL for name in first]
        if types not in (None, derived):
            rule = f"rotated layers are {derived[0]!r}, by attention_chunk_size={chunk or None}"
            raise refused("layer_types", types, f"{rule}, and others {FULL!r}")
        fields |= {"first": first, "attention.chunk": chunk if "local" in first else 0}
        grows = keys.take("attn_temperature_tuning", True)  # a number in the first files
        length = keys.read("floor_scale", 8192, int)
        scale = keys.read("attn_scale", 0.1, float, zero=True)
        if grows and UNROTATED in first and count:
            fields |= {LENGTH: length, SCALE: scale, OFFSET: 1}

    def write(self, model: ModelConfig) -> Json:
        heads = model.attention
        entries = super().write(model)
        mixers = [model.mixers(layer) for layer in range(model.num_layers)]
        entries["layer_types"] = [CHUNKED if "local" in names else FULL for names in mixers]
        entries["attention_chunk_size"] = heads.chunk or None
        entries["attn_temperature_tuning"] = bool(heads.temperature_length)
        if heads.temperature_length:
            entries["floor_scale"] = heads.temperature_length
            entries["attn_scale"] = heads.temperature_scale
        return entries


class ListedExperts(Part):
    """The numbers of the layers with experts; null: every n-th layer."""

    name = "moe_layers"

    def read(self, keys: Keys, fields: Fields) -> None:
        count, step = fields["num_layers"], keys.read("interleave_moe_layer_step", 1, int)
        layers = keys.take(self.name)
        layers = [*range(step - 1, count, step)] if layers is None else layers
        if not isinstance(layers, list) or not all(type(number) is int for number in layers):
            raise refused(self.name, layers, "it must be a list of layer numbers, or null")
        fields["dense"] = {*range(count)} - {*layers}
        fields["moe.shared_ffn_size"] = fields["moe.ffn_size"]

    def write(self, model: ModelConfig) -> Json:
        layers = range(model.num_layers)
        return {self.name: [layer for layer in layers if "moe" in model.mixers(layer)]}


MLP = {"gate": "gate_proj", "up": "up_proj", "out": "down_proj"}
LLAMA4 = Family(
    model_type="llama4_text",
    parts=sizes(202048, 5120, 48, 40, 8, 8192)
    + numerics(131072, 1e-5)
    + [Key("intermediate_size", "moe.ffn_size", 8192)]
    + [Key("intermediate_size_mlp", "mlp.ffn_size", 16384)]
    + [Key("head_dim", "attention.head_dim", 128), SILU, ATTENTION_BIAS, ATTENTION_DROPOUT]
    + [tied(False), Flag("use_qk_norm", "attention.qk_norm", True, (QkNorm.none, QkNorm.l2))]
    + num_experts(16, 1, "num_local_experts", "num_experts")
    + [ChunkedLayers(), ListedExperts(), AuxLoss(), Fixed("router_jitter_noise", 0.0)]
    + [Ignored("for_llm_compressor"), Rotary(default=500000.0)],
    layers={
        **PROJECTIONS,
        **PRE_NORMS,
        **{f"mlp.{ours}": f"feed_forward.{theirs}" for ours, theirs in MLP.items()},
        **{
            f"moe.shared.{ours}": f"feed_forward.shared_expert.{theirs}"
            for ours, theirs in MLP.items()
        },
    },
    constants={
        **ROOT,
        "rotary.interleaved": True,
        "moe.score": RouterScore.sigmoid,
        "moe.scale_inputs": True,
    },
    arrays={"moe.router": "feed_forward.router.weight"},
    experts={
        ("moe.experts.gate", "moe.experts.up"): "feed_forward.experts.gate_up_proj",
        "moe.experts.out": "feed_forward.experts.down_proj",
    },
    stacking=Columns,
    ignored=(*SEEING["ignored"], r"^vision_model\."),
    renamed=SEEING["renamed"],
)


@dataclasses.dataclass(frozen=True)
class GrowingRotary(Rotary):
    """Rotary embedding. Its settings in config.json include the attention temperature."""

    name = "llama_4_scaling_beta"

    def read(self, keys: Keys, fields: Fields) -> None:
        super().read(keys, fields)
        settings = self.all_settings(keys)
        if scale := settings.get(self.name):
            length = settings.get(ORIGINAL) or fields["max_position"]
            fields |= {
                SCALE: checked(self.name, scale, float),
                LENGTH: checked(ORIGINAL, length, int),
            }

    def all_settings(self, keys: Keys) -> Json:
        return super().settings(keys) or dict(self.missing)

    def settings(self, keys: Keys) -> Json:
        settings = self.all_settings(keys)
        kind = str(settings.get("rope_type", settings.get("type", "default")))
        extra = {self.name, "max_position_embeddings"}
        extra |= {ORIGINAL} - KINDS.get(kind, {ORIGINAL: None}).keys()
        return {name: v for name, v in settings.items() if name not in extra}

    def write(self, model: ModelConfig) -> Json:
        """Write both keys of the temperature in any case: transformers computes with them."""
        heads, entries = model.attention, super().write(model)
        scaling = entries["rope_scaling"]
        length = scaling.get(ORIGINAL) or heads.temperature_length or model.max_position
        if heads.temperature_length not in (0, length) or heads.temperature_offset:
            raise ValueError(
                f"model.{LENGTH}={heads.temperature_length} and {OFFSET}="
                f"{heads.temperature_offset}: ministral3 has rotary.original_length={length} and 0"
            )
        scale = heads.temperature_scale if heads.temperature_length else 0.0
        return entries | {"rope_scaling": {**scaling, self.name: scale, ORIGINAL: length}}


MINISTRAL3_YARN = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    GrowingRotary.name: 0.1,
}
MINISTRAL3 = dataclasses.replace(
    MISTRAL,
    model_type="ministral3",
    parts=sizes(131072, 4096, 34, 32, 8, 14336)
    + numerics(262144, 1e-5)
    + [Key("head_dim", "attention.head_dim", 128, null=True), SILU, ATTENTION_DROPOUT]
    + [tied(False), Key(*WINDOW, None, null=True), GrowingRotary(missing=MINISTRAL3_YARN)],
    layers=LLAMA_LAYER,
)
GROWING: dict[str, Family] = {
    "Llama4ForCausalLM": LLAMA4,
    "Ministral3ForCausalLM": MINISTRAL3,
}
