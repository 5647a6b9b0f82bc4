"""Rotary settings of config.json, with those of multi-latent attention.

Both forms are read: `rope_parameters` of transformers 5, and the older `rope_theta` and
`rope_scaling`. The older form is written, which every version of transformers reads.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping

from maxmeg.config.model import ModelConfig
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.setting import get
from maxmeg.hf.families.keys import DEFAULTS, Fields, Json, Key, Keys, Part, checked, refused
from maxmeg.hf.families.windows import FULL, SLIDING

REQUIRED, DERIVED = "required", "derived"
ORIGINAL = "original_max_position_embeddings"
FIELDS = {
    "factor": "rotary.factor",
    ORIGINAL: "rotary.original_length",
    "low_freq_factor": "rotary.low",
    "high_freq_factor": "rotary.high",
    "beta_slow": "rotary.low",
    "beta_fast": "rotary.high",
    "attention_factor": "rotary.attention_factor",
    "truncate": "rotary.truncate",
    "short_factor": "rotary.short_factors",
    "long_factor": "rotary.long_factors",
}
KINDS = {  # keys of each scaling, and their values where they are missing or null
    "default": {},
    "linear": {"factor": REQUIRED},
    "dynamic": {"factor": REQUIRED},
    "llama3": {
        "factor": REQUIRED,
        "low_freq_factor": REQUIRED,
        "high_freq_factor": REQUIRED,
        ORIGINAL: DERIVED,
    },
    "yarn": {
        "factor": DERIVED,
        ORIGINAL: DERIVED,
        "beta_slow": 1,
        "beta_fast": 32,
        "attention_factor": 0,
        "truncate": True,
    },
    "proportional": {"factor": REQUIRED},
    "longrope": {
        "short_factor": REQUIRED,
        "long_factor": REQUIRED,
        ORIGINAL: DERIVED,
        "factor": DERIVED,
        "attention_factor": 0,
    },
}
MSCALES = SCALE, SCALE_ALL = ("mscale", "mscale_all_dim")  # YaRN's: their ratio is attention_factor
MAX_BASE = 10**15
DIGITS = 12  # to which derived scales are rounded
LATENT = [  # sizes of multi-latent attention (DeepSeek)
    Key("kv_lora_rank", "mla.kv_rank", 512),
    Key("q_lora_rank", "mla.query_rank", 1536, null=True),
    Key("qk_nope_head_dim", "attention.head_dim", 128),
    Key("qk_rope_head_dim", "mla.rotary_size", 64),
    Key("v_head_dim", "mla.value_size", 128),
]


@dataclasses.dataclass(frozen=True)
class Rotary(Part):
    """Base, rotated fraction and scaling of the rotary embedding.

    theta, fraction: names of the keys of the base and of the fraction of a head that rotates.
    default, fraction_default: their defaults; fraction_default=0: whole heads rotate. kinds: the
    supported scalings. original: default of original_max_position_embeddings where that key stands
    beside rope_scaling (Phi-3). local: key of the base in layers with a sliding window (Gemma 3).
    missing: the settings of a file that has none (GPT-OSS).
    """

    theta: str = "rope_theta"
    default: float = 10000.0
    fraction: str = "partial_rotary_factor"
    fraction_default: float = 0.0
    kinds: tuple[str, ...] = tuple(kind for kind in KINDS if kind != "proportional")
    original: int = 0
    local: str = ""
    missing: Mapping[str, typing.Any] = dataclasses.field(default_factory=dict)

    def read(self, keys: Keys, fields: Fields) -> None:
        settings = self.settings(keys) or dict(self.missing)
        base = agreed(keys, settings, "rope_theta", (self.theta, "rope_theta"), self.default)
        names = (self.fraction, "partial_rotary_factor")
        default = self.fraction_default or 1.0
        fraction = agreed(keys, settings, "partial_rotary_factor", names, default)
        if self.original:
            settings[ORIGINAL] = keys.take(ORIGINAL, self.original)  # it overrides rope_scaling
        kind = kind_of(settings, self.kinds)
        if self.original and kind != "longrope":
            del settings[ORIGINAL]
        head = fields["hidden_size"] / fields["attention.num_heads"]
        head = fields.get("mla.rotary_size", fields.get("attention.head_dim") or head)
        size = int(head * fraction)
        odd = head % 1 == 0 and (size < 2 or size % 2)  # validation reports a fractional head size
        if fraction > 1 or (fraction != 1 and not self.fraction_default) or odd:
            rule = "and at most 1" if self.fraction_default else "and be 1"
            rule = f"it must leave an even number of the {head:g} of each head {rule}"
            raise refused(names[0], fraction, rule)
        fields |= {"rotary.base": base, "rotary.fraction": fraction}
        local_base, is_local = self.read_local(keys), fields.get("local", [])
        if local_base and is_local and all(is_local):
            fields["rotary.base"] = local_base
            return
        fields |= scaling_fields(kind, settings, fields["max_position"])
        if local_base and any(is_local) and (local_base != base or kind != "default"):
            fields["rotary.local_base"] = local_base

    def settings(self, keys: Keys) -> Json:
        """Return rope_scaling and rope_parameters as one; ValueError where they disagree.

        With `local`, rope_parameters has two entries: this is that of the global layers.
        """
        scaling, parameters = mapping(keys, "rope_scaling"), mapping(keys, "rope_parameters")
        if self.local:
            if set(parameters) - {FULL, SLIDING}:
                rule = f"only {FULL} and {SLIDING} may stand in it"
                raise refused("rope_parameters", parameters, rule)
            parameters = mapping(Keys(parameters), FULL)
        for key in scaling.keys() & parameters.keys():
            if scaling[key] != parameters[key]:
                rule = f"rope_parameters has {key}={parameters[key]!r}: keep one"
                raise refused("rope_scaling", scaling, rule)
        return parameters | scaling

    def read_local(self, keys: Keys) -> float:
        """Return the base of the layers with a sliding window; 0: it is that of all layers."""
        if not self.local:
            return 0.0
        settings = mapping(Keys(mapping(keys, "rope_parameters")), SLIDING)
        names, default = ((), self.default) if self.local == SLIDING else ((self.local,), 10000.0)
        base = agreed(keys, settings, "rope_theta", names, default)
        if agreed(keys, settings, "partial_rotary_factor", (), 1.0) != 1:
            rule = "in layers with a sliding window whole heads must rotate"
            raise refused("rope_parameters", settings, rule)
        kind_of(settings, ("default",))
        scaling_fields("default", settings, 0)
        return base

    def write(self, model: ModelConfig) -> Json:
        entries: Json = {self.theta: model.rotary.base}
        if self.fraction_default:
            entries[self.fraction] = model.rotary.fraction
        if self.local:
            entries[self.local] = model.rotary.local_base or model.rotary.base
        scaling = model.rotary.scaling
        kind = "default" if scaling is RotaryScaling.none else scaling.value
        if kind not in self.kinds:
            raise ValueError(f"rope_scaling has no name for model.rotary.scaling={kind}")
        is_plain = kind == "default" and not self.missing
        entries["rope_scaling"] = None if is_plain else written_scaling(kind, model)
        if self.original:
            entries[ORIGINAL] = model.rotary.original_length or model.max_position
        return entries


@dataclasses.dataclass(frozen=True)
class UnscaledLocal(Rotary):
    """Only layers without a sliding window are scaled, and rope_parameters has the settings of both
    (OLMo 3)."""

    local: str = SLIDING

    def write(self, model: ModelConfig) -> Json:
        entries = super().write(model)
        local = {"rope_type": "default", "rope_theta": entries.pop(self.local)}
        full = {"rope_type": "default", **(entries["rope_scaling"] or {})}
        full["rope_theta"] = entries[self.theta]
        return entries | {"rope_parameters": {FULL: full, SLIDING: local}}


@dataclasses.dataclass(frozen=True)
class RotaryWidth(Rotary):
    """The fraction of a head that rotates may stand as a number of its components (MiniMax-M2)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        if (width := keys.take("rotary_dim")) is not None:
            share = checked("rotary_dim", width, int) / fields["attention.head_dim"]
            keys.values = {self.fraction: share, **keys.values}
        super().read(keys, fields)


