"""Keys of a config.json and fields of ModelConfig, both ways.

A part reads its keys into fields (`found`, which later parts may look at) and writes them back.
What no part reads is unknown, and `Keys.finish` refuses it.
"""

import dataclasses
import enum
import math
import re
import typing
from collections.abc import Mapping

from maxmeg.config.model import ModelConfig

Found = dict[str, typing.Any]

PLAIN = ModelConfig()
RESOLVED = {
    **{"num_kv_heads": "kv_heads", "head_dim": "head_size", "ffn_size": "ffn"},
    "expert_ffn_size": "expert_ffn",
}
LARGEST = 2**31 - 1
MOST_LAYERS = 10_000  # lists are as long
# Keys that change no result: names, tokens, defaults of generation, what other heads would need.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
HARMLESS = {
    *("architectures", "model_type", "transformers_version", "_name_or_path", "torch_dtype"),
    *("dtype", "use_cache", "cache_implementation", "gradient_checkpointing", "torchscript"),
    *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate"),
    *("chunk_size_feed_forward", "is_decoder", "id2label", "label2id", "num_labels"),
    *("problem_type", "finetuning_task", "task_specific_params", "tokenizer_class"),
    *("classifier_dropout", "prefix", "max_length", "min_length"),
    *("do_sample", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "use_flash_attention"),
    *("transformers.js_config", "is_llama_config", "unsloth_fixed", "unsloth_version"),
    *(
        "output_router_logits",
        "output_past",
        "language",
        "license",
        "tf_legacy_loss",
        "use_bfloat16",
    ),
}
# Keys whose every value but these changes the model, whatever the architecture.
FIXED = {
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None,),
    "tie_last_hidden_states": (None,),
}

REMEDIES = {
    "quantization_config": "weights in safetensors are read in full, in fp8 (e4m3 by blocks) or in "
    "mxfp4; take the model's files in bfloat16, or make them by its publisher's script",
}


