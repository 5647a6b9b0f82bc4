"""Fold muP's factors of logits and attention scores into weights, as no config.json has them."""

import re

import numpy as np

from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import ModelConfig, MupConfig
from maxmeg.config.setting import with_fields

FINAL_NORM = re.compile(r"final_norm\.(weight|bias)")
NORMALIZED = re.compile(r".*\.(attention|cross)\.query_norm\.(weight|bias)")
QUERY = re.compile(r".*\.((attention|cross)\.query\.(weight|bias)|mla\.query(_up)?\.weight)")


def plain_model(model: ModelConfig) -> ModelConfig:
    """Return the model without muP that is equivalent once its arrays are `folded`.

    ValueError if a factor cannot be folded into any array.
    """
    base, heads = model.mup.base_hidden_size, model.attention
    if base and model.mtp.num_layers:
        raise ValueError(
            f"model.mup.base_hidden_size={base} with model.mtp.num_layers={model.mtp.num_layers} "
            "cannot be exported: muP's factor of the logits is folded into the final norm, which "
            "MTP layers do not use; export without MTP layers is not implemented"
        )
    unweighted = heads.qk_norm is QkNorm.l2
    if model.mup.base_head_dim and (unweighted or (heads.output_gate and not has_norm(model))):
        raise ValueError(
            f"model.mup.base_head_dim={model.mup.base_head_dim} cannot be exported with "
            "attention.qk_norm=l2, or with attention.output_gate without qk_norm: no weight scales "
            "the queries alone"
        )
    return with_fields(model, {"mup": MupConfig()})


def has_norm(model: ModelConfig) -> bool:
    """Whether queries are normalized by a norm with weights."""
    return model.attention.qk_norm in (QkNorm.head, QkNorm.heads) and not model.is_mla


def folded(name: str, array: np.ndarray, model: ModelConfig) -> np.ndarray:
    """Multiply an array (or one layer of it) by muP's factor, if its name has one."""
    factor, computed = 1.0, model.without_mup()
    is_norm = bool(FINAL_NORM.fullmatch(name))
    if is_norm:
        factor = computed.logit_scale / model.logit_scale
    elif (NORMALIZED if has_norm(model) else QUERY).fullmatch(name):
        plain, is_norm = model.key_size**-0.5, has_norm(model)
        factor = (computed.attention.scale or plain) / (model.attention.scale or plain)
    if factor == 1:
        return array
    shift = np.float32(is_norm and model.norm_one_plus and name.endswith("weight"))
    return (array + shift) * np.float32(factor) - shift
