"""BERT and T5 in Megatron-LM's checkpoints: no argument says that a model is one of them, but its
tensors do."""

import typing
from collections.abc import Mapping

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.config.bert import Transform
from maxmeg.config.layers import ENCODER
from maxmeg.config.model import ModelConfig, Position
from maxmeg.hf.families.t5_tables import DECODER_LAYER, ENCODER_LAYER, ENCODER_NORM, depths
from maxmeg.hf.families.tables import Modules
from maxmeg.megatron.experts import Arguments

# Beside the checkpoint's arguments. BERT: token types, and whether there are pairs; T5: whether the
# logits have biases.
BERT, T5 = "maxmeg_bert", "maxmeg_t5"
BERT_LAYERS = "encoder."  # "decoder." in all other models
CROSS = "cross_attention."
CROSS_KEYS = f"{CROSS}linear_kv"  # [key value] of each head
TABLE = "relative_pos_emb.relative_attention_bias"
ENDS = {
    "bert.token_types": "embedding.tokentype_embeddings",
    "bert.transform": "lm_head.dense",
    "bert.transform_norm": "lm_head.layer_norm",
    "bert.output": "output_layer",
    "bert.pooler": "pooler.dense",
    "bert.pair": "binary_head",
    "relative.source": f"encoder_{TABLE}",
    "relative.target": f"decoder_{TABLE}",
}
DECODER = {
    "cross.query": f"{CROSS}linear_q",
    ("cross.key", "cross.value"): CROSS_KEYS,
    "cross.out": f"{CROSS}linear_proj",
    "cross.norm": "pre_cross_attn_layernorm",
}


def with_tensors(arguments: Arguments, tensors: Mapping[str, TensorInfo]) -> Arguments:
    """Return the arguments with what the tensors of BERT or T5 say; of others as they are."""
    arguments_of_tensors = {}
    if "lm_head.dense.weight" in tensors:
        types = tensors.get("embedding.tokentype_embeddings.weight")
        arguments_of_tensors[BERT] = (
            types.shape[0] if types else 0,
            "binary_head.weight" in tensors,
        )
    if any(CROSS in name for name in tensors):
        arguments_of_tensors[T5] = "output_layer.bias" in tensors
    return {**arguments, **arguments_of_tensors}


def bert_fields(arguments: Arguments) -> dict[str, typing.Any]:
    """Return fields of ModelConfig; none for other models than BERT."""
    if BERT not in arguments:
        return {}
    token_types, has_pairs = arguments[BERT]
    return {
        "attention.causal": False,
        "bert.token_types": token_types,
        "bert.transform": Transform.gelu,
        "bert.output_bias": True,
        "bert.pooler": has_pairs,
        "bert.pair_head": has_pairs,
    }


def t5_fields(arguments: Arguments, position: Position) -> dict[str, typing.Any]:
    """Return fields of ModelConfig, and the layers; none for other models than T5."""
    if T5 not in arguments:
        return {}
    count = arguments["num_layers"]
    encoder = arguments.get("encoder_num_layers") or count
    decoder = arguments.get("decoder_num_layers") or count
    fields = {
        "num_layers": encoder + 1 + decoder,
        "kinds": [ENCODER_LAYER] * encoder + [ENCODER_NORM] + [DECODER_LAYER] * decoder,
        "bert.output_bias": arguments[T5],
    }
    if position is Position.relative:
        fields["relative.buckets"] = arguments.get("relative_attention_num_buckets") or 32
        fields["relative.distance"] = arguments.get("relative_attention_max_distance") or 128
    return fields


def layer_names(model: ModelConfig, layer: int, layers: Modules) -> tuple[str, Modules]:
    """Return (the prefix of a layer's modules, their names after it). layers: of GPT."""
    kind = model.layer_kinds[layer]
    if kind == ENCODER_NORM:
        return "encoder.", {"encoder_norm.layer_norm": "final_layernorm"}
    if kind != ENCODER_LAYER:
        number = layer - model.num_layers + depths(model)[1]
        return f"decoder.layers.{number}.", {**layers, **DECODER}
    mixers = {name.removeprefix("encoder_"): name for name in ENCODER}

    def ours(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(names, tuple):
            return tuple(map(str, map(ours, names)))
        mixer, _, rest = names.partition(".")
        return f"{mixers.get(mixer, mixer)}.{rest}"

    return f"encoder.layers.{layer}.", {ours(names): theirs for names, theirs in layers.items()}
