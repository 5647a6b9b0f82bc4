"""The table of T5 (Raffel et al., 2019), v1.0 and v1.1 (Flan-T5 is v1.1), and of mT5."""

import dataclasses
import itertools

from maxmeg.config.layers import ENCODER, Layer
from maxmeg.config.mixers import Activation
from maxmeg.config.model import ModelConfig, Norm, Position
from maxmeg.hf.families.keys import MAX_LAYERS, Choice, Fields, Ignored, Json, Key, Keys, Part
from maxmeg.hf.families.tables import Family, Modules, dropout

ENCODER_LAYER: Layer = (("encoder_attention",), ("encoder_mlp",))
ENCODER_NORM: Layer = (("encoder_norm",),)
DECODER_LAYER: Layer = (("attention",), ("cross",), ("mlp",))
ACTIVATIONS = {
    "relu": Activation.relu,
    "gelu": Activation.gelu,
    "gelu_new": Activation.gelu_tanh,
    "gated-gelu": Activation.geglu,
    "gated-silu": Activation.swiglu,
}


def depths(model: ModelConfig) -> tuple[int, int]:
    """Return the numbers of layers of encoder and decoder."""
    kinds = model.layer_kinds
    return kinds.count(ENCODER_LAYER), kinds.count(DECODER_LAYER)


@dataclasses.dataclass(frozen=True)
class Depths(Part):
    """num_layers of the encoder, and num_decoder_layers."""

    default: int

    def read(self, keys: Keys, fields: Fields) -> None:
        encoder = keys.read("num_layers", self.default, int)
        decoder = keys.read("num_decoder_layers", encoder, int, null=encoder)
        encoder, decoder = min(encoder, MAX_LAYERS), min(decoder, MAX_LAYERS)
        fields["num_layers"] = encoder + 1 + decoder
        fields["kinds"] = [ENCODER_LAYER] * encoder + [ENCODER_NORM] + [DECODER_LAYER] * decoder

    def write(self, model: ModelConfig) -> Json:
        encoder, decoder = depths(model)
        return {"num_layers": encoder, "num_decoder_layers": decoder}


class Tied(Part):
    """Tied output weights, whose logits are then scaled by hidden_size^-0.5 (v1.0); neither (v1.1).

    transformers 5 writes tie_word_embeddings=true for both, and scale_decoder_outputs: the output
    weights of v1.1 are tied unless the files have them.
    """

    def read(self, keys: Keys, fields: Fields) -> None:
        tied = keys.read("tie_word_embeddings", True, bool)
        is_scaled = keys.read("scale_decoder_outputs", tied, bool)
        fields["tied"] = tied or is_scaled
        if is_scaled:
            fields["logit_scale"] = fields["hidden_size"] ** -0.5

    def write(self, model: ModelConfig) -> Json:
        is_scaled = model.logit_scale != 1
        return {"tie_word_embeddings": model.tied, "scale_decoder_outputs": is_scaled}


class Unscaled(Part):
    """Output weights that are tied unless the files have them, without a scale (mT5)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        keys.read("tie_word_embeddings", True, bool)
        fields["tied"] = True

    def write(self, model: ModelConfig) -> Json:
        return {"tie_word_embeddings": model.tied}


class EncoderDecoder(Part):
    """is_encoder_decoder, which all other families refuse."""

    def read(self, keys: Keys, fields: Fields) -> None:
        keys.fixed["is_encoder_decoder"] = (True,)

    def write(self, model: ModelConfig) -> Json:
        return {"is_encoder_decoder": True}


def attention(mixer: str, place: int, module: str) -> dict[str, str]:
    """The modules of an attention sublayer of a block."""
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    prefix = f"layer.{place}."
    projections = {f"{mixer}.{ours}": f"{prefix}{module}.{name}" for ours, name in names.items()}
    return {**projections, f"{mixer}.norm": f"{prefix}layer_norm"}


def mlp(mixer: str, place: int, gated: bool) -> dict[str, str]:
    prefix = f"layer.{place}.DenseReluDense."
    inward = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    projections = {f"{mixer}.{ours}": f"{prefix}{name}" for ours, name in inward.items()}
    return {
        **projections,
        f"{mixer}.out": f"{prefix}wo",
        f"{mixer}.norm": f"layer.{place}.layer_norm",
    }


def layer_names(model: ModelConfig, layer: int) -> tuple[str, Modules]:
    """Return (the prefix of a layer's modules, their names after it)."""
    kind = model.layer_kinds[layer]
    if kind == ENCODER_NORM:
        return "encoder.", {"encoder_norm.layer_norm": "final_layer_norm"}
    if set(itertools.chain(*kind)) <= set(ENCODER):
        inner = attention("encoder_attention", 0, "SelfAttention")
        return f"encoder.block.{layer}.", {**inner, **mlp("encoder_mlp", 1, model.gated)}
    inner = attention("attention", 0, "SelfAttention") | attention("cross", 1, "EncDecAttention")
    number = layer - model.num_layers + depths(model)[1]
    return f"decoder.block.{number}.", {**inner, **mlp("mlp", 2, model.gated)}


def parts(
    vocab: int, ffn: int, heads: int, layers: int, activation: str, output: Part
) -> list[Part]:
    """Return the keys of config.json, with the defaults in which T5 and mT5 differ."""
    dropouts = "dropout_hidden", "dropout_embedding", "attention.dropout"
    return [
        Key("vocab_size", "vocab_size", vocab),
        Key("d_model", "hidden_size", 512),
        Key("d_kv", "attention.head_dim", 64),
        Key("d_ff", "mlp.ffn_size", ffn),
        Key("num_heads", "attention.num_heads", heads),
        Key("n_positions", "max_position", 512),
        Key("layer_norm_epsilon", "norm_eps", 1e-6),
        Key("relative_attention_num_buckets", "relative.buckets", 32),
        Key("relative_attention_max_distance", "relative.distance", 128),
        dropout("dropout_rate", *dropouts, default=0.1),
        Choice("feed_forward_proj", "mlp.activation", activation, ACTIVATIONS),
        Depths(layers),
        output,
        EncoderDecoder(),
        Ignored("initializer_factor", "dense_act_fn", "is_gated_act"),
    ]


BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"
T5 = Family(
    model_type="t5",
    parts=parts(32128, 2048, 8, 6, "relu", Tied()),
    ends={
        "embedding": "shared",
        "output": "lm_head",
        "final_norm": "decoder.final_layer_norm",
        "relative.source": f"encoder.{BIAS}",
        "relative.target": f"decoder.{BIAS}",
    },
    layer="encoder.block.",
    layers={},
    layer_names=layer_names,
    constants={"norm": Norm.rmsnorm, "position": Position.relative, "attention.scale": 1.0},
    ignored=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.",),
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
)
MT5 = dataclasses.replace(
    T5, model_type="mt5", parts=parts(250112, 1024, 6, 8, "gated-gelu", Unscaled())
)
ENCODER_DECODERS: dict[str, Family] = {
    "T5ForConditionalGeneration": T5,
    "MT5ForConditionalGeneration": MT5,
}
