"""Named encoder-decoders as data (see registry.py)."""

from maxmeg.config.mixers import Activation
from maxmeg.config.model import Norm, Position
from maxmeg.models.dense_sizes import Fields, sized

LAYERS = "{}(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)"
V1_1 = {
    "vocab_size": 32128,
    "max_position": 512,
    "position": Position.relative,
    "norm": Norm.rmsnorm,
    "norm_eps": 1e-6,
    "dropout_hidden": 0.1,
    "dropout_embedding": 0.1,
    "attention.scale": 1.0,
    "attention.dropout": 0.1,
    "attention.head_dim": 64,
    "mlp.activation": Activation.geglu,
}


def both(layers: int, hidden: int, heads: int, ffn: int) -> Fields:
    """v1.1 with so many layers each in encoder and decoder."""
    root = {**V1_1, "layers": LAYERS.format(layers)}
    return sized(root, (2 * layers + 1, hidden, heads, heads, ffn))


def first(layers: int, hidden: int, heads: int, ffn: int, head_dim: int = 64) -> Fields:
    """v1.0, with tied and scaled output weights."""
    own = {"tied": True, "logit_scale": hidden**-0.5, "mlp.activation": Activation.relu}
    return {**both(layers, hidden, heads, ffn), **own, "attention.head_dim": head_dim}


LATER: dict[str, Fields] = {
    "small": both(8, 512, 6, 1024),
    "base": both(12, 768, 12, 2048),
    "large": both(24, 1024, 16, 2816),
    "xl": both(24, 2048, 32, 5120),
    "xxl": both(24, 4096, 64, 10240),
}
ENCODER_DECODERS: dict[str, Fields] = {
    "t5-small": first(6, 512, 8, 2048),
    "t5-base": first(12, 768, 12, 3072),
    "t5-large": first(24, 1024, 16, 4096),
    "t5-3b": first(24, 1024, 32, 16384, 128),
    "t5-11b": first(24, 1024, 128, 65536, 128),
    **{f"t5-v1.1-{size}": fields for size, fields in LATER.items()},
}
