"""Rotary settings of config.json: `rope_parameters` of transformers 5, and the `rope_theta` and
`rope_scaling` of the files before it, which every version reads and which are written."""

import dataclasses
import math
import typing
from collections.abc import Mapping

from maxmeg.config.model import ModelConfig, RotaryScaling
from maxmeg.hf.keys import Found, Keys, checked, refused
from maxmeg.hf.windows import FULL, SLIDING

REQUIRED, DERIVED = "required", "derived"
ORIGINAL = "original_max_position_embeddings"
FIELDS = {
    "factor": "rotary_factor",
    ORIGINAL: "rotary_original_length",
    "low_freq_factor": "rotary_low",
    "high_freq_factor": "rotary_high",
    "beta_slow": "rotary_low",
    "beta_fast": "rotary_high",
    "attention_factor": "rotary_attention_factor",
    "truncate": "rotary_truncate",
    "short_factor": "rotary_short_factors",
    "long_factor": "rotary_long_factors",
}
KINDS = {  # keys of each kind and what they are when they are missing or null
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
    "longrope": {
        "short_factor": REQUIRED,
        "long_factor": REQUIRED,
        ORIGINAL: DERIVED,
        "factor": DERIVED,
        "attention_factor": 0,
    },
}
MSCALES = ("mscale", "mscale_all_dim")  # of yarn: another way to say attention_factor


@dataclasses.dataclass(frozen=True)
class Rotary:
    """theta and part: older names of the base and of the fraction that rotates; part_default 0:
    heads rotate whole; kinds: the scalings that are supported; original: default of a key beside
    rope_scaling (Phi-3); local: older name of the base of layers with a window (Gemma 3); bare:
    the settings of a file that says none (GPT-OSS)."""

    theta: str = "rope_theta"
    default: float = 10000.0
    part: str = "partial_rotary_factor"
    part_default: float = 0.0
    kinds: tuple[str, ...] = tuple(KINDS)
    original: int = 0
    local: str = ""
    bare: Mapping[str, typing.Any] = dataclasses.field(default_factory=dict)

    def read(self, keys: Keys, found: Found) -> None:
        settings = joined(keys, "rope_scaling", self.parameters(keys)) or dict(self.bare)
        base = agreed(keys, settings, "rope_theta", (self.theta, "rope_theta"), self.default)
        parts = (self.part, "partial_rotary_factor")
        part = agreed(keys, settings, "partial_rotary_factor", parts, self.part_default or 1.0)
        if self.original:
            beside = keys.take(ORIGINAL, self.original)
            settings[ORIGINAL] = beside  # it has priority
        kind = kind_of(settings, self.kinds)
        if self.original and kind != "longrope":
            del settings[ORIGINAL]
        head = found.get("head_dim") or found["hidden_size"] / found["num_heads"]
        head = found.get("mla_rotary_size", head)
        size = int(head * part)
        odd = head % 1 == 0 and (size < 2 or size % 2)  # heads that do not divide are found later
        if part > 1 or (part != 1 and not self.part_default) or odd:
            wanted = "and at most 1" if self.part_default else "and be 1"
            wanted = f"it must leave an even number of the {head:g} of each head {wanted}"
            raise refused(parts[0], part, wanted)
        found |= {"rotary_base": base, "rotary_fraction": part}
        local = self.read_local(keys)
        if local and found["attention_window"] and not found["attention_global_every"]:
            found["rotary_base"] = local  # no layer is global
            return
        found |= scaling_fields(kind, settings, found["max_position"])
        if local and found["attention_window"] and (local != base or kind != "default"):
            found["rotary_local_base"] = local

    def parameters(self, keys: Keys) -> dict[str, typing.Any]:
        """rope_parameters; those of global layers where layers have their own."""
        given = mapping(keys, "rope_parameters")
        if not self.local:
            return given
        if set(given) - {FULL, SLIDING}:
            raise refused("rope_parameters", given, f"only {FULL} and {SLIDING} may stand in it")
        return mapping(Keys(given), FULL)

    def read_local(self, keys: Keys) -> float:
        if not self.local:
            return 0.0
        settings = mapping(Keys(mapping(keys, "rope_parameters")), SLIDING)
        base = agreed(keys, settings, "rope_theta", (self.local,), 10000.0)
        if agreed(keys, settings, "partial_rotary_factor", (), 1.0) != 1:
            raise refused("rope_parameters", settings, "layers with a window must rotate whole")
        kind_of(settings, ("default",))
        scaling_fields("default", settings, 0)
        return base

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        written: dict[str, typing.Any] = {self.theta: model.rotary_base}
        if self.part_default:
            written[self.part] = model.rotary_fraction
        if self.local:
            written[self.local] = model.rotary_local_base or model.rotary_base
        scaling = model.rotary_scaling
        kind = "default" if scaling is RotaryScaling.none else scaling.value
        if kind not in self.kinds:
            raise ValueError(f"model.rotary_scaling={kind} has no name in rope_scaling")
        written["rope_scaling"] = written_scaling(kind, model) if kind != "default" else None
        if self.original:
            written[ORIGINAL] = model.rotary_original_length or model.max_position
        return written