def refused(name: str, value: object, remedy: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 200 else shown[:200] + "..."
    return ValueError(f"config.json has {name}={shown}: {remedy}")


class Keys:
    """A config.json that remembers which keys were asked for."""

    def __init__(self, values: Mapping[str, typing.Any]):
        self.values, self.known = values, set(HARMLESS)

    def take(self, name: str, default: typing.Any = None) -> typing.Any:
        self.known.add(name)
        return self.values.get(name, default)

    def finish(self, architecture: str, code: str = "") -> None:
        """Refuses what was not read; code: a pattern of modules of code that may be named."""
        modules = self.take("auto_map")
        named = modules.values() if isinstance(modules, dict) else [modules]
        if modules and not (code and all(re.match(code, str(module)) for module in named)):
            raise refused(
                "auto_map",
                modules,
                "the model runs code of its own (trust_remote_code), which is not supported; "
                "use a checkpoint of an architecture of transformers, or remove the key if its "
                f"code computes what {architecture} does",
            )
        for name, allowed in FIXED.items():
            if (value := self.take(name, allowed[0])) not in allowed:
                remedy = REMEDIES.get(name, f"only {allowed[0]!r} is supported")
                raise refused(name, value, remedy)
        for name, value in self.values.items():
            if name not in self.known and not name.endswith("_token_id"):
                remedy = f"{architecture} has no such key here, and it may change the results; "
                raise refused(name, value, remedy + "remove it if it does not")


def checked(
    name: str, value: typing.Any, kind: type, zero: bool = False, most: int = LARGEST
) -> typing.Any:
    """A JSON value as the kind of a field: positive numbers (or zero), booleans."""
    number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if kind is bool:
        if not isinstance(value, bool):
            raise refused(name, value, "it must be true or false")
        return value
    if not number or not math.isfinite(value) or abs(value) > most:
        wanted = "an integer" if kind is int else "a finite number"
        raise refused(name, value, f"it must be {wanted} of at most {most}")
    if value < 0 or (value == 0 and not zero):
        raise refused(name, value, "it must be " + ("at least 0" if zero else "positive"))
    return kind(value)


def resolved(model: ModelConfig, field: str) -> typing.Any:
    """A field's value, what 0 stands for put in its place; of experts where there are some."""
    if field == "expert_ffn_size" and not model.num_experts:
        return model.expert_ffn_size
    return getattr(model, RESOLVED.get(field, field))


class Part(typing.Protocol):
    """read: keys of config.json into fields; write: the same keys of a model."""

    def read(self, keys: Keys, found: Found) -> None: ...

    def write(self, model: ModelConfig) -> dict[str, typing.Any]: ...


@dataclasses.dataclass(frozen=True)
class Key:
    """A key that is a field, or several that are equal; null: None stands for our 0; zero: 0 is
    a value of theirs too; most: the largest; extra: only written where it is not what they derive
    without it."""

    name: str
    field: str | tuple[str, ...]
    default: typing.Any
    null: bool = False
    zero: bool = False
    extra: bool = False
    most: int = LARGEST

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,) if isinstance(self.field, str) else self.field

    def read(self, keys: Keys, found: Found) -> None:
        value, kind = keys.take(self.name, self.default), type(getattr(PLAIN, self.fields[0]))
        plain = kind(0) if value is None and self.null else None
        value = checked(self.name, value, kind, self.zero, self.most) if plain is None else plain
        found.update(dict.fromkeys(self.fields, value))

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        value = resolved(model, self.fields[0])
        if self.extra and value == model.hidden_size // model.num_heads:
            return {}
        return {self.name: value or (None if self.null and not self.zero else value)}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A key whose values are names of ours."""

    name: str
    field: str
    default: str
    values: Mapping[str, enum.Enum]

    def read(self, keys: Keys, found: Found) -> None:
        value = keys.take(self.name, self.default)
        if not isinstance(value, str) or value not in self.values:
            raise refused(self.name, value, f"supported are {', '.join(self.values)}")
        found[self.field] = self.values[value]

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        names = [self.default, *self.values]
        ours = getattr(model, self.field)
        named = [name for name in names if self.values[name] is ours]
        if not named:
            raise ValueError(f"model.{self.field}={ours.name} has no name in {self.name}")
        return {self.name: named[0]}


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A key that must have one value, its default."""

    name: str
    value: typing.Any

    def read(self, keys: Keys, found: Found) -> None:
        if (value := keys.take(self.name, self.value)) not in (self.value, None):
            raise refused(self.name, value, f"only {self.value!r} is supported")

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Keys of older files that an architecture does not look at."""

    names: tuple[str, ...]

    def read(self, keys: Keys, found: Found) -> None:
        keys.known.update(self.names)

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        return {}


class ScaledEmbedding:
    """The embedding is multiplied by sqrt(hidden_size), which no key says (Gemma)."""

    def read(self, keys: Keys, found: Found) -> None:
        found["embedding_scale"] = found["hidden_size"] ** 0.5

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class QueryScalar:
    """Scores are divided by the root of a key (Gemma)."""

    default: int = 256

    def read(self, keys: Keys, found: Found) -> None:
        name = "query_pre_attn_scalar"
        found["attention_scale"] = checked(name, keys.take(name, self.default), float) ** -0.5

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        scale = model.attention_scale or model.head_size**-0.5
        return {"query_pre_attn_scalar": round(scale**-2)}


class Falcon:
    """Two kinds of parallel blocks (7B: one key/value head or as many as query heads; 40B: groups,
    mostly with a norm for each mixer), and sublayers one after the other."""

    def read(self, keys: Keys, found: Found) -> None:
        flags = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
        for name, default in flags.items():
            flags[name] = checked(name, keys.take(name, default), bool)
        grouped, norms = flags["new_decoder_architecture"], keys.take("num_ln_in_parallel_attn")
        heads = keys.take("num_kv_heads")
        found["num_kv_heads"] = 0 if heads is None else checked("num_kv_heads", heads, int)
        if not grouped:
            found["num_kv_heads"] = 1 if flags["multi_query"] else 0
        if norms not in ((None, 1, 2) if grouped else (None, 1)):
            raise refused("num_ln_in_parallel_attn", norms, "it must be 1, or 2 in the new kind")
        if grouped and not flags["parallel_attn"]:
            raise refused("parallel_attn", False, "new_decoder_architecture=true needs true")
        found["parallel_block"] = flags["parallel_attn"]
        found["parallel_norms"] = grouped and norms != 1

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        grouped = model.parallel_norms or model.kv_heads not in (1, model.num_heads)
        return {
            "new_decoder_architecture": grouped,
            "multi_query": model.kv_heads == 1,
            "parallel_attn": model.parallel_block,
            "num_kv_heads": model.kv_heads,
            "num_ln_in_parallel_attn": 1 + model.parallel_norms if grouped else None,
        }
