"""Tables of the encoder families of Hugging Face's transformers: BERT and its relatives."""

import dataclasses

from maxmeg.config.bert import Transform
from maxmeg.config.model import ModelConfig, NormPlace, Position
from maxmeg.hf.families.keys import (
    MAX_LAYERS,
    Choice,
    Fields,
    Fixed,
    Json,
    Key,
    Keys,
    Part,
    refused,
)
from maxmeg.hf.families.tables import BIASES, LAYERNORM, UNGATED, Family, dropout, numerics

SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "bert": (30522, 768, 12, 12, 3072),
    "megatron-bert": (29056, 1024, 24, 16, 4096),
    "roberta": (50265, 768, 12, 12, 3072),
}


def parts(model_type: str) -> list[Part]:
    """The keys that all of them have, with the defaults of one."""
    vocab, hidden, layers, heads, ffn = SIZES[model_type]
    return [
        Key("vocab_size", "vocab_size", vocab),
        Key("hidden_size", "hidden_size", hidden),
        Key("num_hidden_layers", "num_layers", layers, most=MAX_LAYERS),
        Key("num_attention_heads", "attention.num_heads", heads),
        Key("intermediate_size", "mlp.ffn_size", ffn),
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
    parts=[*parts("bert"), *HEAD],
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
BERT_BODY = dataclasses.replace(
    BERT,
    parts=[*parts("bert"), ACTIVATION],
    ends={**EMBEDDINGS, "output": "cls.predictions.decoder"},
    layer="encoder.layer.",
    constants={**POST, "bert.pooler": True},
    ignored=(*BUFFERS, r"^cls\."),
    renamed=((r"^bert\.", ""), *OLD_NAMES),
)
MEGATRON_BERT = Family(
    model_type="megatron-bert",
    parts=[*parts("megatron-bert"), *HEAD],
    ends={**BODY, **HEADS, "final_norm": "bert.encoder.ln"},
    layer="bert.encoder.layer.",
    layers={**PROJECTIONS, "attention.norm": "attention.ln", "mlp.norm": "ln"},
    constants={**ALL, **PREDICTS, "bert.pooler": True, "bert.pair_head": True},
    ignored=BUFFERS,
)
ROBERTA = Family(
    model_type="roberta",
    parts=[
        *parts("roberta"),
        ACTIVATION,
        FirstPosition(),
    ],
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
ENCODERS: dict[str, Family] = {
    "BertForPreTraining": BERT,
    "BertForMaskedLM": MASKED_BERT,
    "BertModel": BERT_BODY,
    "MegatronBertForPreTraining": MEGATRON_BERT,
    "RobertaForMaskedLM": ROBERTA,
}
