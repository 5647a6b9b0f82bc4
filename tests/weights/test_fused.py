"""Weights of projections of one input as one: which are, and that nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxmeg.layers.attention import Attention, AttentionSpec
from maxmeg.layers.linear import Linear, project
from maxmeg.parallel.mesh import AXES, make_mesh
from maxmeg.parallel.parameter import annotate, info, is_variable, replaced
from maxmeg.parallel.rules import storage_specs, zero1_cut
from maxmeg.parallel.spmd import spmd
from maxmeg.weights.fused import Fuse

TOLERANCE = 1e-6  # of the largest value, float32: sums in another order
D, K, H, G = 16, 4, 8, 2


def mesh_of(**sizes: int):
    sizes = dict.fromkeys(AXES, 1) | sizes
    return make_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])


def attention(width: int = D, bias: bool = False) -> Attention:
    spec = AttentionSpec(width, H, G, K, bias_qkv=bias)
    layer = Attention(jax.random.key(0), spec)
    for seed, linear in enumerate((layer.query, layer.key, layer.value)):
        if bias:
            linear.bias[...] = jax.random.normal(jax.random.key(seed), linear.bias.shape)
    return layer


def with_cuts(layer: Attention, mesh) -> Attention:
    """The layer as a part of a stack, whose weights know how ZeRO-1 shards them."""
    return jax.tree.map(
        lambda weight: replaced(weight, weight[...], cut=zero1_cut(weight, mesh)),
        layer,
        is_leaf=is_variable,
    )


@pytest.mark.parametrize(
    "sizes", [{}, {"fsdp": 2}, {"tensor": 2}, {"fsdp": 2, "tensor": 4}], ids=str
)
def test_projections_are_fused_on_each_device_and_separate_is_the_inverse(sizes):
    """With more devices along tensor than heads of keys, each has all keys before `KvSlice`."""
    layer, mesh, tensor = attention(), mesh_of(**sizes), sizes.get("tensor", 1)
    widths = H * K // tensor, *[G * K // tensor if tensor <= G else G * K] * 2
    specs = storage_specs(layer, mesh, False)
    fuse = Fuse(mesh, specs)

    def local(layer):
        model = fuse.enter(layer)
        assert info(model.query.weight).fused_widths == widths
        assert info(model.query.weight).sizes == (D, (H + 2 * G) * K)
        assert model.key.weight.get_value() is None and model.value.weight.get_value() is None
        return fuse.leave(model)

    found = jax.jit(spmd(local, mesh, (specs,), specs))(layer)
    assert jax.tree.structure(found) == jax.tree.structure(layer)
    jax.tree.map(np.testing.assert_array_equal, found, layer)


def test_weights_that_differ_stay_separate():
    """In what is trained, in the dimension that fsdp or ZeRO-1 shards, in the gradients' dtype; or
    if one alone is quantized."""
    mesh, cases = mesh_of(fsdp=2, data=2), {}
    cases["alike"] = attention()
    cases["last dimension"] = attention(width=3)
    cases["frozen"] = attention()
    annotate(cases["frozen"].key.weight, frozen=True)
    cases["dtype"] = attention()
    annotate(cases["dtype"].value, gradient_dtype=jnp.dtype(jnp.bfloat16))
    for name, layer in cases.items():
        model = Fuse(mesh, None).enter(with_cuts(layer, mesh))
        assert bool(info(model.query.weight).fused_widths) == (name == "alike"), name
    for multiple, is_fused in ((G * K, True), (H * K, False)):  # whether both are quantized
        model = Fuse(mesh, None, multiple).enter(with_cuts(attention(), mesh))
        assert bool(info(model.query.weight).fused_widths) is is_fused
    mesh = mesh_of(data=8)  # ZeRO-1 cuts the rows; 12 of them have no eighth, but columns have
    for width, is_fused in ((D, True), (12, False)):
        layer = attention(width)
        model = Fuse(mesh, None).enter(with_cuts(layer, mesh))
        assert bool(info(model.query.weight).fused_widths) == is_fused


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_gives_the_outputs_and_gradients_of_several(bias):
    layer, mesh = attention(bias=bias), mesh_of()
    x_BLD = jax.random.normal(jax.random.key(1), (2, 3, D))
    slopes = [jax.random.normal(jax.random.key(n), (2, 3, n * K)) for n in (H, G, G)]

    def loss(layer, x_BLD):
        outputs = project((layer.query, layer.key, layer.value), x_BLD)
        return sum(jnp.vdot(y, slope) for y, slope in zip(outputs, slopes, strict=True)), outputs

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, wanted), (weights, into) = run(layer, x_BLD)
    fuse = Fuse(mesh, layer)
    model = fuse.enter(layer)
    jaxpr = str(jax.make_jaxpr(loss)(model, x_BLD))
    assert jaxpr.count("dot_general") == 1 + len(slopes)
    (_, outputs), (gradients, found_into) = run(model, x_BLD)
    found = outputs, fuse.leave(gradients), found_into
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves((wanted, weights, into)), strict=True
    ):
        assert np.abs(one - other).max() <= TOLERANCE * np.abs(other).max()


def test_a_module_without_all_its_projections_is_left_alone():
    class Pair(nnx.Module):
        fused_projections = (("first", "second"),)

        def __init__(self):
            self.first = Linear(jax.random.key(0), (D, K), ("embed", "mlp"), 1.0)
            self.second = None

    pair, mesh = Pair(), mesh_of()
    assert jax.tree.structure(Fuse(mesh, None).enter(pair)) == jax.tree.structure(pair)
