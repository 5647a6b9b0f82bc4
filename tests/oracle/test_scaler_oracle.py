"""The loss scale of float16 after any pattern of overflows is that of Megatron-LM's scaler."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LossScaleConfig
from maxmeg.optim.scaling import first_scaler, next_scaler

PATTERNS, STEPS, SAMPLES = 3_500, 60, 3


@pytest.mark.parametrize(("window", "hysteresis"), [(3, 2), (2, 1), (5, 4)])
def test_scales_are_megatrons(window, hysteresis, monkeypatch):
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, device=None, **kw: tensor(data, **kw))
    settings = LossScaleConfig(initial=2.0**6, minimum=2.0, window=window, hysteresis=hysteresis)
    rng = np.random.default_rng(window)
    overflows = rng.random((PATTERNS, STEPS)) < rng.random((PATTERNS, 1))
    theirs = np.zeros(overflows.shape)
    for row, pattern in zip(theirs, overflows, strict=True):
        scaler = DynamicGradScaler(64.0, 2.0, 2.0, 0.5, window, hysteresis)
        for i, overflow in enumerate(pattern):
            scaler.update(bool(overflow))
            row[i] = scaler._scale.item()

    config = Config()
    config.model.dtype, config.optim.loss_scale = DType.float16, settings
    step = functools.partial(next_scaler, samples=SAMPLES, settings=settings)

    @jax.jit
    @jax.vmap
    def run(finite):
        def one(scaler, finite):
            scaler = step(scaler, finite)
            return scaler, scaler.scale

        last, scales = jax.lax.scan(one, first_scaler(config), finite)
        return scales, last.skipped_samples

    scales, skipped = run(jnp.asarray(~overflows))
    np.testing.assert_array_equal(scales, theirs)
    np.testing.assert_array_equal(skipped, SAMPLES * overflows.sum(axis=1))
