"""Tables of the encoder families of Hugging Face's transformers: BERT and its relatives."""

import dataclasses
import typing

from maxmeg.config.bert import Transform
from maxmeg.config.mixers import Activation
from maxmeg.config.model import ModelConfig, NormPlace, Position
from maxmeg.hf.families.keys import (
    Choice,
    Fields,
    Fixed,
    Ignored,
    Json,
    Key,
    Keys,
    Part,
    refused,
)
from maxmeg.hf.families.rotary import Rotary
from maxmeg.hf.families.tables import (
    ATTENTION_BIASES,
    BIASES,
    LAYERNORM,
    QKV,
    UNGATED,
    Family,
    dropout,
    numerics,
    sizes,
)
from maxmeg.hf.families.windows import FULL, SLIDING, read_types, written_types


def sized(vocab: int, hidden: int, layers: int, heads: int, ffn: int) -> list[Key]:
    """The keys of a model's sizes, with their defaults."""
    keys = sizes(vocab, hidden, layers, heads, None, ffn)
    return [key for key in keys if key.name != "num_key_value_heads"]


def parts(*defaults: int) -> list[Part]:
    """The keys that BERT and its relatives have, with the defaults of the sizes."""
    return [
        *sized(*defaults),
        *numerics(512, 1e-12, eps_name="layer_norm_eps"),
        Key("type_vocab_size", "bert.token_types", 2),
        dropout("hidden_dropout_prob", "dropout_hidden", "dropout_embedding", default=0.1),
        dropout("attention_probs_dropout_prob", "attention.dropout", default=0.1),
        Fixed("tie_word_embeddings", True),
        Fixed("position_embedding_type", "absolute"),
    ]


