"""Keys of a config.json and the ModelConfig fields that they set, in both directions.

A `Part` reads its keys of config.json into a dict of fields (which later parts may look at), and
writes them for a ModelConfig. `Keys.finish` refuses every key that no part has read.
"""

import dataclasses
import enum
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Set

from maxmeg.config.layers import GROUPS, Layer, one_layer, pattern_of
from maxmeg.config.model import ModelConfig
from maxmeg.config.setting import get

Json = dict[str, typing.Any]
Fields = dict[str, typing.Any]  # ModelConfig fields by name, and what `with_layers` replaces

DEFAULTS = ModelConfig()
RESOLVED = {  # fields in which 0 stands for another size -> the property that returns that size
    "attention.num_kv_heads": "kv_heads",
    "attention.head_dim": "head_size",
    "mlp.ffn_size": "ffn",
    "moe.ffn_size": "expert_ffn",
    "mamba.num_heads": "mamba_heads",
    "mamba.num_groups": "mamba_groups",
    "delta.num_key_heads": "delta_key_heads",
    "delta.value_size": "delta_value_size",
}
OFF = (None, False, "", [], {})  # values of keys that switch nothing on
TRANSFORMERS = (5, 24)  # version whose classes the tables follow
OTHER = ("AutoTokenizer", "AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor")
MAX_NUMBER = 2**31 - 1
MAX_LAYERS = 10_000  # lists have one item per layer
# Keys that change no result: names, tokens, generation defaults, settings of other heads.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
HARMLESS = """
    architectures model_type transformers_version _name_or_path torch_dtype dtype use_cache
    cache_implementation gradient_checkpointing torchscript output_attentions output_hidden_states
    return_dict return_dict_in_generate chunk_size_feed_forward is_decoder id2label label2id
    num_labels problem_type finetuning_task task_specific_params tokenizer_class
    classifier_dropout prefix max_length min_length do_sample temperature top_k top_p num_beams
    repetition_penalty attn_implementation _attn_implementation _attn_implementation_autoset
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 use_flash_attention
    transformers.js_config is_llama_config unsloth_fixed unsloth_version output_router_logits
    output_past language license tf_legacy_loss use_bfloat16
"""
# Keys that change any model, except with these values.
FIXED = {
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
    "tie_last_hidden_states": (None,),
}

REMEDIES = {
    "quantization_config": "weights in safetensors are read in full, in fp8 (e4m3 by blocks), in "
    "mxfp4 or in formats of compressed-tensors; take the model's files in bfloat16, or make them "
    "by its publisher's script",
}


def refused(name: str, value: object, remedy: str) -> ValueError:
    text = repr(value)
    text = text if len(text) <= 200 else text[:200] + "..."
    return ValueError(f"config.json has {name}={text}: {remedy}")


