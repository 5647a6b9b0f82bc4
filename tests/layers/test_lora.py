"""Adapters by themselves: formula, what is frozen, targets, merging, dropout."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import merged

from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.schema import Config, LoraConfig
from maxmeg.config.setting import with_fields
from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.layers.lora import Lora, initial, linears, targeted
from maxmeg.models.lm import LM, language_model
from maxmeg.parallel.trainable import frozen, joined, trained

TOLERANCE = 2e-6  # of the largest value, float32
LOGITS = 1e-5  # of the largest logit: merged weights add up in another order
B, L, D, F, R = 2, 3, 8, 12, 3
MODEL: dict[str, typing.Any] = {
    "vocab_size": 61,
    "num_layers": 3,
    "hidden_size": 32,
    "attention.num_heads": 2,
    "max_position": 8,
}
PATHS = [
    "stack.groups.0.sublayers.0.mixers.attention.key",
    "stack.groups.0.sublayers.0.mixers.attention.query",
    "stack.groups.0.sublayers.1.mixers.mlp.up",
    "stack.groups.0.sublayers.3.mixers.mlp.up",
]


def config(**lora) -> Config:
    return Config(
        model=with_fields(ModelConfig(), {**MODEL, "dtype": DType.float32}), lora=LoraConfig(**lora)
    )


def made(settings: Config) -> LM:
    return jax.jit(lambda key: language_model(key, settings))(jax.random.key(0))


@pytest.mark.parametrize("axes", [("embed", "heads"), ("mlp", "embed")])
def test_a_projection_with_an_adapter_is_its_formula(axes):
    rng = np.random.default_rng(0)
    x, a, b = (jnp.float32(rng.normal(size=s)) for s in ((B, L, D), (D, R), (R, F)))
    linear = Linear(jax.random.key(0), (D, F), axes, std=0.5, bias=True)
    plain = np.asarray(linear(x), np.float64)
    linear.lora = Lora(a, b, axes, LoraConfig(R, 12.0, 0.5, ()), 0)
    expected = plain + 12.0 / R * (np.asarray(x, np.float64) @ a @ b)
    assert np.abs(linear(x) - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_dropout_depends_only_on_the_place_and_is_scaled():
    spec = LoraConfig(1, 1.0, 0.25, ())
    lora = Lora(jnp.ones((4096, 1)), jnp.ones((1, 1)), ("embed", "mlp"), spec, 0)
    training = {"dropout_key": jax.random.key(0), "layer": 1, "training": True}
    ctx = Context(jnp.zeros((B, L), int), rows_B=jnp.arange(B), **training)
    x = jnp.ones((B, L, 4096))
    kept = jax.jit(lambda lora, x, ctx: (lora.dropout_mask(x, ctx), lora(x, ctx)))
    whole, sums = map(np.asarray, kept(lora, x, ctx))
    means = sums / 4096
    assert np.abs(means - 1).max() < 0.05 and len(np.unique(means)) > 1
    alone = Context(jnp.zeros((1, L), int), rows_B=jnp.arange(1, 2), **training)
    np.testing.assert_array_equal(whole[1:], kept(lora, x[1:], alone)[0])
    other = Lora(jnp.ones((4096, 1)), jnp.ones((1, 1)), ("embed", "mlp"), spec, 1)
    assert (whole != kept(other, x, ctx)[0]).any()
    assert (lora(x, Context(jnp.zeros((B, L), int))) == 4096).all()


def test_base_is_frozen_in_the_compute_dtype_and_starts_as_without_adapters():
    settings = config(rank=R, targets=("attention.*",))
    settings.model.dtype = DType.bfloat16
    key = jax.random.key(0)
    model, plain = made(settings), jax.jit(lambda key: LM(key, settings.model))(key)
    own, rest = trained(model), frozen(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(own)} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(rest)} == {jnp.dtype("bfloat16")}
    assert len(jax.tree.leaves(own)) == 2 * 4
    for ours, theirs in zip(jax.tree.leaves(rest), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(ours, np.asarray(theirs).astype(jnp.bfloat16))
    for ours, whole in zip(jax.tree.leaves(joined(own, rest)), jax.tree.leaves(model), strict=True):
        assert ours is whole
    for linear in linears(model).values():
        if linear.lora is not None:
            a, b = (np.asarray(v.get_value()) for v in (linear.lora.a, linear.lora.b))
            assert not b.any() and len({layer.tobytes() for layer in a}) == len(a)


def test_what_an_adapter_starts_with_depends_on_the_layers_number():
    """The initial values of a layer do not depend on where a pipeline stores it, or on padding."""
    a, places = (
        np.asarray(initial(jax.random.key(0), np.array(order), (D, R)))
        for order in ([0, 1, 2], [2, -1, 0, 1])
    )
    np.testing.assert_array_equal(places, [a[2], 0 * a[0], a[0], a[1]])
    assert a.all() and np.abs(a).max() <= D**-0.5


def test_merged_model_computes_the_same_without_adapters():
    """With random B, so small that attention is not saturated, which amplifies rounding."""
    model, rng = made(config(rank=R, targets=("*",))), np.random.default_rng(0)
    base = jax.jit(lambda key: LM(key, config().model))(jax.random.key(0))
    for linear in linears(model).values():
        if linear.lora is not None:
            b = jnp.float32(0.1 * rng.normal(size=linear.lora.b.shape))
            linear.lora.b = linear.lora.b.replace(b)
    plain = jax.jit(merged)(model)
    for ours, theirs in zip(jax.tree.leaves(plain), jax.tree.leaves(base), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert not jax.tree.leaves(frozen(plain))
    ids_BL = jnp.arange(2 * 8).reshape(2, 8)
    run = jax.jit(lambda model: model(ids_BL))
    expected, found, without = (np.asarray(run(each)) for each in (model, plain, base))
    assert np.abs(found - expected).max() <= LOGITS * np.abs(expected).max()
    assert np.abs(without - expected).max() > 0.01


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("query",), [1]),
        (("mixers.attention.*",), [0, 1]),
        (("mlp.up", "key"), [0, 2, 3]),
        (("sublayers.3.*",), [3]),
        (("*",), [0, 1, 2, 3]),
        ((PATHS[0],), [0]),
    ],
)
def test_targets_are_patterns_of_paths_and_their_endings(targets, found):
    assert targeted(PATHS, targets) == {PATHS[i] for i in found}


@pytest.mark.parametrize(
    ("target", "near"), [("qeury", "query"), ("attn.query", "attention.query"), ("zzz", "key, que")]
)
def test_a_target_that_matches_nothing_lists_what_is_near(target, near):
    with pytest.raises(ValueError, match=f"lora.targets: '{target}' matches no .*{near}"):
        targeted(PATHS, ("key", target))