class FirstPosition(Part):
    """Positions begin after pad_token_id, the row of the table for padding (RoBERTa)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        fields["bert.position_offset"] = keys.read("pad_token_id", 1, int, zero=True) + 1

    def write(self, model: ModelConfig) -> Json:
        return {"pad_token_id": model.bert.position_offset - 1}


class HeadActivation(Part):
    """The dense layer before the output weights has the activation of the MLP."""

    def read(self, keys: Keys, fields: Fields) -> None:
        name = fields["mlp.activation"].value
        if name not in Transform.__members__:
            raise refused("hidden_act", name, "supported are gelu and gelu_pytorch_tanh")
        fields["bert.transform"] = Transform[name]


ACTIVATION = Choice("hidden_act", "mlp.activation", "gelu", UNGATED)
HEAD: list[Part] = [ACTIVATION, HeadActivation()]
ALL = {
    **LAYERNORM,
    **dict.fromkeys(BIASES, True),
    **{"position": Position.learned, "tied": True, "attention.causal": False},
}
POST = {**ALL, "norm_place": NormPlace.post_residual, "bert.embedding_norm": True}
PREDICTS = {"bert.output_bias": True}
EMBEDDINGS = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "bert.token_types": "embeddings.token_type_embeddings",
    "bert.norm": "embeddings.LayerNorm",
    "bert.pooler": "pooler.dense",
}
BODY = {ours: f"bert.{name}" for ours, name in EMBEDDINGS.items()}
HEADS = {
    "bert.transform": "cls.predictions.transform.dense",
    "bert.transform_norm": "cls.predictions.transform.LayerNorm",
    "bert.output": "cls.predictions",
    "bert.pair": "cls.seq_relationship",
    "output": "cls.predictions.decoder",
}
PROJECTIONS = {
    **{f"attention.{name}": f"attention.self.{name}" for name in ("query", "key", "value")},
    "attention.out": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.out": "output.dense",
}
POST_NORMS = {
    "attention.post_norm": "attention.output.LayerNorm",
    "mlp.post_norm": "output.LayerNorm",
}
BUFFERS = (r"embeddings\.(position|token_type)_ids$",)
OLD_NAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))

BERT = Family(
    model_type="bert",
    parts=[*parts(30522, 768, 12, 12, 3072), *HEAD],
    ends={**BODY, **HEADS},
    layer="bert.encoder.layer.",
    layers={**PROJECTIONS, **POST_NORMS},
    constants={**POST, **PREDICTS, "bert.pooler": True, "bert.pair_head": True},
    ignored=BUFFERS,
    renamed=OLD_NAMES,
)
MASKED_BERT = dataclasses.replace(
    BERT,
    constants={**POST, **PREDICTS},
    ignored=(*BUFFERS, r"^bert\.pooler\.", r"^cls\.seq_relationship\."),
)
MEGATRON_BERT = Family(
    model_type="megatron-bert",
    parts=[*parts(29056, 1024, 24, 16, 4096), *HEAD],
    ends={**BODY, **HEADS, "final_norm": "bert.encoder.ln"},
    layer="bert.encoder.layer.",
    layers={**PROJECTIONS, "attention.norm": "attention.ln", "mlp.norm": "ln"},
    constants={**ALL, **PREDICTS, "bert.pooler": True, "bert.pair_head": True},
    ignored=BUFFERS,
)
ROBERTA = Family(
    model_type="roberta",
    parts=[*parts(50265, 768, 12, 12, 3072), ACTIVATION, FirstPosition()],
    ends={
        **{ours: f"roberta.{name}" for ours, name in EMBEDDINGS.items()},
        "bert.transform": "lm_head.dense",
        "bert.transform_norm": "lm_head.layer_norm",
        "bert.output": "lm_head",
        "output": "lm_head.decoder",
    },
    layer="roberta.encoder.layer.",
    layers={**PROJECTIONS, **POST_NORMS},
    constants={**POST, **PREDICTS, "bert.transform": Transform.gelu},
    ignored=(*BUFFERS, r"^roberta\.pooler\."),
    renamed=OLD_NAMES,
)

# The same with other names, and defaults of BERT.
XLM_ROBERTA, CAMEMBERT = (
    dataclasses.replace(
        ROBERTA,
        model_type=name,
        parts=[*parts(30522, 768, 12, 12, 3072), ACTIVATION, FirstPosition()],
    )
    for name in ("xlm-roberta", "camembert")
)


def without_heads(base: Family, **changes: typing.Any) -> Family:
    """A family without the heads that predict tokens and the order of pairs."""
    heads = (*PREDICTS, "bert.transform", "bert.pooler", "bert.pair_head")
    parts = [part for part in base.parts if not isinstance(part, HeadActivation)]
    constants = {name: value for name, value in base.constants.items() if name not in heads}
    return dataclasses.replace(base, **{"parts": parts, "constants": constants} | changes)


def body(base: Family, prefix: str, head: str) -> Family:
    """The layers and the pooler; `prefix` and `head` begin names in files that have a head too."""
    plain, last = without_heads(base), {n: base.ends[n] for n in ("final_norm",) if n in base.ends}
    last = {name: theirs.removeprefix(f"{prefix}.") for name, theirs in last.items()}
    return dataclasses.replace(
        plain,
        ends={**EMBEDDINGS, **last, "output": base.ends["output"]},
        layer=base.layer.removeprefix(f"{prefix}."),
        constants={**plain.constants, "bert.pooler": True},
        ignored=(*BUFFERS, rf"^{head}\."),
        renamed=((rf"^{prefix}\.", ""), *base.renamed),
    )


class AlternatingAttention(Part):
    """Every n-th layer attends to all tokens, the others to a window around each token. The first
    layer's attention reads the normalized embeddings without a further norm (ModernBERT)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        width, every = keys.read("local_attention", 128, int), 3
        if width % 2:
            raise refused("local_attention", width, "it must be even: half of it on each side")
        every = keys.read("global_attn_every_n_layers", every, int)
        types = [SLIDING if n % every else FULL for n in range(fields["num_layers"])]
        read_types(keys, fields, types, width // 2 + 1)
        local = fields["local"]
        if local[0]:
            rule = f"the first layer must have {FULL!r}"
            raise refused("layer_types", keys.take("layer_types"), rule)
        fields["first"] = ["local" if is_local else "attention" for is_local in local]
        fields["first"][0] = "raw_attention"

    def write(self, model: ModelConfig) -> Json:
        width = 2 * (model.attention.window - 1) if model.attention.window else 128
        return {"local_attention": width, "layer_types": written_types(model)}


GELUS = {"gelu": Activation.geglu_erf, "gelu_pytorch_tanh": Activation.geglu}
TRANSFORMS = {"gelu": Transform.gelu, "gelu_pytorch_tanh": Transform.gelu_tanh}
MODERN_PARTS: list[Part] = [
    *sized(50368, 768, 22, 12, 1152),
    *numerics(8192, 1e-5, eps_name="norm_eps"),
    Choice("hidden_activation", "mlp.activation", "gelu", GELUS),
    Key("norm_bias", "norm_bias", False),
    Key("attention_bias", ATTENTION_BIASES, False),
    Key("mlp_bias", "mlp.bias", False),
    dropout("embedding_dropout", "dropout_embedding"),
    Fixed("attention_dropout", 0.0),  # it drops outputs of the projection too
    Fixed("mlp_dropout", 0.0),
    Fixed("tie_word_embeddings", True),
    AlternatingAttention(),
    Rotary("global_rope_theta", 160000.0, kinds=("default",), local="local_rope_theta"),
    Ignored("initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile"),
    Ignored("layer_norm_eps", "position_embedding_type", "repad_logits_with_grad"),
    Ignored("classifier_pooling", "sparse_prediction", "sparse_pred_ignore_index"),
]
MODERN_BODY = {
    "embedding": "embeddings.tok_embeddings",
    "bert.norm": "embeddings.norm",
    "final_norm": "final_norm",
    "output": "decoder",
}
MODERN_BERT = Family(
    model_type="modernbert",
    parts=[
        *MODERN_PARTS,
        Choice("classifier_activation", "bert.transform", "gelu", TRANSFORMS),
        Key("classifier_bias", "bert.transform_bias", False),
        Key("decoder_bias", "bert.output_bias", True),
    ],
    ends={
        **{ours: f"model.{name}" for ours, name in MODERN_BODY.items()},
        "bert.transform": "head.dense",
        "bert.transform_norm": "head.norm",
        "bert.output": "decoder",
        "output": "decoder",
    },
    layers={
        QKV: "attn.Wqkv",
        "attention.out": "attn.Wo",
        ("mlp.gate", "mlp.up"): "mlp.Wi",
        "mlp.out": "mlp.Wo",
        "attention.norm": "attn_norm",
        "mlp.norm": "mlp_norm",
    },
    constants={**LAYERNORM, "tied": True, "attention.causal": False, "bert.embedding_norm": True},
)
MODERN_BERT_BODY = dataclasses.replace(
    MODERN_BERT,
    parts=[*MODERN_PARTS, Ignored("classifier_activation", "classifier_bias", "decoder_bias")],
    ends=MODERN_BODY,
    layer="layers.",
    ignored=(r"^(head|decoder)\.",),
    renamed=((r"^model\.", ""),),
)
ENCODERS: dict[str, Family] = {
    "BertForPreTraining": BERT,
    "BertForMaskedLM": MASKED_BERT,
    "BertModel": body(BERT, "bert", "cls"),
    "MegatronBertForPreTraining": MEGATRON_BERT,
    "MegatronBertModel": body(MEGATRON_BERT, "bert", "cls"),
    "RobertaForMaskedLM": ROBERTA,
    "RobertaModel": body(ROBERTA, "roberta", "lm_head"),
    "XLMRobertaForMaskedLM": XLM_ROBERTA,
    "XLMRobertaModel": body(XLM_ROBERTA, "roberta", "lm_head"),
    "CamembertForMaskedLM": CAMEMBERT,
    "CamembertModel": body(CAMEMBERT, "roberta", "lm_head"),
    "ModernBertForMaskedLM": MODERN_BERT,
    "ModernBertModel": MODERN_BERT_BODY,
}
