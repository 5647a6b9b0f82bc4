"""BERT in Megatron-LM's checkpoints: no argument says that a model is one, but its tensors do."""

import typing
from collections.abc import Mapping

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.config.bert import Transform
from maxmeg.megatron.experts import Arguments

ENDS = {
    "bert.token_types": "embedding.tokentype_embeddings",
    "bert.transform": "lm_head.dense",
    "bert.transform_norm": "lm_head.layer_norm",
    "bert.output": "output_layer",
    "bert.pooler": "pooler.dense",
    "bert.pair": "binary_head",
}
LAYERS = "encoder."  # "decoder." in all other models
FOUND = "maxmeg_bert"  # beside the checkpoint's arguments: token types, whether there are pairs


def with_tensors(arguments: Arguments, tensors: Mapping[str, TensorInfo]) -> Arguments:
    """Return the arguments with what the tensors of a BERT model say; of others as they are."""
    if "lm_head.dense.weight" not in tensors:
        return arguments
    types = tensors.get("embedding.tokentype_embeddings.weight")
    found = (types.shape[0] if types else 0, "binary_head.weight" in tensors)
    return {**arguments, FOUND: found}


def bert_fields(arguments: Arguments) -> dict[str, typing.Any]:
    """Return fields of ModelConfig; none for other models."""
    if FOUND not in arguments:
        return {}
    token_types, has_pairs = arguments[FOUND]
    return {
        "attention.causal": False,
        "bert.token_types": token_types,
        "bert.transform": Transform.gelu,
        "bert.output_bias": True,
        "bert.pooler": has_pairs,
        "bert.pair_head": has_pairs,
    }
