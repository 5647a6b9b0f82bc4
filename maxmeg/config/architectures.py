"""Named architectures: fields of ModelConfig, read from sizes/*.toml.

A table `[base.NAME]` holds settings that several models share, by their dotted names; `[model]` has
a line for each model. `from`: bases, of which later ones prevail, and whose settings those beside
it replace; `sizes`, `experts` and `mamba_sizes` stand for the settings that LISTS names.

Sources: table 2.1 of Brown et al. 2020 for GPT-3, else config.json of the model on Hugging Face
unless a comment names another source. Tests compare published numbers of parameters, and those of
transformers' models (tests/models/test_architectures.py, tests/oracle/test_parameter_counts.py).
"""

import dataclasses
import tomllib
import typing
from pathlib import Path

from maxmeg.config.data import DataConfig, Objective
from maxmeg.config.files import leaves
from maxmeg.config.hints import nearest_few
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.config.values import convert

Fields = dict[str, typing.Any]

FOLDER = Path(__file__).parent / "sizes"
FILES = ("dense", "experts", "hybrid", "encoders")
HEADS = ("attention.num_heads", "attention.num_kv_heads")
LISTS = {  # the first settings alone where a list is shorter
    "sizes": ("num_layers", "hidden_size", *HEADS, "mlp.ffn_size"),
    "experts": ("moe.num_experts", "moe.ffn_size"),
    "mamba_sizes": ("mamba.num_heads", "mamba.head_dim", "mamba.num_groups", "mamba.state_size"),
}
LONGEST_SAMPLE = 8192  # default limit of tokens per row, also if max_position is larger


def read_architectures() -> dict[str, Fields]:
    """The settings of every model in the files, by its name."""
    bases: dict[str, Fields] = {}
    models: dict[str, Fields] = {}
    for name in FILES:
        tables = tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))
        bases |= tables["base"]
        models |= tables["model"]
    kinds = leaves(ModelConfig)

    def settings(entry: Fields) -> Fields:
        parents = entry.get("from", [])
        fields: Fields = {}
        for parent in [parents] if isinstance(parents, str) else parents:
            fields |= settings(bases[parent])
        for name, value in entry.items():
            if name in LISTS:
                fields |= zip(LISTS[name], value, strict=False)
            elif name != "from":
                fields[name] = convert(name, value, kinds[name])
        return fields

    return {name: settings(entry) for name, entry in models.items()}


ARCHITECTURES = read_architectures()
ALIASES = {  # Megatron-LM's names
    "345m": "gpt2-355m",
    "1.3b": "gpt3-1.3b",
    "6.7b": "gpt3-6.7b",
    "175b": "gpt3-175b",
    **{f"flan-{name}".replace("-v1.1", ""): name for name in ARCHITECTURES if "t5-v1.1-" in name},
}


def architecture(name: str) -> ModelConfig:
    """The ModelConfig of a named architecture. ValueError for an unknown name."""
    fields = ARCHITECTURES.get(ALIASES.get(name, name))
    if fields is None:
        names = [*ARCHITECTURES, *ALIASES]
        raise ValueError(
            f"no architecture is named {name!r}: did you mean {nearest_few(name, names)}? "
            f"`maxmeg models` lists all {len(names)}"
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
