"""Settings of single optimizers (Muon, SOAP, Adafactor) and of groups of parameters."""

import dataclasses
import enum
import fnmatch
import math
import re

from maxmeg.config.model import DType
from maxmeg.config.setting import Section, setting

SUBLAYER = re.compile(r"stack\.groups\.(\d+)\.sublayers\.(\d+)\.(mixers\.)?")


class NewtonSchulz(enum.Enum):
    simple = "simple"
    quintic = "quintic"
    polar_express = "polar_express"
    cans = "cans"
    aol = "aol"
    deepseek_v4 = "deepseek_v4"
    cubic = "cubic"


class MuonScale(enum.Enum):
    spectral = "spectral"
    shape_scaling = "shape_scaling"
    unit_rms_norm = "unit_rms_norm"


@dataclasses.dataclass(repr=False)
class MuonConfig(Section):
    """Muon for matrices of layers; AdamW updates embeddings, output layers and vectors."""

    momentum: float = setting(0.95, "decay of the momentum", "--muon-momentum", at_least=0, below=1)
    nesterov: bool = setting(False, "Nesterov's momentum", "--muon-use-nesterov")
    coefficients: NewtonSchulz = setting(
        NewtonSchulz.quintic,
        "coefficients of the Newton-Schulz steps, as published under these names",
        "--muon-coefficient-type",
    )
    steps: int = setting(5, "Newton-Schulz steps; cubic has 5", "--muon-num-ns-steps", at_least=1)
    scale: MuonScale = setting(
        MuonScale.spectral,
        "factor of the update of a matrix [in, out]: spectral sqrt(max(in, out)) | shape_scaling "
        "sqrt(max(1, out / in)) | unit_rms_norm sqrt(out / in)",
        "--muon-scale-mode",
    )
    extra_scale: float = setting(
        1.0,
        "further factor; 0.2 with spectral makes updates about as large as AdamW's",
        "--muon-extra-scale-factor",
        above=0,
    )
    dtype: DType = setting(
        DType.bfloat16,
        "dtype of the Newton-Schulz products, and of the matrices that devices exchange",
        "--muon-fp32-matmul-prec",
    )
    per_head: bool = setting(
        False,
        "orthogonalize each head of the query, key and value projections separately; in mla also "
        "the rotary part and the latent",
        "--muon-split-qkv-per-head",
    )
    adamw_lr: float = setting(
        0.0, "peak learning rate of what AdamW updates; 0: optim.lr", at_least=0
    )


@dataclasses.dataclass(repr=False)
class QkClipConfig(Section):
    """QK-clip (with Muon: MuonClip): scale down the query and key weights of heads whose attention
    logits exceed a threshold."""

    threshold: float = setting(
        0.0,
        "heads whose largest attention logit in a step exceeds this are scaled down to it (Kimi "
        "K2: 100); 0: off. Attention in plain XLA gives the exact logit; other backends give the "
        "log-sum-exp, up to log(number of keys) larger, so they clip a little earlier",
        "--qk-clip, --qk-clip-threshold",
        at_least=0,
    )
    alpha: float = setting(
        0.5,
        "queries are multiplied by (threshold / logit)**alpha, keys by (threshold / logit)**(1 - "
        "alpha). In mla this applies to the non-rotary parts; the rotary part of the queries is "
        "multiplied by threshold / logit",
        "--qk-clip-alpha",
        at_least=0,
        at_most=1,
        needs="threshold",
    )


@dataclasses.dataclass(repr=False)
class SoapConfig(Section):
    """SOAP for matrices of layers; AdamW updates embeddings, output layers and vectors."""

    factor_beta: float = setting(
        0.95, "decay of the factors of a matrix", "--soap-shampoo-beta", at_least=0, below=1
    )
    kl: bool = setting(
        True,
        "KL-Shampoo: weight the gradients in each factor by the inverse of the other factor",
        "--soap-use-kl-shampoo",
    )
    precondition_frequency: int = setting(
        1,
        "number of steps between updates of the eigenbases; SOAP's authors use 10",
        "--soap-precondition-frequency",
        at_least=1,
    )
    max_precond_dim: int = setting(
        10_000,
        "largest size of a factor: a matrix with more rows (columns) has none of them, and Adam "
        "runs in the eigenbasis of its columns (rows) alone",
        at_least=0,
    )


@dataclasses.dataclass(repr=False)
class AdafactorConfig(Section):
    """Adafactor; it does not read beta1, beta2 and eps."""

    decay: float = setting(0.8, "exponent: step n decays second moments by 1 - n**-decay", above=0)
    clip: float = setting(1.0, "largest RMS of a matrix's update; 0: no limit", at_least=0)
    momentum: float = setting(
        0.0, "decay of the first moment; 0: none is stored", at_least=0, below=1
    )
    scale_by_parameter: bool = setting(
        False, "multiply updates by the RMS of their matrix, at least 1e-3"
    )


@dataclasses.dataclass(repr=False)
class EmaConfig(Section):
    """Exponential moving average (EMA) of the trained weights, saved in checkpoints with them."""

    decay: float = setting(
        0.0,
        "after each step: average = decay * average + (1 - decay) * weights, with a decay of at "
        "most (1 + n) / (10 + n) after n steps; 0: off",
        at_least=0,
        below=1,
    )
    validate: bool = setting(
        True,
        "validation and the sample at the end use the EMA weights; false: the trained weights",
        needs="decay",
    )

    @property
    def evaluates(self) -> bool:
        """Whether evaluations during training read the average."""
        return self.decay > 0 and self.validate


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters whose names match `pattern` (fnmatch), and factors of their learning rate and
    weight decay."""

    pattern: str
    rate: float
    decay: float

    @classmethod
    def of(cls, text: str) -> "Group":
        """The group that "PATTERN:RATE:DECAY" names; ValueError for another form."""
        pattern, *factors = text.rsplit(":", 2)
        try:
            rate, decay = map(float, factors)
        except ValueError:
            rate = decay = -1.0
        if not pattern or not all(0 <= factor < math.inf for factor in (rate, decay)):
            raise ValueError(
                f"optim.groups has {text!r}: give PATTERN:RATE:DECAY with finite factors >= 0 of "
                "the learning rate and of the weight decay, as in 'embedding.*:0.5:0'"
            )
        return cls(pattern, rate, decay)

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the full or the short name of a parameter."""
        return any(fnmatch.filter((name, short_name(name)), self.pattern))


def short_name(name: str) -> str:
    """The name of a parameter in optim.groups: "layers.0.1.mlp.up.weight" for a weight of sublayer
    1 of group 0 of the stack."""
    return SUBLAYER.sub(r"layers.\1.\2.", name)
