"""Named encoders and encoder-decoders as data (see registry.py)."""

from maxmeg.config.bert import Transform
from maxmeg.config.mixers import Activation
from maxmeg.config.model import Norm, NormPlace, Position
from maxmeg.models.dense_sizes import BIASES, Fields, sized

DROPOUT = dict.fromkeys(("dropout_hidden", "dropout_embedding", "attention.dropout"), 0.1)
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
    **DROPOUT,
    **BIASES,
    "attention.causal": False,
    "mlp.activation": Activation.gelu,
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
T5_LAYERS = "{}(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)"
T5 = {
    "vocab_size": 32128,
    "max_position": 512,
    "position": Position.relative,
    "norm": Norm.rmsnorm,
    "norm_eps": 1e-6,
    **DROPOUT,
    "attention.scale": 1.0,
    "attention.head_dim": 64,
    "mlp.activation": Activation.geglu,
}


def t5(layers: int, hidden: int, heads: int, ffn: int) -> Fields:
    """v1.1 with so many layers each in encoder and decoder."""
    root = {**T5, "layers": T5_LAYERS.format(layers)}
    return sized(root, (2 * layers + 1, hidden, heads, heads, ffn))


def t5_first(layers: int, hidden: int, heads: int, ffn: int, head_dim: int = 64) -> Fields:
    """v1.0, with tied and scaled output weights."""
    own = {"tied": True, "logit_scale": hidden**-0.5, "mlp.activation": Activation.relu}
    return {**t5(layers, hidden, heads, ffn), **own, "attention.head_dim": head_dim}


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
LATER: dict[str, Fields] = {
    "small": t5(8, 512, 6, 1024),
    "base": t5(12, 768, 12, 2048),
    "large": t5(24, 1024, 16, 2816),
    "xl": t5(24, 2048, 32, 5120),
    "xxl": t5(24, 4096, 64, 10240),
}
ENCODER_DECODERS: dict[str, Fields] = {
    "t5-small": t5_first(6, 512, 8, 2048),
    "t5-base": t5_first(12, 768, 12, 3072),
    "t5-large": t5_first(24, 1024, 16, 4096),
    "t5-3b": t5_first(24, 1024, 32, 16384, 128),
    "t5-11b": t5_first(24, 1024, 128, 65536, 128),
    **{f"t5-v1.1-{size}": fields for size, fields in LATER.items()},
}