class Keys:
    """A config.json that remembers which keys were read."""

    def __init__(self, values: Mapping[str, typing.Any]):
        self.values = values
        self.read_names: set[str] = {*HARMLESS.split()}
        self.fixed: dict[str, tuple] = dict(FIXED)

    def take(self, name: str, default: typing.Any = None) -> typing.Any:
        """Return the value of a key, and note that the key was read."""
        self.read_names.add(name)
        return self.values.get(name, default)

    def read(
        self,
        name: str,
        default: typing.Any,
        kind: type,
        zero: bool = False,
        null: typing.Any = None,
    ) -> typing.Any:
        """Return the value of a key as `checked` does; `null` in place of null, if it is given."""
        value = self.take(name, default)
        return null if value is None and null is not None else checked(name, value, kind, zero)

    def take_any(self, names: tuple[str, ...], default: typing.Any) -> typing.Any:
        """Return the value that stands under one of several names, null counting as missing.

        ValueError where two of them have different values.
        """
        values = {name: value for name in names if (value := self.take(name)) is not None}
        for first, expected in values.items():
            for name, value in values.items():
                if value != expected:
                    raise refused(name, value, f"{first}={expected} contradicts it: keep one")
            return expected
        return default

    def finish(self, architecture: str, code: str, effective: Callable[[], Set[str]]) -> list[str]:
        """Return the keys that were not read and have no effect; ValueError for the others.

        transformers passes over keys that its class lacks, and the tables have all keys of its
        classes. Keys in `effective`, which describe models of other families, are nevertheless
        refused, and all of them in files of a newer version. code: pattern of remote code that may
        be named.
        """
        modules = self.take("auto_map")
        is_map = isinstance(modules, dict)
        named = [m for kind, m in modules.items() if kind not in OTHER] if is_map else [modules]
        if any(named) and not (code and all(re.match(code, str(module)) for module in named)):
            raise refused(
                "auto_map",
                modules,
                "the model needs remote code (trust_remote_code), which is not supported; use a "
                "checkpoint of an architecture in transformers, or remove the key if its code "
                f"computes the same as {architecture}",
            )
        for name, allowed in self.fixed.items():
            if (value := self.take(name, allowed[0])) not in allowed:
                remedy = REMEDIES.get(name, f"only {allowed[0]!r} is supported")
                raise refused(name, value, remedy)
        unread = [name for name in self.values if name not in self.read_names]
        unread = [name for name in unread if not name.endswith("_token_id")]
        unread_on = [name for name in unread if self.values[name] not in OFF]
        effective_names = effective() if unread_on else ()
        is_newer = self.version > TRANSFORMERS
        if wrong := [name for name in unread_on if is_newer or name in effective_names]:
            text = ", ".join(f"{name}={self.values[name]!r}" for name in wrong)
            origin = (
                f" (written by transformers {'.'.join(map(str, self.version))})" if is_newer else ""
            )
            raise ValueError(
                f"config.json{origin} has {text[:500]}: {architecture} reads no such keys here, "
                "and they may change the results; remove them if they do not"
            )
        return unread

    @property
    def version(self) -> tuple[int, ...]:
        """Major and minor version of transformers that wrote the file; (0, 0) if it is not said."""
        numbers = re.match(r"(\d{1,4})\.(\d{1,4})", str(self.take("transformers_version")))
        return tuple(map(int, numbers.groups())) if numbers else (0, 0)


def checked(
    name: str, value: typing.Any, kind: type, zero: bool = False, most: int = MAX_NUMBER
) -> typing.Any:
    """Return a JSON value as the type `kind` of a field: a positive number (or 0), or a boolean."""
    number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if kind is bool:
        if not isinstance(value, bool):
            raise refused(name, value, "it must be true or false")
        return value
    if not number or not -most <= value <= most:  # or NaN
        rule = "an integer" if kind is int else "a finite number"
        raise refused(name, value, f"it must be {rule} of at most {most}")
    if value < 0 or (value == 0 and not zero):
        raise refused(name, value, "it must be " + ("at least 0" if zero else "positive"))
    return kind(value)


def resolved(model: ModelConfig, field: str) -> typing.Any:
    """Return a field's value, with the default sizes that 0 stands for filled in."""
    if field == "moe.ffn_size" and not model.has("moe"):
        return model.moe.ffn_size
    return get(model, RESOLVED.get(field, field))


def unread_groups(kinds: Iterable[Layer]) -> set[str]:
    """Return the groups of mixers' settings that no layer of these kinds reads."""
    mixers = {name for kind in kinds for sublayer in kind for name in sublayer}
    read = {group for name in mixers for group in GROUPS[name]}
    return {group for groups in GROUPS.values() for group in groups} - read


