"""Named architectures as data: fields of ModelConfig, of which max_position is the longest row.

Each is what its authors published: for GPT-3 table 2.1 of Brown et al. 2020, for the others the
config.json of the model of that name on Hugging Face, except where a comment says otherwise.
tests/models/test_registry.py holds each against its published number of parameters, and
tests/oracle/test_parameter_counts.py against transformers' own model.
"""

import dataclasses

from maxmeg.config.hints import nearest_few
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.models.dense_sizes import DENSE, Fields
from maxmeg.models.expert_sizes import SPARSE

LONGEST_SAMPLE = 8192  # tokens a row when nothing else is asked for, though a model may know longer
ARCHITECTURES: dict[str, Fields] = DENSE | SPARSE
ALIASES = {  # Megatron-LM's names
    "345m": "gpt2-355m",
    "1.3b": "gpt3-1.3b",
    "6.7b": "gpt3-6.7b",
    "175b": "gpt3-175b",
}


def architecture(name: str) -> ModelConfig:
    """The ModelConfig of a named architecture, its max_position set."""
    fields = ARCHITECTURES.get(ALIASES.get(name, name))
    if fields is None:
        known = [*ARCHITECTURES, *ALIASES]
        raise ValueError(
            f"no architecture is named {name!r}: did you mean {nearest_few(name, known)}? "
            f"maxmeg/models/registry.py lists all {len(known)}"
        )
    return with_fields(ModelConfig(), fields)


def use_architecture(config: Config, name: str) -> Config:
    """`config` with the named architecture, and samples as long as it knows, up to 8192 tokens."""
    model = architecture(name)
    length = min(model.max_position, LONGEST_SAMPLE)
    data = dataclasses.replace(config.data, sequence_length=length)
    return dataclasses.replace(config, model=model, data=data)
