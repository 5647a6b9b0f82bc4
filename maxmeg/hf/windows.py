"""Which layers attend to a window, as config.json says it: rules, and lists of `layer_types`."""

import dataclasses
import typing

from maxmeg.config.model import ModelConfig
from maxmeg.hf.keys import Found, Keys, checked, refused

FULL, SLIDING = "full_attention", "sliding_attention"


def rule_of(types: list[str]) -> int:
    """Every n-th layer is global, 0 if none is, 1 if all are."""
    return types.index(FULL) + 1 if FULL in types else 0


def types_of(every: int, num_layers: int) -> list[str]:
    return [SLIDING if not every or (i + 1) % every else FULL for i in range(num_layers)]


def read_types(keys: Keys, found: Found, default: list[str], window: int) -> None:
    """attention_window and attention_global_every of the list given, or of the default."""
    types, count = keys.take("layer_types"), found["num_layers"]
    types = default if types is None else types
    known = isinstance(types, list) and all(name in (FULL, SLIDING) for name in types)
    if not known or len(types) != count:
        wanted = f"it must be a list of {count} of {FULL!r} and {SLIDING!r}, one a layer"
        raise refused("layer_types", types, wanted)
    every = rule_of(types)
    if types != types_of(every, count):
        remedy = "only every n-th layer can be a global one, or none, or all"
        raise refused("layer_types", types, remedy)
    if every != 1 and not window:
        raise refused("layer_types", types, f"{SLIDING!r} needs a sliding window")
    found["attention_window"] = 0 if every == 1 else window
    found["attention_global_every"] = 0 if every == 1 else every


def written_types(model: ModelConfig) -> list[str]:
    return types_of(model.attention_global_every if model.attention_window else 1, model.num_layers)


@dataclasses.dataclass(frozen=True)
class LateWindow:
    """A switch, a window, and the first layer that has it (Qwen); before: the layers before that
    which have even numbers have it (Qwen 2 with experts)."""

    before: bool = False

    def read(self, keys: Keys, found: Found) -> None:
        on = checked("use_sliding_window", keys.take("use_sliding_window", False), bool)
        window = keys.take("sliding_window", 4096)
        window = checked("sliding_window", window, int) if on and window is not None else 0
        first = keys.take("max_window_layers", 28)
        first = checked("max_window_layers", 28 if first is None else first, int, zero=True)
        numbers = range(found["num_layers"])
        late = [i < first and i % 2 == 0 if self.before else i >= first for i in numbers]
        default = [SLIDING if window and there else FULL for there in late]
        read_types(keys, found, default, window)

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        window = model.attention_window
        return {
            "use_sliding_window": bool(window),
            "sliding_window": window or None,
            "max_window_layers": 0 if window else model.num_layers,
            "layer_types": written_types(model),
        }


@dataclasses.dataclass(frozen=True)
class AlternatingWindow:
    """Every n-th layer is global (Gemma); n of the key, or fixed; default: the window."""

    every: int
    key: str = ""
    default: int = 4096

    def read(self, keys: Keys, found: Found) -> None:
        every, window = self.every, keys.take("sliding_window", self.default)
        window = checked("sliding_window", window, int)
        for name in (self.key, "_" + self.key) if self.key else ():
            every = checked(name, keys.take(name, every), int)
        read_types(keys, found, types_of(every, found["num_layers"]), window)

    def write(self, model: ModelConfig) -> dict[str, typing.Any]:
        types, window = written_types(model), model.attention_window
        rule = {self.key: rule_of(types) or model.num_layers + 1} if self.key else {}
        return {"sliding_window": window or model.max_position, "layer_types": types, **rule}
