"""Every optimizer on meshes is that of one device. (Gradients on meshes: test_step.py.)"""

import functools

import jax
import numpy as np
import pytest
from layouts import mesh_of, named_gradients, tiny, tiny_state
from optimizer_cases import well_conditioned

from maxmeg.checkpoint.disk import orders_of
from maxmeg.checkpoint.names import array_name
from maxmeg.config.model import DType
from maxmeg.config.optimizers import AdafactorConfig, MuonConfig
from maxmeg.config.schema import Moments, OptimConfig, Optimizer
from maxmeg.parallel.trainable import trained

SAME_GRADIENT = 1e-6  # of updates, of the largest, where all devices have equal gradients
EXPERTS = {"moe.num_experts": 4, "moe.top_k": 2, "moe.ffn_size": 32}
SQUARE = EXPERTS | {"num_layers": 19, "layers": "*(attention,moe)"}
LATENT = EXPERTS | {"num_layers": 19, "layers": "*(mla,moe)"}
LATENT |= {"mla.kv_rank": 16, "mla.query_rank": 16, "mla.rotary_size": 4}
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


def gradients_of(model, rng: np.random.Generator):
    """Equal on every mesh; zero where a pipeline has no layer."""
    orders = orders_of({"model": model})

    def draw(path, like):
        order = orders.get(f"model.{array_name(path)}".replace(".", "/")) or range(len(like))
        layers = well_conditioned(rng, (max(order) + 1, *like.shape[1:]))
        rows = [layers[n] if n >= 0 else np.zeros(like.shape[1:]) for n in order]
        return jax.device_put(np.float32(rows), like.sharding)

    return jax.tree_util.tree_map_with_path(draw, model)


def updates_from_equal_gradients(name: str, parallel: dict) -> dict[str, np.ndarray]:
    """Second updates; of SOAP with square matrices, whose gradients have full rank."""
    fields = LATENT if name == "muon of heads" else SQUARE
    config = tiny(fields, {"micro_batch_size": 2}, **parallel)
    config.optim = OPTIMIZERS[name]
    mesh = mesh_of(config)
    optimizer, _, state = tiny_state(config, mesh)
    masters, moments = trained(state.model), state.optimizer
    update, updates, rng = jax.jit(optimizer.update), None, np.random.default_rng(0)
    for step in range(2):
        rates = {"learning_rate": 1.0, "weight_decay": 0.0, "key": jax.random.key(step)}
        updates, moments = update(gradients_of(masters, rng), moments, masters, **rates)
    return named_gradients(updates)


@functools.cache
def on_one_device(name: str) -> dict[str, np.ndarray]:
    return updates_from_equal_gradients(name, {"fsdp": 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2, "expert_tensor": 1, "expert": 2, "fsdp": 2},
        {"fsdp": 4},
        {"data": 2, "context": 2, "fsdp": 1},
        {"pipe": 2, "pad_layers": True, "expert": 2, "fsdp": 1, "zero1": False},
    ],
    ids=str,
)
def test_equal_gradients_give_equal_updates_on_every_mesh(name, parallel):
    """Each device has at least 4 of the 19 layers: on CPUs, XLA rounds differently when it
    multiplies fewer matrices at once, and the iterations of Muon and SOAP amplify that."""
    expected, found = on_one_device(name), updates_from_equal_gradients(name, parallel)
    assert found.keys() == expected.keys()
    for path, update in found.items():
        off = np.abs(update - expected[path]).max()
        assert off <= SAME_GRADIENT * np.abs(expected[path]).max(), path