@dataclasses.dataclass(frozen=True)
class LatentRotary(Rotary):
    """Rotary embedding of multi-latent attention. YaRN's mscale_all_dim also scales the scores."""

    kinds: tuple[str, ...] = ("default", "yarn")

    def read(self, keys: Keys, fields: Fields) -> None:
        scale = self.settings(keys).get(SCALE_ALL)
        super().read(keys, fields)
        if scale and fields.get("rotary.scaling") is RotaryScaling.yarn:
            grown = amplitude(checked(SCALE_ALL, scale, float), fields["rotary.factor"])
            size = fields["attention.head_dim"] + fields["mla.rotary_size"]
            fields["attention.scale"] = size**-0.5 * grown**2

    def write(self, model: ModelConfig) -> Json:
        entries = super().write(model)
        scaling, size = entries["rope_scaling"], model.head_size + model.mla.rotary_size
        grown = math.sqrt((model.attention.scale or size**-0.5) * size**0.5)
        if not scaling or grown <= 1 or model.rotary.factor <= 1:
            return entries
        step = 0.1 * math.log(model.rotary.factor)
        ratio = scaling.pop("attention_factor", 0) or (step + 1)
        scaling[SCALE_ALL] = round((grown - 1) / step, DIGITS)
        scaling[SCALE] = round((ratio * grown - 1) / step, DIGITS)
        return entries


