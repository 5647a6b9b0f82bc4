"""Rules between the settings of the optimizer and others."""

from collections.abc import Iterator

from maxmeg.config.context import KINDS
from maxmeg.config.layers import SHARED
from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import DType, Position
from maxmeg.config.optimizers import Group, NewtonSchulz
from maxmeg.config.schema import (
    Config,
    LossScaleConfig,
    LrDecay,
    Masters,
    Moments,
    OptimConfig,
    Optimizer,
    WeightDecayRamp,
)
from maxmeg.config.setting import assignment


def optim_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules of the optimizer and of the dtypes that its gradients have."""
    optim = config.optim
    for name in ("min_lr", "warmup_init_lr"):
        if not 0 <= getattr(optim, name) <= optim.lr:
            yield f"optim.{name}={getattr(optim, name)} must lie in [0, optim.lr={optim.lr}]"
    yield from schedule_problems(optim)
    if optim.optimizer is Optimizer.muon and not optim.lr:
        yield "optim.lr=0.0 with optim.optimizer=muon: set the peak rate of matrices, > 0"
    if optim.muon.coefficients is NewtonSchulz.cubic and optim.muon.steps != 5:
        yield f"optim.muon.steps={optim.muon.steps}: coefficients=cubic are of 5 steps, set it to 5"
    for text in optim.groups:
        try:
            Group.of(text)
        except ValueError as error:
            yield str(error)
    if optim.masters is Masters.remainders and config.model.dtype is not DType.bfloat16:
        yield (
            f"optim.masters=remainders with model.dtype={config.model.dtype.name}: its weights are "
            "the upper halves of float32 masters; set model.dtype=bfloat16, or masters=float32"
        )
    has_none = optim.optimizer is Optimizer.adafactor and not optim.adafactor.momentum
    if has_none and optim.moments is not Moments.float32:
        yield (
            f"optim.moments={optim.moments.name} with optim.adafactor.momentum=0.0 has no moments "
            "of matrices to store: set the momentum above 0, or moments=float32"
        )
    if optim.qk_clip.threshold:
        yield from qk_clip_problems(config)
    by_rms = optim.optimizer is Optimizer.adafactor and optim.adafactor.scale_by_parameter
    if config.model.mup.base_hidden_size and (by_rms or optim.optimizer is Optimizer.soap):
        name = "adafactor.scale_by_parameter=true" if by_rms else "optimizer=soap"
        yield (
            f"optim.{name} with model.mup.base_hidden_size={config.model.mup.base_hidden_size}: "
            "muP has rules for the rates of adamw, lion, sgd, muon, and adafactor without "
            "scale_by_parameter: choose one of them, or set base_hidden_size=0"
        )
    if config.model.dtype is DType.float16:
        if config.train.rerun_bad_steps:
            yield (
                "train.rerun_bad_steps=true with model.dtype=float16, whose steps overflow until "
                "the loss scale fits: set it to false, or choose bfloat16"
            )
        scale = optim.loss_scale
        if scale.minimum > scale.initial:
            yield (
                f"optim.loss_scale.minimum={scale.minimum} exceeds optim.loss_scale.initial="
                f"{scale.initial}: lower it"
            )
    elif optim.loss_scale != LossScaleConfig():
        yield (
            f"optim.loss_scale has no effect with model.dtype={config.model.dtype.name}: set "
            "model.dtype=float16, or leave it at its defaults"
        )


def qk_clip_problems(config: Config) -> Iterator[str]:
    """Yield the settings with which attention logits are not proportional to the query and key
    weights, so that scaling the weights does not scale the logits."""
    model, clip = config.model, f"optim.qk_clip.threshold={config.optim.qk_clip.threshold}"
    if not model.has(*KINDS):
        yield f"{clip}: model.layers={model.layers} has no attention; set it to 0"
    requirements = (
        ("model.attention.qk_norm", model.attention.qk_norm, QkNorm.none),
        ("model.attention.softcap", model.attention.softcap, 0.0),
        ("model.attention.keys_as_values", model.attention.keys_as_values, False),
        ("lora.rank", config.lora.rank, 0),
    )
    for name, value, allowed in requirements:
        if value != allowed:
            yield (
                f"{clip} multiplies the weights of queries and keys, which does not scale logits "
                f"with {assignment(name, value)}: set the threshold to 0, or "
                f"{assignment(name, allowed)}"
            )
    if model.has(*SHARED):
        names = ", ".join(name for name in SHARED if model.has(name))
        yield f"{clip} cannot scale the keys that {names} reads of another layer: set it to 0"
    if model.position is Position.relative:
        yield f"{clip} is not for the biases of model.position=relative: set the threshold to 0"


def schedule_problems(optim: OptimConfig) -> Iterator[str]:
    """Yield the broken rules of settings that describe one schedule together."""
    for name in ("warmup", "decay"):
        steps, samples = getattr(optim, f"{name}_steps"), getattr(optim, f"{name}_samples")
        if steps and samples:
            yield (
                f"optim.{name}_steps={steps} and optim.{name}_samples={samples} both set a length: "
                "give one of the two"
            )
    end, ramp = optim.weight_decay_end, optim.weight_decay_ramp
    if (ramp is WeightDecayRamp.constant) != (end < 0 or end == optim.weight_decay):
        yield (
            f"optim.weight_decay_ramp={ramp.name} with optim.weight_decay={optim.weight_decay} and "
            f"optim.weight_decay_end={end}: choose a ramp (linear, cosine) together with an end"
        )
    if optim.wsd_decay_steps < 0 or (optim.decay is LrDecay.wsd) != (optim.wsd_decay_steps > 0):
        yield (
            f"optim.decay={optim.decay.name} with optim.wsd_decay_steps={optim.wsd_decay_steps}: "
            "wsd needs a length above 0, no other shape has one"
        )
