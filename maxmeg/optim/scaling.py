"""Loss scaling for float16: gradients of a loss that is multiplied by a scale do not underflow.

Follows DynamicGradScaler of Megatron-LM (core/optimizer/grad_scaler.py). Scales are powers of two
where the settings are: multiplying by one is exact.
"""

import dataclasses

import jax
import jax.numpy as jnp

from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LossScaleConfig

FACTOR = 2.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaler:
    """Scalars. scale: float32, of the loss of the next step. clean_steps: steps without an overflow
    since the scale changed or a step overflowed. hysteresis: further overflows until the scale is
    halved. skipped_samples: samples of all skipped steps, for which no schedule advances.
    """

    scale: jax.Array
    clean_steps: jax.Array
    hysteresis: jax.Array
    skipped_samples: jax.Array


def first_scaler(config: Config) -> Scaler | None:
    """The scaler before the first step; None unless the compute dtype is float16."""
    if config.model.dtype is not DType.float16:
        return None
    settings = config.optim.loss_scale
    scale = jnp.float32(settings.fixed or settings.initial)
    return Scaler(scale, jnp.int32(0), jnp.int32(settings.hysteresis), jnp.int32(0))


def next_scaler(
    scaler: Scaler, finite: jax.Array, samples: int, settings: LossScaleConfig
) -> Scaler:
    """The scaler after a step of `samples` samples. finite: whether its loss and gradients were.

    As in Megatron-LM, an overflow does not reset the hysteresis after it has halved the scale: each
    further one halves it at once, until `window` steps without any.
    """
    skipped = scaler.skipped_samples + jnp.where(finite, 0, samples)
    if settings.fixed:
        return dataclasses.replace(scaler, skipped_samples=skipped)
    clean_steps = jnp.where(finite, scaler.clean_steps + 1, 0)
    grows = clean_steps == settings.window
    hysteresis = scaler.hysteresis - jnp.where(finite, 0, 1)
    smaller = jnp.maximum(scaler.scale / FACTOR, settings.minimum)
    backed_off = jnp.where(hysteresis <= 0, smaller, scaler.scale)
    scale = jnp.where(grows, scaler.scale * FACTOR, jnp.where(finite, scaler.scale, backed_off))
    hysteresis = jnp.where(grows, settings.hysteresis, hysteresis)
    return Scaler(scale, jnp.where(grows, 0, clean_steps), hysteresis, skipped)


def unscaled(gradients, scaler: Scaler | None):
    """The gradients [...] of the loss from those of the scaled loss."""
    if scaler is None:
        return gradients
    return jax.tree.map(lambda g: g / scaler.scale, gradients)