def mapping(keys: Keys, name: str) -> dict[str, typing.Any]:
    value = keys.take(name)
    if value is not None and not isinstance(value, dict):
        raise refused(name, value, "it must be an object or null")
    return dict(value or {})


def joined(keys: Keys, name: str, others: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Two dictionaries of settings that must agree, as one."""
    given = mapping(keys, name)
    for key in given.keys() & others.keys():
        if given[key] != others[key]:
            raise refused(name, given, f"rope_parameters has {key}={others[key]!r}: keep one")
    return others | given


def agreed(keys: Keys, settings: dict, inner: str, names: tuple[str, ...], default: float) -> float:
    """A number that may stand within the settings and under names beside them."""
    given = [(name, keys.take(name)) for name in names] + [(inner, settings.pop(inner, None))]
    values = [(name, checked(name, value, float)) for name, value in given if value is not None]
    for name, value in values[1:]:
        if value != values[0][1]:
            raise refused(name, value, f"{values[0][0]}={values[0][1]} contradicts it: keep one")
    return values[0][1] if values else default


def kind_of(settings: dict[str, typing.Any], kinds: tuple[str, ...]) -> str:
    given = [str(settings.pop(name)) for name in ("type", "rope_type") if name in settings]
    named = {{"su": "longrope"}.get(name, name) for name in given} or {"default"}
    kind = named.pop()
    if named or kind not in kinds:
        raise refused("rope_type", [kind, *named], f"supported is one of {', '.join(kinds)}")
    return kind


def scaling_fields(kind: str, settings: dict[str, typing.Any], max_position: int) -> Found:
    """Fields of ModelConfig of one kind's settings."""
    if kind == "default":
        if settings:
            name = next(iter(settings))
            raise refused(name, settings[name], "rope_type=default has no such setting")
        return {}
    found: Found = {"rotary_scaling": RotaryScaling(kind)}
    if kind == "dynamic":
        found["rotary_original_length"] = max_position
    plain = ModelConfig()
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
            found[FIELDS[name]] = setting_value(name, value, type(getattr(plain, FIELDS[name])))
    if ORIGINAL in KINDS[kind]:
        original = found.setdefault("rotary_original_length", max_position)
        found.setdefault("rotary_factor", max(max_position / original, 1.0))
    if all(mscales) and mscales and not found["rotary_attention_factor"]:
        above, below = (checked(*pair, float) for pair in zip(MSCALES, mscales, strict=True))
        grown = 0.1 * math.log(found["rotary_factor"])
        found["rotary_attention_factor"] = (above * grown + 1) / (below * grown + 1)
    return found


def setting_value(name: str, value: typing.Any, kind: type) -> typing.Any:
    if kind is not tuple:
        return checked(name, value, kind, zero=name == "attention_factor")
    if not isinstance(value, list):
        raise refused(name, value, "it must be a list of numbers")
    return tuple(checked(name, one, float) for one in value)


def written_scaling(kind: str, model: ModelConfig) -> dict[str, typing.Any]:
    written: dict[str, typing.Any] = {"rope_type": kind}
    for name in KINDS[kind]:
        value = getattr(model, FIELDS[name])
        if name != "attention_factor" or value:
            written[name] = list(value) if isinstance(value, tuple) else value
    return written
