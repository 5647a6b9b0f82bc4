"""The optimizer against formulas in NumPy, and who is decayed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxmeg.config.model import ModelConfig, Norm, QkNorm
from maxmeg.config.schema import OptimConfig, Optimizer
from maxmeg.models.lm import LM
from maxmeg.optim.build import NO_DECAY, clip, make_optimizer
from maxmeg.state import array_name

RATES = {"learning_rate": 0.1, "weight_decay": 0.5}
TREE = {"weight": jnp.array([1.0, -2.0]), "norm": {"weight": jnp.array([3.0])}}


def steps(config: OptimConfig, gradients: list[dict]) -> dict:
    optimizer = make_optimizer(config)
    tree, state = TREE, optimizer.init(TREE)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, tree, **RATES)
        tree = optax.apply_updates(tree, updates)
    return tree


@pytest.mark.parametrize("optimizer", Optimizer)
def test_updates_are_the_formula(optimizer):
    config = OptimConfig(optimizer=optimizer, beta1=0.8, beta2=0.9, eps=1e-3, momentum=0.7)
    rng = np.random.default_rng(0)
    gradients = [
        {"weight": rng.normal(size=2), "norm": {"weight": rng.normal(size=1)}} for _ in range(3)
    ]
    found = steps(config, jax.tree.map(jnp.asarray, gradients))
    for read, decay in ((lambda t: t["weight"], 0.5), (lambda t: t["norm"]["weight"], 0.0)):
        p, m, v = np.asarray(read(TREE)), 0.0, 0.0
        for t, tree in enumerate(gradients, start=1):
            g = read(tree)
            if optimizer is Optimizer.adamw:
                m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
                u = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
            else:
                u = m = 0.7 * m + g
            p = p - 0.1 * (u + decay * p)
        np.testing.assert_allclose(read(found), p, rtol=1e-5)


def test_norms_and_biases_alone_are_not_decayed():
    config = ModelConfig(
        vocab_size=8, norm=Norm.layernorm, bias_qkv=True, bias_mlp=True, qk_norm=QkNorm.head
    )
    model = jax.eval_shape(lambda key: LM(key, config), jax.random.key(0))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    kept = {array_name(p) for p in paths if NO_DECAY.search(jax.tree_util.keystr(p))}
    assert kept == {
        name for name in map(array_name, paths) if "norm" in name or name.endswith(".bias")
    }
    assert {"embedding.table", "output.table"} <= set(map(array_name, paths)) - kept


@pytest.mark.parametrize(("limit", "factor"), [(0.0, 1.0), (10.0, 1.0), (1.0, 1 / (5 + 1e-6))])
def test_clip_scales_to_the_limit(limit, factor):
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    clipped, norm = clip(gradients, limit)
    assert float(norm) == 5.0
    np.testing.assert_allclose(clipped["a"], 3 * factor, rtol=1e-6)
