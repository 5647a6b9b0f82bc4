"""Rules between the settings of the optimizer and others."""

from collections.abc import Iterator

from maxmeg.config.model import DType
from maxmeg.config.optimizers import Group, NewtonSchulz
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, LossScaleConfig, Masters, Moments, Optimizer

ELEMENTWISE = (Optimizer.adamw, Optimizer.sgd, Optimizer.lion)


def optim_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules of the optimizer and of the dtypes that its gradients have."""
    optim = config.optim
    for name in ("min_lr", "warmup_init_lr"):
        if not 0 <= getattr(optim, name) <= optim.lr:
            yield f"optim.{name}={getattr(optim, name)} must lie in [0, optim.lr={optim.lr}]"
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
    if optim.offload and optim.optimizer not in ELEMENTWISE:
        yield (
            f"optim.offload=true with optim.optimizer={optim.optimizer.name}, whose update needs "
            "whole matrices or statistics of them: set offload=false, or choose the optimizer from "
            f"{', '.join(one.name for one in ELEMENTWISE)}"
        )
    if optim.optimizer is Optimizer.soap:
        yield from soap_problems(config.parallel)
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


def soap_problems(parallel: ParallelConfig) -> Iterator[str]:
    """Yield the settings that shard a matrix over devices, which SOAP needs whole."""
    layout = {"fsdp": (parallel.fsdp, 1), "tensor": (parallel.tensor, 1)}
    layout |= {"zero1": (parallel.zero1, False)}
    for name, (value, whole) in layout.items():
        if value != whole:
            yield (
                f"parallel.{name}={str(value).lower()} with optim.optimizer=soap shards matrices, "
                f"of which SOAP needs the whole: set {name}={str(whole).lower()}; data, pipe, "
                "expert and context do not shard them"
            )
