"""LoRA in the train step: every layout gives one device's losses and gradients; nothing is made for
the frozen base."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import EVERYTHING, controls, mesh_of, tiny, tiny_batch, tiny_state

from maxmeg.config.schema import Config, LoraConfig, Recompute, Schedule
from maxmeg.layers.lora import linears
from maxmeg.parallel.parts import frozen, trained
from maxmeg.state import to_arrays
from maxmeg.step import make_gradients, make_train_step

TOLERANCE = 1e-5  # relative, float32: the order of sums differs, and sums of low rank cancel
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
MODELS = {
    "llama": {},
    "everything": EVERYTHING,
}
ADAPTERS = {"rank": 3, "alpha": 6.0, "dropout": 0.2, "targets": ("mixers.*",)}
LAYOUTS = [
    ("llama", {"data": 4, "fsdp": 1, "tensor": 2}, {"recompute": Recompute.full}, 2),
    ("everything", {"data": 2, "fsdp": 2, "tensor": 2}, {}, 2),
    ("everything", {"pipe": 2, "fsdp": 2, "tensor": 2, "schedule": Schedule.gpipe}, {}, 1),
    ("everything", {"pipe": 2, "fsdp": 2, "chunks": 2}, {"recompute": Recompute.full}, 2),
    ("llama", {"pipe": 4, "fsdp": 1, "data": 2, "pad_layers": True}, {"num_layers": 5}, 2),
    (
        "everything",
        {"pipe": 2, "data": 2, "fsdp": 1, "tensor": 2, "schedule": Schedule.zero_bubble},
        {"recompute": Recompute.selective},
        2,
    ),
]
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def with_adapters(fields: dict, micro: int = 0, **parallel) -> Config:
    config = tiny({"num_layers": 4, **fields}, {"micro_batch_size": micro}, **parallel)
    config.lora = LoraConfig(**ADAPTERS)
    return config


def stirred(model):
    """The model with other than zeros in B, so that every adapter has gradients."""

    def noise(b):
        return jnp.broadcast_to(0.1 * jax.random.normal(jax.random.key(0), b.shape[1:]), b.shape)

    for linear in linears(model).values():
        if linear.lora is not None:
            made = jax.jit(noise, out_shardings=linear.lora.b.get_value().sharding)
            linear.lora.b = linear.lora.b.replace(made(linear.lora.b.get_value()))
    return model


def gradients(model: str, parallel: dict, fields: dict, micro: int):
    """(loss, gradients by name in model order) of one batch."""
    config = with_adapters({**MODELS[model], **fields}, micro, **parallel)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    function = quick_jit(make_gradients(config, mesh, abstract.model))
    found, sums = function(stirred(state.model), tiny_batch(config, mesh), state.key)
    (order,) = abstract.model.stack.layout.orders
    there = np.array(order) >= 0
    arrays = {}
    for name, array in to_arrays(found).items():
        array = np.asarray(array)
        assert array.dtype == np.float32 and not array[~there].any()
        arrays[name] = array[there][np.argsort(np.array(order)[there])]
    return float(sums["loss_sum"] / sums["tokens"]), arrays


@functools.cache
def single_device(model: str, layers: int):
    return gradients(model, {"fsdp": 1}, {"num_layers": layers}, 0)


@pytest.mark.parametrize(
    ("model", "parallel", "fields", "micro"),
    [*(pytest.param(*one, marks=pytest.mark.slow) for one in LAYOUTS[:-1]), LAYOUTS[-1]],
)
def test_layout_equals_single_device(model, parallel, fields, micro):
    loss, found = gradients(model, parallel, fields, micro)
    reference_loss, reference = single_device(model, fields.get("num_layers", 4))
    assert loss == pytest.approx(reference_loss, rel=TOLERANCE)
    assert found.keys() == reference.keys() and all(".lora." in name for name in found)
    assert len(found) == 2 * 7
    for name, array in found.items():
        limit = TOLERANCE * np.abs(reference[name]).max()
        assert limit > 0 and np.abs(array - reference[name]).max() <= limit + FLOOR, name