def amplitude(scale: float, factor: float) -> float:
    """Return YaRN's amplitude for an mscale and the factor by which the context is extended."""
    return 0.1 * scale * math.log(factor) + 1


def mapping(keys: Keys, name: str) -> Json:
    value = keys.take(name)
    if value is not None and not isinstance(value, dict):
        raise refused(name, value, "it must be an object or null")
    return dict(value or {})


def agreed(keys: Keys, settings: Json, inner: str, names: tuple[str, ...], default: float) -> float:
    """Return a number that may stand in `settings` as `inner` (which is removed) and under `names`
    beside them; ValueError where two of them differ."""
    stated = {name: keys.take(name) for name in names}
    stated |= {f"rope_parameters.{inner}": settings.pop(inner, None)}
    for name, value in stated.items():
        if value is not None:
            checked(name, value, float, most=MAX_BASE)
    return float(Keys(stated).take_any(tuple(stated), default))


def kind_of(settings: Json, kinds: tuple[str, ...]) -> str:
    """Return the scaling that `type` and `rope_type` name, and remove both from the settings."""
    stated = [str(settings.pop(name)) for name in ("type", "rope_type") if name in settings]
    named = {{"su": "longrope"}.get(name, name) for name in stated} or {"default"}
    kind = named.pop()
    if named or kind not in kinds:
        raise refused("rope_type", [kind, *named], f"supported is one of {', '.join(kinds)}")
    return kind


def scaling_fields(kind: str, settings: Json, max_position: int) -> Fields:
    """Return the fields of ModelConfig that the settings of one scaling stand for."""
    if kind == "default":
        if settings:
            name = next(iter(settings))
            raise refused(name, settings[name], "rope_type=default has no such setting")
        return {}
    fields: Fields = {"rotary.scaling": RotaryScaling(kind)}
    if kind == "dynamic":
        fields["rotary.original_length"] = max_position
    mscales = [settings.pop(name, None) for name in MSCALES] if kind == "yarn" else []
    values = {name: settings.pop(name, None) for name in KINDS[kind]}
    if settings:
        name = next(iter(settings))
        raise refused(name, settings[name], f"rope_type={kind} has no such setting")
    for name, default in KINDS[kind].items():
        value = default if values[name] is None else values[name]
        if value is REQUIRED:
            raise refused(name, None, f"rope_type={kind} needs a value")
        if value is not DERIVED:
            fields[FIELDS[name]] = setting_value(name, value, type(get(DEFAULTS, FIELDS[name])))
    if ORIGINAL in KINDS[kind]:
        original = fields.setdefault("rotary.original_length", max_position)
        fields.setdefault("rotary.factor", max(max_position / original, 1.0))
    if all(mscales) and mscales and not fields["rotary.attention_factor"]:
        scales = [checked(*pair, float) for pair in zip(MSCALES, mscales, strict=True)]
        above, below = (amplitude(scale, fields["rotary.factor"]) for scale in scales)
        fields["rotary.attention_factor"] = above / below
    return fields


def setting_value(name: str, value: typing.Any, kind: type) -> typing.Any:
    if kind is not tuple:
        return checked(name, value, kind, zero=name == "attention_factor")
    if not isinstance(value, list):
        raise refused(name, value, "it must be a list of numbers")
    return tuple(checked(name, number, float) for number in value)


def written_scaling(kind: str, model: ModelConfig) -> Json:
    entries: Json = {"rope_type": kind}
    for name in KINDS[kind]:
        value = get(model, FIELDS[name])
        if name != "attention_factor" or value:
            entries[name] = list(value) if isinstance(value, tuple) else value
    return entries


def longrope_notes(model: ModelConfig) -> tuple[str, ...]:
    """Return how generated text differs from transformers', for a model with LongRoPE."""
    if model.rotary.scaling is not RotaryScaling.longrope:
        return ()
    return (
        "rotary.scaling=longrope: where a prompt and the most new tokens (--num_tokens, "
        f"max_tokens) are more than {model.rotary.original_length} together, generated text has "
        "the long factors from its first token on, and transformers changes to them at that "
        "length: --longrope=current does the same",
    )
