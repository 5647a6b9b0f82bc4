"""Which model can begin with the weights of which. No JAX."""

import dataclasses

from maxmeg.config.lazy import Lazy
from maxmeg.config.model import ModelConfig, Position

experts = Lazy("maxmeg.config.experts")
# Fields that change how a model trains or runs, not what it computes.
FREE = {
    *("vocab_divisible_by", "dropout_hidden", "dropout_attention", "dropout_embedding"),
    *("init_std", "scaled_output_init", "dtype", "attention_backend", "recompute", "scan_layers"),
    *("router_aux_loss", "router_sequence_aux_loss", "router_global_aux_loss", "router_z_loss"),
    *("router_bias_rate", "router_jitter", "expert_backend", "expert_pad", "mtp_loss"),
}
# Fields that training can adapt to: longer context, more words.
ADAPTED = {
    "mtp_depths",  # the last ones are left out, new ones begin at random
    *("expert_capacity", "expert_drop"),
    *("vocab_size", "max_position", "attention_window", "rotary_base", "rotary_local_base"),
    *("rotary_scaling", "rotary_factor", "rotary_original_length", "rotary_low", "rotary_high"),
    *("rotary_attention_factor", "rotary_truncate", "rotary_short_factors", "rotary_long_factors"),
}


def changes(saved: ModelConfig, wanted: ModelConfig, folder: str) -> list[str]:
    """What training has to adapt to, "rotary_factor 1.0 -> 8.0"; ValueError for what it cannot."""
    grown = []
    if wanted.num_experts and not saved.num_experts:
        if min(saved.mtp_depths, wanted.mtp_depths):
            raise ValueError(
                f"checkpoint.init_from={folder} is dense, and layers of further tokens get no "
                f"experts from it: set model.mtp_depths=0 (it is {wanted.mtp_depths})"
            )
        grown, wanted = experts.upcycled(saved, wanted, folder)
    pairs = {
        field.name: (getattr(saved, field.name), getattr(wanted, field.name))
        for field in dataclasses.fields(ModelConfig)
        if field.name not in FREE and getattr(saved, field.name) != getattr(wanted, field.name)
    }
    texts = {
        name: " -> ".join(str(getattr(value, "name", value)) for value in pair)
        for name, pair in pairs.items()
    }
    able = ADAPTED - ({"max_position"} if wanted.position is Position.learned else set())
    fixed = [name for name in pairs if name not in able]
    if fixed:
        raise ValueError(
            f"checkpoint.init_from={folder} is another model: "
            + ", ".join(f"{name} {texts[name]}" for name in fixed)
            + "; take its own architecture (--config=configs/finetune.py:FOLDER), or only change "
            "the vocabulary, mtp_depths and what positions and windows depend on"
        )
    if wanted.vocab_size < saved.vocab_size:
        raise ValueError(
            f"model.vocab_size={wanted.vocab_size} is less than the {saved.vocab_size} of "
            f"checkpoint.init_from={folder}: words can be added, not taken away"
        )
    return [*grown, *(f"{name} {text}" for name, text in texts.items())]
