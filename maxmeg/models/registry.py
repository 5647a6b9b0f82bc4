"""Named architectures as data: fields of ModelConfig.

Sources: table 2.1 of Brown et al. 2020 for GPT-3, else config.json of the model on Hugging Face
unless a comment names another source. Tests compare the published numbers of parameters
(tests/models/test_registry.py) and transformers' models (tests/oracle/test_parameter_counts.py).
"""

import dataclasses

from maxmeg.config.data import DataConfig, Objective
from maxmeg.config.hints import nearest_few
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.models.dense_sizes import DENSE, Fields
from maxmeg.models.encoder_sizes import ENCODER_DECODERS, ENCODERS, LATER
from maxmeg.models.expert_sizes import SPARSE
from maxmeg.models.hybrid_sizes import HYBRIDS
from maxmeg.models.linear_sizes import LINEAR

LONGEST_SAMPLE = 8192  # default limit of tokens per row, also if max_position is larger
ARCHITECTURES: dict[str, Fields] = DENSE | SPARSE | HYBRIDS | LINEAR | ENCODERS
ARCHITECTURES |= ENCODER_DECODERS
ALIASES = {  # Megatron-LM's names
    "345m": "gpt2-355m",
    "1.3b": "gpt3-1.3b",
    "6.7b": "gpt3-6.7b",
    "175b": "gpt3-175b",
    **{f"flan-t5-{size}": f"t5-v1.1-{size}" for size in LATER},
}


def architecture(name: str) -> ModelConfig:
    """The ModelConfig of a named architecture. ValueError for an unknown name."""
    fields = ARCHITECTURES.get(ALIASES.get(name, name))
    if fields is None:
        known = [*ARCHITECTURES, *ALIASES]
        raise ValueError(
            f"no architecture is named {name!r}: did you mean {nearest_few(name, known)}? "
            f"`maxmeg models` lists all {len(known)}"
        )
    return with_fields(ModelConfig(), fields)


def use_architecture(config: Config, name: str) -> Config:
    """`config` with the named architecture, its objective, and rows of as many tokens as its
    positions allow, at most 8192."""
    model = architecture(name)
    length = min(model.max_position - model.bert.position_offset, LONGEST_SAMPLE)
    data = dataclasses.replace(suited(config.data, model), sequence_length=length)
    return dataclasses.replace(config, model=model, data=data)


def suited(data: DataConfig, model: ModelConfig) -> DataConfig:
    """`data` with the objective of a bidirectional model, or of an encoder-decoder unless it has
    one; as it is for others."""
    if model.has_source and not data.objective.has_source:
        return dataclasses.replace(data, objective=Objective.span_corruption)
    if model.attention.causal:
        return data
    pairs = model.bert.pair_head
    return dataclasses.replace(data, objective=Objective.masked, sentence_pairs=pairs)
