"""Families with linear attention by the delta rule."""

from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import ModelConfig
from maxmeg.hf.families.expert_tables import EXPERT_FFN, EXPERTS, shared_expert
from maxmeg.hf.families.experts import AuxLoss, DenseLayers, Flag, num_experts
from maxmeg.hf.families.keys import Fields, Json, Key, Keys, Part, refused
from maxmeg.hf.families.rotary import Rotary
from maxmeg.hf.families.tables import (
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    HEAD_NORMS,
    LLAMA_LAYER,
    ROOT,
    SILU,
    Family,
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

    def __init__(self, mixer: str, attention: str = "attention"):
        self.mixer, self.attention = mixer, attention

    def read(self, keys: Keys, fields: Fields) -> None:
        count, types = fields["num_layers"], keys.take(self.name)
        every = keys.read(self.interval, 4, int)
        if types is None:
            types = [LINEAR if (i + 1) % every else FULL for i in range(count)]
        is_list = isinstance(types, list) and all(kind in (FULL, LINEAR) for kind in types)
        if not is_list or len(types) != count:
            wanted = f"it must be a list of {FULL!r} and {LINEAR!r}, one for each of {count} layers"
            raise refused(self.name, types, wanted)
        dense = fields.pop("dense")
        fields["kinds"] = [
            ((self.mixer if kind == LINEAR else self.attention,), ("mlp" if i in dense else "moe",))
            for i, kind in enumerate(types)
        ]

    def write(self, model: ModelConfig) -> Json:
        layers = range(model.num_layers)
        return {self.name: [LINEAR if self.mixer in model.mixers(i) else FULL for i in layers]}


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    parts=sizes(151936, 2048, 48, 16, 2, 5632)
    + numerics(32768, 1e-6)
    + [Key("head_dim", "attention.head_dim", 256), SILU, ATTENTION_BIAS, ATTENTION_DROPOUT]
    + [tied(False), *num_experts(512, 10, "num_experts"), Key(*EXPERT_FFN, 512)]
    + [Key("shared_expert_intermediate_size", "moe.shared_ffn_size", 512)]
    + [Flag("norm_topk_prob", "moe.softmax_before_topk", True, (True, False)), AuxLoss()]
    + [Key("linear_num_value_heads", "delta.num_heads", 32)]
    + [Key("linear_num_key_heads", "delta.num_key_heads", 16)]
    + [Key("linear_key_head_dim", "delta.key_size", 128)]
    + [Key("linear_value_head_dim", "delta.value_size", 128)]
    + [Key("linear_conv_kernel_dim", "delta.kernel_size", 4)]
    + [Rotary(fraction_default=0.25), DenseLayers(), LinearLayers("gated_delta")],
    layers={
        **LLAMA_LAYER,
        **HEAD_NORMS,
        **shared_expert("shared_expert"),
        "moe.shared_gate": "mlp.shared_expert_gate",
        tuple(
            f"gated_delta.{name}" for name in ("query", "key", "value", "gate")
        ): "linear_attn.in_proj_qkvz",
        ("gated_delta.beta", "gated_delta.step"): "linear_attn.in_proj_ba",
        tuple(
            f"gated_delta.{name}_conv" for name in ("query", "key", "value")
        ): "linear_attn.conv1d",
        "gated_delta.gated_norm": "linear_attn.norm",
        "gated_delta.out": "linear_attn.out_proj",
    },
    constants={
        **ROOT,
        "norm_one_plus": True,
        "attention.qk_norm": QkNorm.head,
        "attention.output_gate": True,
        "moe.shared_gate": True,
    },
    grouped=frozenset({"linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"}),
    arrays={
        "moe.router": "mlp.gate.weight",
        "gated_delta.decay_log": "linear_attn.A_log",
        "gated_delta.step_bias": "linear_attn.dt_bias",
    },
    experts=EXPERTS,
    # transformers drops the MTP layers of published checkpoints too.
    ignored=(r"rotary_emb\.inv_freq$", r"^mtp\."),
)

DELTA: dict[str, Family] = {"Qwen3NextForCausalLM": QWEN3_NEXT}
