"""Named encoders as data (see registry.py)."""

from maxmeg.config.bert import Transform
from maxmeg.config.mixers import Activation
from maxmeg.config.model import Norm, NormPlace, Position
from maxmeg.models.dense_sizes import Fields, sized

PREDICTS = {"bert.transform": Transform.gelu, "bert.output_bias": True}
PAIRS = {"bert.token_types": 2, "bert.pooler": True, "bert.pair_head": True}
MEGATRON_BERT = {
    **PREDICTS,
    **PAIRS,
    "vocab_size": 30522,
    "max_position": 512,
    "position": Position.learned,
    "norm": Norm.layernorm,
    "norm_eps": 1e-12,
    "tied": True,
    "dropout_hidden": 0.1,
    "dropout_embedding": 0.1,
    "attention.causal": False,
    "attention.dropout": 0.1,
    "attention.bias_qkv": True,
    "attention.bias_out": True,
    "mlp.activation": Activation.gelu,
    "mlp.bias": True,
}
BERT = {**MEGATRON_BERT, "norm_place": NormPlace.post_residual, "bert.embedding_norm": True}
ROBERTA = {
    **{name: value for name, value in BERT.items() if name not in PAIRS},
    "vocab_size": 50265,
    "max_position": 514,
    "norm_eps": 1e-5,
    "bert.token_types": 1,
    "bert.position_offset": 2,
}
MODERN_BERT = {
    **PREDICTS,
    "bert.transform_bias": False,
    "bert.embedding_norm": True,
    "vocab_size": 50368,
    "max_position": 8192,
    "layers": "raw_attention,mlp 2(local,mlp) *(attention,mlp 2(local,mlp))",
    "norm": Norm.layernorm,
    "norm_bias": False,
    "norm_eps": 1e-5,
    "tied": True,
    "attention.causal": False,
    "attention.window": 65,
    "rotary.base": 160000.0,
    "rotary.local_base": 10000.0,
    "mlp.activation": Activation.geglu_erf,
}

ENCODERS: dict[str, Fields] = {
    "bert-base": sized(BERT, (12, 768, 12, 12, 3072)),
    "bert-large": sized(BERT, (24, 1024, 16, 16, 4096)),
    "roberta-base": sized(ROBERTA, (12, 768, 12, 12, 3072)),
    "roberta-large": sized(ROBERTA, (24, 1024, 16, 16, 4096)),
    "modernbert-base": sized(MODERN_BERT, (22, 768, 12, 12, 1152)),
    "modernbert-large": sized(MODERN_BERT, (28, 1024, 16, 16, 2624)),
    "megatron-bert-1.3b": sized(MEGATRON_BERT, (24, 2048, 32, 32, 8192)),
    "megatron-bert-3.9b": sized(MEGATRON_BERT, (48, 2560, 40, 40, 10240)),
}
