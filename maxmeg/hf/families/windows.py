"""Keys of config.json that say which layers have a sliding window, and how wide it is."""

import dataclasses

from maxmeg.config.model import ModelConfig
from maxmeg.hf.families.keys import Fields, Json, Keys, Part, checked, refused

FULL, SLIDING = "full_attention", "sliding_attention"
UNROTATED, PATTERN, BITS = "nope_attention", "sliding_window_pattern", {"0", "1"}


def read_types(keys: Keys, fields: Fields, default: list[str], window: int) -> None:
    """Read which layers have a sliding window from `layer_types`, or from the default list."""
    types, count = keys.take("layer_types"), fields["num_layers"]
    types = default if types is None else types
    is_sound = isinstance(types, list) and all(name in (FULL, SLIDING) for name in types)
    if not is_sound or len(types) != count:
        rule = f"it must be a list of {count} of {FULL!r} and {SLIDING!r}, one per layer"
        raise refused("layer_types", types, rule)
    if SLIDING in types and not window:
        raise refused("layer_types", types, f"{SLIDING!r} needs a sliding window")
    fields["local"] = [name == SLIDING for name in types]
    fields["attention.window"] = window if SLIDING in types else 0


def written_types(model: ModelConfig) -> list[str]:
    """Return the `layer_types` of a model."""
    numbers = range(model.num_layers)
    local = {"local", "shared_local"}
    return [SLIDING if local & {*model.mixers(number)} else FULL for number in numbers]


def switched_window(keys: Keys) -> int:
    """Return the window by `use_sliding_window` and `sliding_window`; 0 for none."""
    is_on = keys.read("use_sliding_window", False, bool)
    window = keys.take("sliding_window", 4096)
    return checked("sliding_window", window, int) if is_on and window is not None else 0


class SwitchedWindow(Part):
    """A switch, and the window of every layer (Qwen 3 with experts)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        fields["attention.window"] = switched_window(keys)

    def write(self, model: ModelConfig) -> Json:
        window = model.attention.window
        return {"use_sliding_window": bool(window), "sliding_window": window or None}


@dataclasses.dataclass(frozen=True)
class LateWindow(Part):
    """A switch, a window, and max_window_layers: the layers from that number on have the window
    (Qwen), or with `even` the layers before it that have even numbers (Qwen 2 with experts).

    switch: whether there is a switch; else the window is on (dots.llm1). default: of
    max_window_layers."""

    even: bool = False
    switch: bool = True
    default: int = 28

    def read(self, keys: Keys, fields: Fields) -> None:
        numbers = range(fields["num_layers"])
        window = (
            switched_window(keys) if self.switch else keys.read("sliding_window", 4096, int, null=0)
        )
        first = keys.read("max_window_layers", self.default, int, zero=True, null=self.default)
        local = [i < first and i % 2 == 0 if self.even else i >= first for i in numbers]
        default = [SLIDING if window and is_local else FULL for is_local in local]
        read_types(keys, fields, default, window)

    def write(self, model: ModelConfig) -> Json:
        window = model.attention.window
        switch = {"use_sliding_window": bool(window)} if self.switch else {}
        return {
            **switch,
            "sliding_window": window or None,
            "max_window_layers": 0 if window else model.num_layers,
            "layer_types": written_types(model),
        }


@dataclasses.dataclass(frozen=True)
class AlternatingWindow(Part):
    """Every n-th layer is global, the others have a window (Gemma).

    every: n, if no key says it. key: the name of the key for n. default: the default window. first:
    whether the first of n layers is global, not the last.
    """

    every: int
    key: str = ""
    default: int = 4096
    first: bool = False

    def read(self, keys: Keys, fields: Fields) -> None:
        every = self.every
        window = keys.read("sliding_window", self.default, int)
        for name in (self.key, "_" + self.key) if self.key else ():
            every = keys.read(name, every, int)
        numbers = (number + (not self.first) for number in range(fields["num_layers"]))
        read_types(keys, fields, [SLIDING if n % every else FULL for n in numbers], window)

    def write(self, model: ModelConfig) -> Json:
        types, window = written_types(model), model.attention.window
        every = types.index(FULL) + 1 if FULL in types else model.num_layers + 1
        rule = {self.key: every} if self.key else {}
        return {"sliding_window": window or model.max_position, "layer_types": types, **rule}


@dataclasses.dataclass(frozen=True)
class ListedWindow(Part):
    """A window, or null. All layers have it unless layer_types says otherwise (Ministral), or with
    `every` all but every n-th, which then have no rotary embedding (EXAONE 4)."""

    every: int = 0

    def read(self, keys: Keys, fields: Fields) -> None:
        window = keys.read("sliding_window", 4096, int, null=0)
        every = keys.take(PATTERN) if self.every else 0  # letters, where there are layer_types
        every = every if type(every) is int and every > 0 else self.every
        numbers = range(1, fields["num_layers"] + 1)
        has = [bool(window) and (not every or n % every > 0) for n in numbers]
        read_types(keys, fields, [SLIDING if is_local else FULL for is_local in has], window)
        if self.every and window:
            UnrotatedGlobals().read(keys, fields)

    def write(self, model: ModelConfig) -> Json:
        window = model.attention.window or (model.max_position if model.has(UNROTATED) else None)
        rule = {PATTERN: self.every} if self.every else {}
        return {"sliding_window": window, "layer_types": written_types(model), **rule}


class UnrotatedGlobals(Part):
    """Layers without a sliding window have no rotary embedding (Command R7B, EXAONE 4)."""

    def read(self, keys: Keys, fields: Fields) -> None:
        fields["first"] = ["local" if is_local else UNROTATED for is_local in fields["local"]]


class UnrotatedLayers(Part):
    """Layers without a rotary embedding: every n-th, or the zeros of a list (SmolLM3)."""

    name = "no_rope_layers"

    def read(self, keys: Keys, fields: Fields) -> None:
        count, every = fields["num_layers"], keys.read("no_rope_layer_interval", 4, int)
        flags, types = keys.take(self.name), keys.take("layer_types")
        flags = [int(n % every > 0) for n in range(1, count + 1)] if flags is None else flags
        if not isinstance(flags, list) or len(flags) != count or not {*map(str, flags)} <= BITS:
            raise refused(self.name, flags, f"it must be a list of {count} of 0 and 1")
        if types not in (None, [FULL] * count):
            raise refused("layer_types", types, f"it must be a list of {count} times {FULL!r}")
        fields["first"] = ["attention" if is_rotary else UNROTATED for is_rotary in flags]

    def write(self, model: ModelConfig) -> Json:
        rotates = [int(UNROTATED not in model.mixers(layer)) for layer in range(model.num_layers)]
        return {self.name: rotates, "layer_types": [FULL] * model.num_layers}
