"""The model classes of transformers that are known, by name."""

import contextlib
import difflib
import functools
import typing
from collections.abc import Mapping

from maxmeg.config.layers import MIXERS
from maxmeg.hf.families.classifier_tables import CLASSIFIERS
from maxmeg.hf.families.delta_tables import DELTA
from maxmeg.hf.families.encoder_tables import ENCODERS
from maxmeg.hf.families.expert_tables import SPARSE
from maxmeg.hf.families.gemma4_tables import GEMMA4
from maxmeg.hf.families.hybrid_tables import HYBRID
from maxmeg.hf.families.keys import TOKENS, Ignored, Keys, refused
from maxmeg.hf.families.llama4_tables import GROWING
from maxmeg.hf.families.llama_tables import SIMILAR
from maxmeg.hf.families.mamba_tables import MAMBA
from maxmeg.hf.families.t5_tables import ENCODER_DECODERS
from maxmeg.hf.families.tables import DENSE, Family

FAMILIES: dict[str, Family] = {
    **DENSE,
    **SIMILAR,
    **SPARSE,
    **GROWING,
    "Gemma4ForCausalLM": GEMMA4,
    **HYBRID,
    **MAMBA,
    **DELTA,
    **ENCODERS,
    **CLASSIFIERS,
    **ENCODER_DECODERS,
}
# Only the language models of these are read.
VISION_LANGUAGE = {
    f"{name}ForConditionalGeneration": f"{name}ForCausalLM"
    for name in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
} | {"Mistral3ForConditionalGeneration": "MistralForCausalLM"}
MAMBA1 = ("JambaForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM")
MAMBA1_REMEDY = (
    "it has Mamba-1 layers, whose scan has a decay of its own for each channel and state; the "
    f"mixers are {', '.join(MIXERS)}, of which mamba is Mamba-2: choose one of {', '.join(MAMBA)}"
)
CAUSAL = "ForCausalLM"
OUTER_KEYS = (*TOKENS, "tie_word_embeddings", "quantization_config", "auto_map")


def text_part(config: Mapping[str, typing.Any]) -> Mapping[str, typing.Any]:
    """Return a config.json, or that of the language model inside a vision-language model."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and len(named) == 1 else ""
    if name not in VISION_LANGUAGE:
        return config
    text, family = config.get("text_config"), VISION_LANGUAGE[name]
    if not isinstance(text, dict):
        raise refused("text_config", text, f"{name} must have the settings of its language model")
    if text.get("model_type") == "ministral3" and family == "MistralForCausalLM":
        family = "Ministral3ForCausalLM"
    outer = {name: config[name] for name in OUTER_KEYS if name in config}
    kind = FAMILIES[family].model_type
    if text.get("model_type") not in (None, kind, kind.removesuffix("_text")):
        raise refused("text_config.model_type", text["model_type"], f"supported is {kind!r}")
    return {**text, **outer, "architectures": [family], "model_type": kind}


def architecture(config: Mapping[str, typing.Any]) -> str:
    """Return the name in FAMILIES of the model class that a config.json names."""
    config = text_part(config)
    named, kind = config.get("architectures"), config.get("model_type")
    if not named:
        tables = {name: table for name, table in FAMILIES.items() if name not in CLASSIFIERS}
        named = [name for name, table in tables.items() if table.model_type == kind] or named
    if not isinstance(named, list) or len(named) != 1 or named[0] not in list(FAMILIES):
        if named in [[name] for name in MAMBA1]:
            raise refused("architectures", named, MAMBA1_REMEDY)
        kind_or_class = str(named[0]) if isinstance(named, list) and len(named) == 1 else str(kind)
        similar = difflib.get_close_matches(kind_or_class, [*FAMILIES, *VISION_LANGUAGE], 5)
        named_so = f"; similar names are {', '.join(similar)}" if similar else ""
        raise refused(
            "architectures",
            named,
            f"it must name one of the {len(FAMILIES)} classes in docs/conversion.md{named_so}",
        )
    model_type = FAMILIES[named[0]].model_type
    if kind not in (model_type, None):
        raise refused("model_type", kind, f"{named[0]} is of model_type {model_type!r}")
    return named[0]


def table_of(family: str | Family) -> Family:
    """Return a table by its name in FAMILIES; a Family is returned as it is."""
    if isinstance(family, Family):
        return family
    if family not in FAMILIES:
        raise ValueError(f"no family is named {family!r}: choose from {', '.join(FAMILIES)}")
    return FAMILIES[family]


@functools.cache
def effective_keys() -> frozenset[str]:
    """Return the keys that describe a model of any family."""
    names: set[str] = set()
    for table in FAMILIES.values():
        keys, fields = Keys({}), dict(table.constants)
        for part in table.parts:
            if not isinstance(part, Ignored):
                with contextlib.suppress(ValueError):  # a key without a default
                    part.read(keys, fields)
        names |= keys.read_names
    return frozenset(names)
