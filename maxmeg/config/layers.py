"""The grammar of `model.layers`, and the layers that it describes. No JAX.

A layer is a list of sublayers joined by commas. A sublayer is a mixer, or several joined by a plus:
they read the same input and their outputs are summed (a parallel block). Layers stand apart by
spaces. `3(...)` repeats layers, and `*(...)` repeats them until the model has `num_layers` layers;
the last repeat may be cut short. Examples:

    *(attention,mlp)                    GPT, Llama
    *(attention+mlp)                    GPT-NeoX, Falcon
    *(5(local,mlp) attention,mlp)       Gemma 3
    *(3(attention,mlp) nope_attention,mlp)                                  SmolLM3
    3(mla,mlp) *(mla,moe)               DeepSeek-V3
    raw_attention,mlp 2(local,mlp) *(attention,mlp 2(local,mlp))            ModernBERT
    local,mlp,layer_embedding attention,mlp,layer_embedding *(shared_local,wide_mlp,layer_embedding
        shared_attention,wide_mlp,layer_embedding)                          Gemma 4 E2B
    6(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)    T5
    attention,mlp attention 2(encoder_attention,encoder_cross,encoder_mlp) encoder_norm
        chunked_cross,mlp *(attention,mlp attention,chunked_cross,mlp)      RETRO
    M-M*-|M-M*-                         Megatron-LM's hybrid strings, a letter per layer
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

from maxmeg.config.hints import nearest_few

# The spec of each mixer, a class in layers/, and the groups of settings that it reads.
MIXERS = {
    "attention": ("AttentionSpec", "attention", "rotary"),
    "local": ("AttentionSpec", "attention", "rotary"),  # attention to a sliding window
    "raw_attention": ("AttentionSpec", "attention", "rotary"),  # whose input is not normalized
    "nope_attention": ("AttentionSpec", "attention"),  # attention without a rotary embedding
    "shared_attention": ("AttentionSpec", "attention", "rotary"),  # keys: of the last attention
    "shared_local": ("AttentionSpec", "attention", "rotary"),  # keys: of the last local
    "mla": ("MlaSpec", "attention", "rotary", "mla"),
    "local_mla": ("MlaSpec", "attention", "rotary", "mla"),
    "conv": ("ShortConvSpec", "conv"),  # gated short convolution
    "mamba": ("MambaSpec", "mamba"),  # Mamba-2
    "gated_delta": ("DeltaSpec", "delta"),  # Gated DeltaNet
    "kda": ("KdaSpec", "delta"),  # Kimi Delta Attention
    "mlp": ("MlpSpec", "mlp"),
    "wide_mlp": ("MlpSpec", "mlp"),  # of twice the width
    "layer_embedding": ("LayerEmbeddingSpec", "layer_embedding", "mlp"),  # of the tokens
    "moe": ("MoeSpec", "moe", "mlp"),
    "encoder_attention": ("AttentionSpec", "attention"),  # these four read and write the source
    "encoder_cross": ("ChunkedCrossSpec", "attention", "retro"),  # to the chunk of a neighbour
    "encoder_mlp": ("MlpSpec", "mlp"),
    "encoder_norm": ("EncoderNormSpec",),
    "cross": ("CrossSpec", "attention"),  # attention to the source
    "chunked_cross": ("ChunkedCrossSpec", "attention", "retro"),  # to the neighbours of a chunk
}
GROUPS = {name: groups for name, (_, *groups) in MIXERS.items()}
ENCODER = ("encoder_attention", "encoder_cross", "encoder_mlp", "encoder_norm")
RETRO = ("chunked_cross", "encoder_cross")
SHARED = {"shared_attention": "attention", "shared_local": "local"}
# Megatron-LM's letters.
HYBRID = {"M": "mamba", "G": "gated_delta", "*": "attention", "+": "mla", "-": "mlp", "E": "moe"}
MOST_LAYERS = 10_000

Layer = tuple[tuple[str, ...], ...]  # sublayers, each the names of its mixers
Groups = tuple[tuple[tuple[Layer, ...], int], ...]  # ((layers of a unit, repeats), ...)


def is_hybrid(pattern: str) -> bool:
    """Whether a pattern is a hybrid string of Megatron-LM."""
    return bool(pattern) and set(pattern) <= {*HYBRID, "|"}


@functools.lru_cache(maxsize=256)
def parse(pattern: str, num_layers: int) -> tuple[Layer, ...]:
    """Return the `num_layers` layers that a pattern describes.

    Raises ValueError with the position of what cannot be read, the nearest names of an unknown
    mixer, or the number of layers where it is another one.
    """
    if is_hybrid(pattern):
        names = [HYBRID[letter] for letter in pattern if letter != "|"]
        for name in names:
            _check_mixer(name, pattern)
        layers: list[Layer] = [((name,),) for name in names]
        return _counted(pattern, layers, num_layers)
    if re.fullmatch(r"[A-Z*+/|-]+", pattern):
        layers_text, *mtp_texts = pattern.split("/")
        if mtp_texts:
            raise ValueError(
                f"model.layers={pattern!r} describes MTP layers after /: set model.layers="
                f"{layers_text!r}, model.mtp.num_layers={len(mtp_texts)} and model.mtp.layers="
                f"{mtp_texts[0]!r}"
            )
        unknown = [letter for letter in dict.fromkeys(pattern) if letter not in {*HYBRID, "|"}]
        letters = ", ".join(f"{letter} ({name})" for letter, name in HYBRID.items())
        raise ValueError(
            f"model.layers={pattern!r} has the letters {' '.join(unknown)}, which no mixer has: "
            f"use {letters}, and | between the stages of a pipeline"
        )
    parser = _Parser(pattern)
    before, repeated, after = parser.stack()
    if repeated is None:
        return _counted(pattern, before, num_layers)
    count = num_layers - len(before) - len(after)
    if count < 1:
        raise ValueError(
            f"model.layers={pattern!r} has {len(before) + len(after)} layers beside *(...), which "
            f"must have at least one: model.num_layers={num_layers} must be at least "
            f"{len(before) + len(after) + 1}"
        )
    times = -(-count // len(repeated))
    return (*before, *(repeated * times)[:count], *after)


def one_layer(pattern: str) -> Layer:
    """Return the sublayers of the one layer that model.mtp.layers describes."""
    try:
        return sum(parse(pattern, len(pattern) if is_hybrid(pattern) else 1), ())
    except ValueError as error:
        text = str(error).partition(": set num_layers")[0].replace("model.", "model.mtp.", 1)
        raise ValueError(f"{text}; model.mtp.layers describes one layer") from error


def _counted(pattern: str, layers: Sequence[Layer], num_layers: int) -> tuple[Layer, ...]:
    if len(layers) != num_layers:
        raise ValueError(
            f"model.layers={pattern!r} describes {len(layers)} layers and model.num_layers is "
            f"{num_layers}: set num_layers={len(layers)}, or repeat layers by *(...)"
        )
    return tuple(layers)


def _check_mixer(name: str, pattern: str) -> None:
    if name not in MIXERS:
        raise ValueError(
            f"model.layers={pattern!r} has the unknown mixer {name!r}: did you mean "
            f"{nearest_few(name, [*MIXERS])}? There are {', '.join(MIXERS)}"
        )


class _Parser:
    """A recursive-descent parser of patterns."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.tokens = [(m.start(), m[0]) for m in re.finditer(r"\w+|\s+|[^\w\s]", pattern)]
        self.at = 0

    def stack(self) -> tuple[list[Layer], list[Layer] | None, list[Layer]]:
        """Parse all: return the layers before `*(...)`, inside it (or None), and after it."""
        parts: list[list[Layer]] = [[]]
        repeated: list[Layer] | None = None
        self.skip_spaces()
        while self.token:
            if self.token == "*":
                if repeated is not None:
                    raise self.error("only one *(...)")
                self.next()
                repeated = self.group()
                parts.append([])
            else:
                parts[-1] += self.item()
            self.separator("")
        if not any(parts) and not repeated:
            raise self.error("a layer, such as attention,mlp")
        return parts[0], repeated, parts[1] if repeated is not None else []

    def item(self) -> list[Layer]:
        """Parse a layer, or N(...)."""
        if not self.token.isdecimal():
            return [self.layer()]
        times = int(self.token)
        if not 1 <= times <= MOST_LAYERS:
            raise self.error(f"a number of repeats from 1 to {MOST_LAYERS}")
        self.next()
        return self.group() * times

    def group(self) -> list[Layer]:
        if self.token != "(":
            raise self.error("'('")
        self.next()
        self.skip_spaces()
        layers: list[Layer] = []
        while self.token != ")":
            if self.token == "*":
                raise self.error("a number: *(...) cannot stand within parentheses")
            layers += self.item()
            self.separator(")")
        if not layers:
            raise self.error("a layer, such as attention,mlp")
        self.next()
        return layers

    def layer(self) -> Layer:
        sublayers = [self.sublayer()]
        while self.token == ",":
            self.next()
            sublayers.append(self.sublayer())
        return tuple(sublayers)

    def sublayer(self) -> tuple[str, ...]:
        names = [self.mixer()]
        while self.token == "+":
            self.next()
            names.append(self.mixer())
            if names[-1] in names[:-1]:
                raise self.error(f"mixers that differ: {names[-1]} stands twice in a sublayer")
        return tuple(names)

    def mixer(self) -> str:
        name = self.token
        if name == "(":
            raise self.error("a number of repeats, or *, before '('")
        if not re.fullmatch(r"[a-z]\w*", name):
            raise self.error("a mixer, one of " + ", ".join(MIXERS))
        _check_mixer(name, self.pattern)
        self.next()
        return name

    def separator(self, end: str) -> None:
        """Parse the spaces between layers, or the end."""
        spaces = self.token.isspace()
        self.skip_spaces()
        if not spaces and self.token != end:
            expected = [repr(one) for one in (" ", ",", "+", end) if one]
            raise self.error(" or ".join([", ".join(expected[:-1]), expected[-1]]))

    @property
    def token(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def next(self) -> None:
        self.at += 1

    def skip_spaces(self) -> None:
        while self.token.isspace():
            self.next()

    def error(self, expected: str) -> ValueError:
        position = self.tokens[self.at][0] if self.token else len(self.pattern)
        place = repr(self.token) if self.token else "its end"
        return ValueError(
            f"model.layers={self.pattern!r} cannot be read at character {position + 1}, {place}: "
            f"expected {expected}"
        )


def stage_layers(pattern: str) -> tuple[int, ...]:
    """Return the layers of every pipeline chunk in a hybrid string with `|`; else ()."""
    if not is_hybrid(pattern) or "|" not in pattern:
        return ()
    return tuple(map(len, pattern.split("|")))


@functools.lru_cache(maxsize=256)
def grouped(layers: tuple[Layer, ...]) -> Groups:
    """Group layers into repeated units, each of which is compiled once: ((unit, repeats), ...).

    Where, after equal layers at the start, all others repeat after at most half of them, these are
    one unit (the last repeat, if it is cut short, is a unit of its own). Else the list is cut into
    the repeated units that leave the fewest layers to compile; where one period does as well, it
    is preferred.
    """
    if not layers:
        return ()
    equal = _equal_at_start(layers)
    for start in dict.fromkeys((0, equal)):
        rest = layers[start:]
        for period in range(1, len(rest) // 2 + 1):
            if _repeats(rest, period):
                first = ((layers[:1], start),) if start else ()
                return (*first, *_unit(rest, period))
    fewest = tuple(_fewest(layers))
    for period in range(len(layers) // 2 + 1, len(layers)):
        if _repeats(layers, period) and len(layers) <= sum(len(unit) for unit, _ in fewest):
            return _unit(layers, period)
    return fewest


def _equal_at_start(layers: Sequence[Layer]) -> int:
    return next((i for i, layer in enumerate(layers) if layer != layers[0]), len(layers))


def _repeats(layers: Sequence[Layer], period: int) -> bool:
    return all(layer == layers[i % period] for i, layer in enumerate(layers))


def _unit(layers: tuple[Layer, ...], period: int) -> Groups:
    times, left = divmod(len(layers), period)
    cut_short = ((layers[:left], 1),) if left else ()
    return ((layers[:period], times), *cut_short)


def _fewest(layers: tuple[Layer, ...]) -> Iterator[tuple[tuple[Layer, ...], int]]:
    """Divide a list without a period: fewest layers to compile, then fewest units."""
    count = len(layers)
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * (
        count + 1
    )  # cost, units, period, times
    for start in reversed(range(count)):
        choices = []
        for period in range(1, count - start + 1):
            unit, times = layers[start : start + period], 1
            while True:
                end = start + period * times
                cost, units = best[end][0] + period, best[end][1] + 1
                choices.append((cost, units, period, times))
                if layers[end : end + period] != unit:
                    break
                times += 1
        best[start] = min(choices)
    at = 0
    while at < count:
        _, _, period, times = best[at]
        yield layers[at : at + period], times
        at += period * times


def pattern_of(layers: Sequence[Layer]) -> str:
    """Return the shortest pattern of `grouped` units that describes a list of layers.

    A stack whose last unit goes on to the end is written with *(...), so that num_layers scales it.
    """
    groups = list(grouped(tuple(layers)))
    if len(groups) > 1 and _is_cut_short(groups[-1], groups[-2]):
        groups = groups[:-1]
    texts = []
    for unit, times in groups:
        text = _unit_text(unit)
        texts.append(f"{times}({text})" if times > 1 else text)
    texts[-1] = f"*({_unit_text(groups[-1][0])})"
    return " ".join(texts)


def _is_cut_short(group: tuple[tuple[Layer, ...], int], before: tuple) -> bool:
    (unit, times), (previous_unit, _) = group, before
    return times == 1 and len(unit) < len(previous_unit) and unit == previous_unit[: len(unit)]


def _unit_text(unit: tuple[Layer, ...]) -> str:
    runs = [(layer, len([*same])) for layer, same in itertools.groupby(unit)]
    if len(runs) == 1:
        return " ".join([layer_text(runs[0][0])] * runs[0][1])
    return " ".join(
        f"{times}({layer_text(layer)})" if times > 1 else layer_text(layer) for layer, times in runs
    )


def layer_text(layer: Layer) -> str:
    """Return the pattern of a layer: attention,mlp."""
    return ",".join("+".join(sublayer) for sublayer in layer)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer's parameters lie: the entry `repeat` of group `group`, and the number of the
    layer's first sublayer within the group's unit."""

    group: int
    repeat: int
    sublayer: int


def places(groups: Groups) -> list[Place]:
    """Return the place of every layer, in model order."""
    places = []
    for number, (unit, repeats) in enumerate(groups):
        firsts = [sum(map(len, unit[:i])) for i in range(len(unit))]
        places += [Place(number, repeat, first) for repeat in range(repeats) for first in firsts]
    return places
