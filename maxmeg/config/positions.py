"""Settings of positions: rotary embeddings and relative biases."""

import dataclasses
import enum

from maxmeg.config.setting import Section, setting


class RotaryScaling(enum.Enum):
    none = "none"
    linear = "linear"
    ntk = "ntk"
    dynamic = "dynamic"
    proportional = "proportional"
    llama3 = "llama3"
    yarn = "yarn"
    longrope = "longrope"


@dataclasses.dataclass(repr=False)
class RotaryConfig(Section):
    """Rotary position embedding (RoPE)."""

    base: float = setting(
        10000.0, "base of the frequencies", "--rotary-base", at_least=1, effect="adapted"
    )
    local_base: float = setting(
        0.0,
        "base in the mixer local, without scaling of the frequencies; 0: base, scaled",
        effect="adapted",
    )
    fraction: float = setting(
        1.0,
        "fraction of each head that is rotated, in (0, 1]",
        "--rotary-percent",
        above=0,
        at_most=1,
    )
    interleaved: bool = setting(
        False, "rotate pairs (2i, 2i+1) instead of halves", "--rotary-interleaved"
    )
    scaling: RotaryScaling = setting(
        RotaryScaling.none,
        "how frequencies change for sequences longer than original_length",
        "--use-rope-scaling",
        effect="adapted",
    )
    factor: float = setting(
        1.0,
        "ratio of the longest sequence to original_length, >= 1",
        "--rope-scaling-factor",
        at_least=1,
        needs="scaling=linear|ntk|dynamic|proportional|llama3|yarn|longrope",
        effect="adapted",
    )
    original_length: int = setting(
        0,
        "sequence length before scaling, tokens",
        needs="scaling=dynamic|llama3|yarn|longrope",
        effect="adapted",
    )
    low: float = setting(
        1.0,
        "frequencies with fewer turns in original_length are divided by factor (yarn: beta slow)",
        needs="scaling=llama3|yarn",
        effect="adapted",
    )
    high: float = setting(
        4.0,
        "frequencies with more turns in original_length are kept (yarn: beta fast, 32)",
        needs="scaling=llama3|yarn",
        effect="adapted",
    )
    attention_factor: float = setting(
        0.0,
        "factor of the rotated queries and keys; 0: what the scaling's paper derives from factor",
        at_least=0,
        needs="scaling=yarn|longrope",
        effect="adapted",
    )
    truncate: bool = setting(
        True,
        "round the dimensions between which frequencies are interpolated to whole numbers",
        needs="scaling=yarn",
        effect="adapted",
    )
    short_factors: tuple[float, ...] = setting(
        (),
        "divisor of each frequency in sequences up to original_length",
        needs="scaling=longrope",
        effect="adapted",
    )
    long_factors: tuple[float, ...] = setting(
        (),
        "divisor of each frequency in longer sequences",
        needs="scaling=longrope",
        effect="adapted",
    )


@dataclasses.dataclass(repr=False)
class RelativeConfig(Section):
    """T5's relative position bias: a learned number for each head and bucket of distances, one
    table for all layers of the encoder and one for all layers of the decoder."""

    buckets: int = setting(
        32,
        "number of buckets; half of them for small distances, one each",
        "--relative-attention-num-buckets",
        at_least=4,
    )
    distance: int = setting(
        128,
        "distance from which on all keys share a bucket",
        "--relative-attention-max-distance",
        at_least=2,
    )