def with_layers(fields: Fields) -> Fields:
    """Replace the per-layer properties that parts have read by the field `layers`.

    "local": whether each layer has a sliding window; "dense": numbers of the layers without
    experts; "parallel": whether attention and MLP form a parallel block; "first": the name of each
    layer's first mixer, where it is not attention in every layer; "kinds": all layers themselves,
    without the fields that none of them reads.
    """
    fields = dict(fields)
    if kinds := fields.pop("kinds", None):
        mtp_kinds = [one_layer(fields["mtp.layers"])] if fields.get("mtp.layers") else []
        unread = unread_groups([*kinds, *mtp_kinds])
        fields = {n: value for n, value in fields.items() if n.partition(".")[0] not in unread}
        return {**fields, "layers": pattern_of(kinds)}
    count, is_moe = fields["num_layers"], "moe.num_experts" in fields
    local = fields.pop("local", [bool(fields.get("attention.window"))] * count)
    dense = fields.pop("dense", set()) if is_moe else {*range(count)}
    is_parallel = fields.pop("parallel", False)
    first_mixers = fields.pop("first", None)
    layers: list[Layer] = []
    for number in range(count):
        first = "mla" if "mla.kv_rank" in fields else "local" if local[number] else "attention"
        first = first_mixers[number] if first_mixers else first
        second = "mlp" if number in dense else "moe"
        layers.append(((first, second),) if is_parallel else ((first,), (second,)))
    if is_moe and len(dense) == count:  # all layers are dense
        fields = {name: value for name, value in fields.items() if not name.startswith("moe.")}
    if not any(local):
        fields["attention.window"] = 0
    return {**fields, "layers": pattern_of(layers)}


class Part(typing.Protocol):
    """Some keys of config.json. A part that has no key of its own writes none."""

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set ModelConfig fields from the keys; ValueError for values that are not supported."""
        ...

    def write(self, model: ModelConfig) -> Json:
        """Return the keys that describe the model."""
        return {}


@dataclasses.dataclass(frozen=True)
class Key(Part):
    """A key whose value is that of one field, or of several fields that must be equal.

    null: whether null stands for 0. zero: whether 0 is a value of the key too. optional: whether
    the key is left out where it equals hidden_size / num_heads. most: the largest value. aliases:
    names of the key in other files.
    """

    name: str
    field: str | tuple[str, ...]
    default: typing.Any
    null: bool = False
    zero: bool = False
    optional: bool = False
    most: int = MAX_NUMBER
    aliases: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,) if isinstance(self.field, str) else self.field

    def read(self, keys: Keys, fields: Fields) -> None:
        if self.aliases:
            value = keys.take_any((self.name, *self.aliases), self.default)
        else:
            value = keys.take(self.name, self.default)
        kind = type(get(DEFAULTS, self.fields[0]))
        if value is None and self.null:
            value = kind(0)
        else:
            value = checked(self.name, value, kind, self.zero, self.most)
        fields.update(dict.fromkeys(self.fields, value))

    def write(self, model: ModelConfig) -> Json:
        value = resolved(model, self.fields[0])
        if self.optional and value == model.hidden_size // model.attention.num_heads:
            return {}
        return {self.name: value or (None if self.null and not self.zero else value)}


@dataclasses.dataclass(frozen=True)
class Choice(Part):
    """A key whose values name members of one of maxmeg's enums."""

    name: str
    field: str
    default: str
    values: Mapping[str, enum.Enum]

    def read(self, keys: Keys, fields: Fields) -> None:
        value = keys.take(self.name, self.default)
        if not isinstance(value, str) or value not in self.values:
            raise refused(self.name, value, f"supported are {', '.join(self.values)}")
        fields[self.field] = self.values[value]

    def write(self, model: ModelConfig) -> Json:
        kinds = [*model.layer_kinds, *[model.mtp_layer] * model.mtp.num_layers]
        if self.field.partition(".")[0] in unread_groups(kinds):
            return {}
        value = get(model, self.field)
        for name in (self.default, *self.values):
            if self.values[name] is value:
                return {self.name: name}
        raise ValueError(f"{self.name} has no name for model.{self.field}={value.name}")


