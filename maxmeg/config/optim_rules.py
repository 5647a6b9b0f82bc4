"""Rules between the settings of the optimizer and others."""

from collections.abc import Iterator

from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LossScaleConfig, NewtonSchulz, Optimizer


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
