"""Training with 4-bit products, and quantization-aware training: on meshes, resumed, its losses."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import short_runs
from layouts import (
    assert_equal_but_rounding,
    mesh_of,
    model_gradients,
    named_gradients,
    tiny,
    tiny_batch,
    tiny_state,
)
from test_fp8_training import MODELS

from maxmeg.config.quantization import QuantizationConfig, QuantizationRecipe
from maxmeg.ops import recipes
from maxmeg.step import make_gradients
from maxmeg.train import main

TOLERANCE, FLOOR = 1e-5, 1e-7  # relative, float32: the order of sums differs
# Relative, in the L2 norm, for single codes that round the other way. Quantization itself gives
# 0.1 to 0.3, in int8 at least 6.6e-3, and so would other scales or blocks.
SINGLE_CODES = 5e-3
QUANTIZED, ALIGNED = 5e-3, 0.9  # of the loss and gradients of a model with random weights
SPREAD = 1.25  # distance of two meshes' gradients, in distances of two keys on one device
# Of experts' gradients: each mesh puts other tokens into the blocks that the transform mixes.
MIXED = 0.3
NAMES = ("nvfp4", "mxfp4", "qat_nvfp4", "qat_mxfp4", "qat_int8")
ALL, FSDP = {"pipe": 2, "fsdp": 2, "tensor": 2}, {"pipe": 2, "fsdp": 4}
# With tensor, qat_int8 scales parts of tokens. Two devices along data cut weights by ZeRO-1.
LAYOUTS = [
    *((name, "wide", ALL) for name in NAMES[:4]),
    ("qat_int8", "wide", FSDP),
    *((name, "wide", {"pipe": 2, "data": 2}) for name in ("nvfp4", "qat_int8")),
    ("nvfp4", "wide experts", {"fsdp": 2, "expert": 2}),
]
QUICK = ("nvfp4", "wide", ALL)


def quantized(name: str) -> QuantizationConfig:
    return QuantizationConfig(QuantizationRecipe[name])


@pytest.fixture
def to_nearest(monkeypatch):
    recipe = recipes.RECIPES[QuantizationRecipe.nvfp4]
    nearest = dataclasses.replace(recipe, draws=False)
    monkeypatch.setitem(recipes.RECIPES, QuantizationRecipe.nvfp4, nearest)


def gradients(name: str, model: str, **parallel: int) -> tuple[dict, dict]:
    micro = {"micro_batch_size": 1} if "pipe" in parallel else {}
    config = tiny(MODELS[model], {"quantization": quantized(name)} | micro, **parallel)
    loss, found = model_gradients(config)
    return {"loss": loss}, found


@functools.cache
def alone(name: str, model: str) -> tuple[dict, dict]:
    return gradients(name, model, fsdp=1)


@pytest.mark.usefixtures("to_nearest")
@pytest.mark.parametrize(
    ("name", "model", "parallel"),
    [case if case == QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in LAYOUTS],
)
def test_every_mesh_gives_the_same_if_gradients_are_rounded_to_nearest(name, model, parallel):
    results = gradients(name, model, **parallel), alone(name, model)
    for tolerance, of_experts in ((TOLERANCE, False), (MIXED, True)):
        sides = (
            (loss, {n: a for n, a in arrays.items() if (".experts." in n) == of_experts})
            for loss, arrays in results
        )
        assert_equal_but_rounding(*sides, tolerance, FLOOR, SINGLE_CODES)


@pytest.mark.usefixtures("to_nearest")
@pytest.mark.parametrize(
    "name",
    [name if name == "nvfp4" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_products_are_quantized_and_gradients_keep_their_direction(name):
    found, exact = alone(name, "wide"), gradients("none", "wide", fsdp=1)
    assert 0 < abs(found[0]["loss"] - exact[0]["loss"]) < QUANTIZED * exact[0]["loss"]
    for path, array in exact[1].items():
        if np.abs(array).max():
            norms = np.linalg.norm(array) * np.linalg.norm(found[1][path])
            assert ALIGNED < np.vdot(array, found[1][path]) / norms < 1 - 1e-9, path


@pytest.mark.slow
def test_meshes_differ_by_what_two_keys_differ_by():
    """Stochastic rounding draws other numbers for other microbatches and shards. Without dropout,
    which would depend on the key too."""
    found = []
    for devices, seeds in ((1, (0, 0, 1)), (4, (0,))):
        model = MODELS["wide"] | {"dropout_hidden": 0.0}
        config = tiny(model, {"quantization": quantized("nvfp4")}, fsdp=devices)
        mesh = mesh_of(config)
        _, abstract, state = tiny_state(config, mesh)
        function = jax.jit(make_gradients(config, mesh, abstract.model))
        batch = tiny_batch(config, mesh)
        for key in map(jax.random.key, seeds):
            arrays, _ = function(state.model, batch, jax.random.key_data(key))
            found.append(np.concatenate([a.ravel() for a in named_gradients(arrays).values()]))
    first, again, other, mesh = found
    np.testing.assert_array_equal(first, again)
    keys = np.linalg.norm(first - other)
    assert keys > 0.01 * np.linalg.norm(first)
    assert keys / SPREAD < np.linalg.norm(mesh - first) < keys * SPREAD


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    corpus = short_runs.write_corpus(tmp_path)

    def run(folder, steps):
        model = {"hidden_size": 128, "mlp.ffn_size": 256, "num_layers": 2}
        config = short_runs.config(corpus, folder, steps, model, {"fsdp": 4, "tensor": 2})
        config.train.quantization = quantized("nvfp4")
        main(config)

    short_runs.resumed_bitwise(run, tmp_path)
