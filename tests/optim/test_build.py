"""Groups of parameters, which of them have weight decay, and clipping."""

import re
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxmeg.checkpoint.names import array_name
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config, LoraConfig, OptimConfig, Optimizer
from maxmeg.config.setting import with_fields
from maxmeg.models.lm import language_model
from maxmeg.optim.build import clip, decays, make_optimizer
from maxmeg.parallel.parameter import is_variable, parameter

GOLDEN = Path(__file__).parents[1] / "golden"  # parameters of one architecture per family
# Megatron-LM's rule: no decay where a parameter is a vector (per layer, and per expert) or a bias.
# attention.weight and mlp.weight are the two norms of a parallel block.
VECTORS = ("norm.weight", ".attention.weight", ".mlp.weight", "sinks", "decay_log", "skip", "bias")

RATES = {"learning_rate": 0.1, "weight_decay": 0.5}
TREE = {
    "weight": parameter(jnp.array([[1.0, -2.0]]), "embed", "mlp"),
    "sinks": parameter(jnp.array([3.0]), "heads"),
}


def step(config: OptimConfig, gradient: dict) -> typing.Any:
    optimizer = make_optimizer(config)
    updates, _ = optimizer.update(gradient, optimizer.init(TREE), TREE, **RATES)
    return optax.apply_updates(TREE, updates)


def test_groups_have_rates_and_decays_of_their_own():
    """The first that matches counts; SGD's first update is the gradient."""
    config = OptimConfig(Optimizer.sgd, groups=("w*t:2:0.5", "*:3:7"))
    actual = step(config, jax.tree.map(jnp.ones_like, TREE))
    weight, sinks = TREE["weight"][...], TREE["sinks"][...]
    expected = weight - 2 * 0.1 * (1 + 0.5 * 0.5 * weight)
    np.testing.assert_allclose(actual["weight"][...], expected, rtol=1e-6)
    np.testing.assert_allclose(actual["sinks"][...], sinks - 3 * 0.1, rtol=1e-6)
    for unused in ("*.bias", "sinks"):  # the second after a group that takes it
        config.groups = ("s*:3:7", f"{unused}:1:1")
        with pytest.raises(ValueError, match=rf"{re.escape(unused)} has no parameters"):
            step(config, TREE)


@pytest.mark.parametrize("pattern", ["layers.0.1.mlp.up", "stack.*.mlp.up"])
def test_groups_match_names_as_log_parameters_prints_them(pattern):
    mixers = {"mixers": {"mlp": {"up": TREE["weight"]}}}
    tree = {"stack": {"groups": [{"sublayers": [{}, mixers]}]}, "weight": TREE["weight"]}
    optimizer = make_optimizer(OptimConfig(Optimizer.sgd, groups=(f"{pattern}:0:1",)))
    updates, _ = optimizer.update(tree, optimizer.init(tree), tree, **RATES)
    inside, outside = jax.tree.leaves(updates)
    assert not inside.any() and outside.all()


def parameters():
    """(name, variable) of every parameter of all families, and of what none of them has."""
    for file in sorted(GOLDEN.glob("*.txt")):
        for line in file.read_text().splitlines():
            name, _, axes = line.split()
            yield name, parameter(None, *axes.split(","))
    model = with_fields(
        ModelConfig(),
        {
            "vocab_size": 8,
            "mtp.num_layers": 1,
            "layers": "*(attention,moe)",
            "moe.num_experts": 2,
            "moe.latent_size": 8,
        },
    )
    config = Config(model=model, lora=LoraConfig(rank=2))
    abstract = jax.eval_shape(lambda key: language_model(key, config), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(abstract, is_leaf=is_variable)
    yield from ((array_name(path), variable) for path, variable in leaves)


def test_matrices_are_decayed_and_vectors_are_not():
    is_decayed = {name: decays(variable) for name, variable in parameters()}
    assert is_decayed == {name: not name.endswith(VECTORS) for name in is_decayed}


@pytest.mark.parametrize(("limit", "factor"), [(0.0, 1.0), (10.0, 1.0), (1.0, 1 / (5 + 1e-6))])
def test_clip_scales_to_the_limit(limit, factor):
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    clipped, norm = clip(gradients, limit)
    assert float(norm) == 5.0
    np.testing.assert_allclose(clipped["a"], 3 * factor, rtol=1e-6)
