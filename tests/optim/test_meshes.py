"""Every optimizer on meshes is that of one device."""

import functools

import jax
import numpy as np
import pytest
from layouts import controls, in_model_order, mesh_of, tiny, tiny_batch, tiny_state
from optimizer_cases import well_conditioned

from maxmeg.config.model import DType
from maxmeg.config.optimizers import AdafactorConfig, MuonConfig
from maxmeg.config.schema import Moments, OptimConfig, Optimizer
from maxmeg.parallel.trainable import trained
from maxmeg.step import make_train_step

# Root mean square error of an update, of its own: signs of Lion flip, and Adafactor and Muon
# amplify rounding, where gradients are little more than rounding.
SAME_UPDATE = 2e-3
# Of float8 moments a code in a thousand is another one, where gradients differ by rounding.
SAME_CODES = 2e-2
SAME_GRADIENT = 1e-6  # of updates, of the largest, where all devices have equal gradients
EXPERTS = {"moe.num_experts": 4, "moe.top_k": 2}
LATENT = {"mla.kv_rank": 16, "mla.query_rank": 16, "mla.rotary_size": 4}
MODEL = EXPERTS | LATENT | {"num_layers": 3, "layers": "*(mla,moe)"}
SQUARE = EXPERTS | {"num_layers": 16, "layers": "*(attention,moe)", "moe.ffn_size": 32}
SHARDED = {"data": 2, "fsdp": 2, "tensor": 2}
STACKED = {"pipe": 2, "pad_layers": True, "fsdp": 1, "expert": 2, "data": 2, "zero1": False}
OPTIMIZERS = {
    "lion": OptimConfig(Optimizer.lion),
    "adafactor": OptimConfig(Optimizer.adafactor, adafactor=AdafactorConfig(momentum=0.5)),
    "muon": OptimConfig(Optimizer.muon, muon=MuonConfig(dtype=DType.float32)),
    "muon of heads": OptimConfig(
        Optimizer.muon, muon=MuonConfig(nesterov=True, per_head=True, dtype=DType.float32)
    ),
    "float8": OptimConfig(moments=Moments.float8),
    "soap": OptimConfig(Optimizer.soap, eps=1.0),
}


def updates_of(name: str, parallel: dict) -> dict[str, np.ndarray]:
    """The changes of all parameters in two steps, layers in model order."""
    config = tiny(MODEL, {"micro_batch_size": 2}, **parallel)
    config.optim = OPTIMIZERS[name]
    mesh = mesh_of(config)
    transformation, abstract, state = tiny_state(config, mesh)
    before = jax.device_get(in_model_order({"model": state.model}))
    step = make_train_step(config, mesh, transformation, abstract)
    for seed in range(2):
        state, metrics = step(state, tiny_batch(config, mesh, seed), controls(mesh))
        assert not metrics["skipped"]
    after = jax.device_get(in_model_order({"model": state.model}))
    changes = jax.tree.map(np.subtract, after, before)
    leaves = jax.tree_util.tree_leaves_with_path(changes)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@functools.cache
def on_one_device(name: str) -> dict[str, np.ndarray]:
    return updates_of(name, {"fsdp": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("lion", SHARDED),
        ("adafactor", STACKED),
        ("muon of heads", SHARDED),
        ("muon of heads", STACKED),
        ("float8", SHARDED),
    ],
)
def test_updates_on_a_mesh_are_those_of_one_device(name, parallel):
    whole, found = on_one_device(name), updates_of(name, parallel)
    tolerance = SAME_CODES if name == "float8" else SAME_UPDATE
    assert found.keys() == whole.keys()
    for path, update in whole.items():
        off = found[path][tuple(map(slice, update.shape))] - update
        assert np.sqrt((off**2).mean()) <= tolerance * np.sqrt((update**2).mean()), path


def updates_from_equal_gradients(name: str, parallel: dict) -> dict[str, np.ndarray]:
    """Second updates of a model with square matrices, whose gradients have full rank."""
    config = tiny(SQUARE, {"micro_batch_size": 2}, **parallel)
    config.optim = OPTIMIZERS[name]
    mesh = mesh_of(config)
    optimizer, _, state = tiny_state(config, mesh)
    masters, moments = trained(state.model), state.optimizer
    update, updates, rng = jax.jit(optimizer.update), None, np.random.default_rng(0)
    for _ in range(2):
        gradients = jax.tree.map(
            lambda a: jax.device_put(np.float32(well_conditioned(rng, a.shape)), a.sharding),
            masters,
        )
        rates = {"learning_rate": 1.0, "weight_decay": 0.0}
        updates, moments = update(gradients, moments, masters, **rates)
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soap", "muon", "muon of heads"])
def test_equal_gradients_give_equal_updates_on_every_mesh(name):
    """Of 16 layers each device has at least 4: XLA's products of fewer matrices round differently
    on CPUs, which iterations amplify."""
    expected = updates_from_equal_gradients(name, {"fsdp": 1})
    for parallel in (
        {"tensor": 2, "expert_tensor": 1, "expert": 2, "fsdp": 2},
        {"fsdp": 4},
        {"data": 2, "context": 2, "fsdp": 1},
        {"pipe": 2, "expert": 2, "fsdp": 1, "zero1": False},
    ):
        for path, update in updates_from_equal_gradients(name, parallel).items():
            off = np.abs(update - expected[path]).max()
            assert off <= SAME_GRADIENT * np.abs(expected[path]).max(), (parallel, path)