@dataclasses.dataclass(frozen=True)
class Fixed(Part):
    """A key of which one value, the default, is supported."""

    name: str
    value: typing.Any

    def read(self, keys: Keys, fields: Fields) -> None:
        if (value := keys.take(self.name, self.value)) not in (self.value, None):
            raise refused(self.name, value, f"only {self.value!r} is supported")


class Ignored(Part):
    """Keys that may stand in a config.json and have no effect on the architecture."""

    def __init__(self, *names: str):
        self.names = names

    def read(self, keys: Keys, fields: Fields) -> None:
        keys.read_names.update(self.names)


class Renamed(Part):
    """A part whose keys have other names in this family, or these too."""

    def __init__(self, part: Part, **names: str):
        self.part, self.names = part, names

    def read(self, keys: Keys, fields: Fields) -> None:
        values = {name: keys.take_any((name, alias), None) for name, alias in self.names.items()}
        present = {name: value for name, value in values.items() if value is not None}
        inner = Keys({**keys.values, **present})
        self.part.read(inner, fields)
        keys.read_names |= inner.read_names

    def write(self, model: ModelConfig) -> Json:
        entries = self.part.write(model).items()
        return {self.names.get(name, name): value for name, value in entries}


class ScaledEmbedding(Part):
    """The embedding is multiplied by sqrt(hidden_size); no key says so (Gemma)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        fields["embedding_scale"] = fields["hidden_size"] ** 0.5


@dataclasses.dataclass(frozen=True)
class QueryScalar(Part):
    """Attention scores are divided by the square root of query_pre_attn_scalar (Gemma)."""

    default: int = 256

    def read(self, keys: Keys, fields: Fields) -> None:
        scalar = keys.read("query_pre_attn_scalar", self.default, float)
        fields["attention.scale"] = scalar**-0.5

    def write(self, model: ModelConfig) -> Json:
        scale = model.attention.scale or model.head_size**-0.5
        return {"query_pre_attn_scalar": round(scale**-2)}


class ParallelResidual(Part):
    """Whether attention and MLP form a parallel block in which each has a norm (GPT-NeoX)."""

    name = "use_parallel_residual"

    def read(self, keys: Keys, fields: Fields) -> None:
        value = keys.read(self.name, True, bool)
        fields["parallel"] = fields["parallel_norms"] = value

    def write(self, model: ModelConfig) -> Json:
        return {self.name: model.parallel_block}


class Falcon(Part):
    """Falcon's block: parallel with one norm (7B; one key/value head, or as many as query heads),
    parallel with a norm for each mixer (40B; grouped-query attention), or sequential."""

    def read(self, keys: Keys, fields: Fields) -> None:
        flags = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
        for name, default in flags.items():
            flags[name] = keys.read(name, default, bool)
        grouped, norms = flags["new_decoder_architecture"], keys.take("num_ln_in_parallel_attn")
        kv_heads = keys.read("num_kv_heads", None, int, null=0)
        fields["attention.num_kv_heads"] = kv_heads if grouped else int(flags["multi_query"])
        if norms not in ((None, 1, 2) if grouped else (None, 1)):
            rule = "it must be 1, or 2 with new_decoder_architecture=true"
            raise refused("num_ln_in_parallel_attn", norms, rule)
        if grouped and not flags["parallel_attn"]:
            raise refused("parallel_attn", False, "new_decoder_architecture=true needs true")
        fields["parallel"] = flags["parallel_attn"]
        fields["parallel_norms"] = grouped and norms != 1

    def write(self, model: ModelConfig) -> Json:
        grouped = model.parallel_norms or model.kv_heads not in (1, model.attention.num_heads)
        return {
            "new_decoder_architecture": grouped,
            "multi_query": model.kv_heads == 1,
            "parallel_attn": model.parallel_block,
            "num_kv_heads": model.kv_heads,
            "num_ln_in_parallel_attn": 1 + model.parallel_norms if grouped else None,
        }
