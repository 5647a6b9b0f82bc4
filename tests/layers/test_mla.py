"""Multi-latent attention is its definition, and the same on meshes. (Decoding: test_mixers.py.)"""

import dataclasses

import cached
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_layers import check_equal, drawn, on_mesh, with_gradients

from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import ModelConfig, Position
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, LoraConfig
from maxmeg.config.setting import with_fields
from maxmeg.config.validate import validate
from maxmeg.layers.context import Context
from maxmeg.layers.lora import Lora, linears
from maxmeg.layers.mla import Mla, MlaSpec
from maxmeg.layers.mlp import MlpSpec
from maxmeg.layers.norm import NormSpec
from maxmeg.layers.residual import Residual, ResidualSpec
from maxmeg.ops.rope import RotarySpec
from maxmeg.parallel import collectives
from maxmeg.parallel.parameter import info

B, L, D, H, K, N, V, R = 2, 8, 16, 4, 6, 4, 5, 8
PLAIN = MlaSpec(
    *(D, H, H, K, RotarySpec(interleaved=True)),
    query_rank=12, kv_rank=R, rotary_size=N, value_size=V,
)  # fmt: skip
SPECS = {
    "deepseek-v3": PLAIN,
    "deepseek-v2-lite": dataclasses.replace(PLAIN, query_rank=0, rotary=RotarySpec(100.0)),
    "options": dataclasses.replace(
        PLAIN, bias_qkv=True, bias_out=True, window=5, softcap=2.0, scale=0.4, sinks=True,
        norm=NormSpec(eps=0.1),
    ),
    "without positions": dataclasses.replace(PLAIN, rotary=None, value_size=7),
}  # fmt: skip


def model(spec: MlaSpec | ResidualSpec, adapters: LoraConfig | None = None):
    """Random weights, also of what starts as zeros; adapters beside every projection."""

    def make(key):
        layer = (Mla if isinstance(spec, MlaSpec) else Residual)(key, spec)
        for at, linear in enumerate(linears(layer).values() if adapters is not None else ()):
            (width_in, width_out), axes = linear.weight.shape, info(linear.weight).axes
            a, b = jnp.zeros((width_in, 3)), jnp.zeros((3, width_out))
            linear.lora = Lora(a, b, axes, adapters, at)
        return layer

    return drawn(make, 0.4)


def inputs() -> tuple[jax.Array, jax.Array]:
    """Vectors, and what their outputs weigh in the loss."""
    rng = np.random.default_rng(2)
    x_BLD, slope_BLD = (jnp.float32(rng.normal(size=(B, L, D))) for _ in range(2))
    return x_BLD, slope_BLD


def turned(x, rotary: RotarySpec | None):
    """x [B, L, ..., N] rotated as complex numbers, pairs or halves being their parts."""
    if rotary is None:
        return x
    angle = jnp.arange(L)[:, None] * rotary.base ** (-jnp.arange(0, N, 2) / N)
    angle = angle.reshape(1, L, *(1,) * (x.ndim - 3), -1)
    parts = (x[..., ::2], x[..., 1::2]) if rotary.interleaved else jnp.split(x, 2, axis=-1)
    both = jax.lax.complex(*parts) * jnp.exp(1j * angle)
    return jnp.concatenate((both.real, both.imag), axis=-1)


def defined(layer: Mla, x):
    """The layer by its definition: every head's queries, keys, values, scores."""
    spec = layer.spec

    def project(linear, x):
        y = x @ linear.weight[...]
        return y if linear.bias is None else y + linear.bias[...]

    def normed(norm, x):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + spec.norm.eps) * norm.weight[...]

    if spec.query_rank:
        q = project(layer.query_up, normed(layer.query_norm, project(layer.query_down, x)))
    else:
        q = project(layer.query, x)
    low, k = jnp.split(project(layer.kv_down, x), [R], axis=-1)
    low, k = normed(layer.kv_norm, low), turned(k, spec.rotary)
    q = q.reshape(B, L, H, K + N)
    scores = jnp.einsum(
        "blhk,bmhk->bhlm", q[..., :K], project(layer.key_up, low).reshape(B, L, H, K)
    )
    scores += jnp.einsum("blhn,bmn->bhlm", turned(q[..., K:], spec.rotary), k)
    scores *= spec.scale or (K + N) ** -0.5
    scores = spec.softcap * jnp.tanh(scores / spec.softcap) if spec.softcap else scores
    ago = jnp.arange(L)[:, None] - jnp.arange(L)
    scores = jnp.where((ago >= 0) & (ago < (spec.window or L)), scores, -jnp.inf)
    if layer.sinks is not None:
        sinks = jnp.broadcast_to(layer.sinks[...][:, None, None], (B, H, L, 1))
        scores = jnp.concatenate((scores, sinks), axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :L]
    v = project(layer.value_up, low).reshape(B, L, H, -1)
    return project(layer.out, jnp.einsum("bhlm,bmhv->blhv", weights, v).reshape(B, L, -1))


def found_on(layer: Mla | Residual, dropped: bool = False, **sizes):
    """Output and gradients on a mesh, the sequence sharded over tensor."""
    positions_BL = jnp.broadcast_to(jnp.arange(L), (B, L))

    def output(layer, x_BLD):
        count = len(x_BLD)
        rows_B = collectives.axis_index(("fsdp",)) * count + jnp.arange(count)
        training = {"dropout_key": jax.random.key(3), "training": dropped}
        ctx = Context(positions_BL[:count], rows_B=rows_B, **training)
        if isinstance(layer, Mla):
            return collectives.scatter_sequence(layer(x_BLD, ctx)[0])
        return layer({"target": x_BLD}, ctx)[0]["target"]

    return on_mesh(output, layer, sizes)(layer, *inputs())


@pytest.mark.parametrize("name", SPECS)
def test_output_and_gradients_are_those_of_the_definition(name):
    layer = model(SPECS[name])
    expected = jax.jit(lambda *given: with_gradients(defined, *given))(layer, *inputs())
    check_equal(found_on(layer), expected)


@pytest.mark.slow
def test_a_mesh_equals_one_device_with_every_dropout():
    """Beside an MLP, which reads the whole sequence; adapters drop parts of sequences too."""
    spec = dataclasses.replace(SPECS["options"], dropout=0.3)
    block = ResidualSpec(NormSpec(), (spec, MlpSpec(D, 12)), dropout=0.2, own_norms=True)
    layer = model(block, LoraConfig(3, 2.0, 0.4, ()))
    alone = found_on(layer, dropped=True)
    check_equal(found_on(layer, dropped=True, fsdp=2, tensor=2), alone)
    ctx = Context(jnp.broadcast_to(jnp.arange(L), (B, L)))
    without = jax.jit(lambda layer, x_BLD: layer({"target": x_BLD}, ctx)[0])(layer, inputs()[0])
    assert float(jnp.abs(alone[0] - without["target"]).max()) > 0.01


def test_a_value_of_the_cache_is_not_copied():
    """In the program of a step nothing as long as the cache is made but the cache itself."""
    layer, length = model(PLAIN), 640
    size = cached.size_of(B, length)
    cache = cached.empty(layer, size)
    assert sum(array.size for array in cache) == size.pages * size.slots * (R + N)

    def run(layer, x_BLD, cache, starts_B):
        return layer(x_BLD, cached.context(size, starts_B, 1), cache)[:2]

    traced = jax.make_jaxpr(run)(layer, jnp.zeros((B, 1, D)), cache, 7)
    made = [v.aval.shape for eqn in traced.jaxpr.eqns for v in eqn.outvars]
    long = {shape for shape in made if np.prod(shape) >= B * length * R}
    assert long and all(np.prod(shape) == B * length * (R + N) for shape in long)


SETTINGS = {
    "attention.num_heads": 4,
    "hidden_size": 32,
    "vocab_size": 64,
    "layers": "*(mla,mlp)",
    "mla.kv_rank": 8,
    "mla.rotary_size": 4,
}


def test_settings_reach_the_layer():
    def spec(**changes) -> MlaSpec:
        return MlaSpec.of(with_fields(ModelConfig(), SETTINGS | changes), ParallelConfig())

    plain = spec()
    sizes = (plain.query_rank, plain.kv_rank, plain.rotary_size, plain.head_dim, plain.value_size)
    assert sizes == (0, 8, 4, 8, 8) and plain.norm.eps == 1e-5
    other = spec(
        **{"attention.head_dim": 6, "mla.query_rank": 10, "mla.value_size": 5, "mla.norm_eps": 1e-6}
    )
    assert (other.head_dim, other.query_rank, other.value_size) == (6, 10, 5)
    assert other.norm.eps == 1e-6 and spec(position=Position.none).rotary is None


@pytest.mark.parametrize(
    ("fields", "devices", "message"),
    [
        ({"layers": "*(attention,mlp)"}, 1, r"mla.kv_rank=8, model.mla.rotary_size=4: no layer"),
        ({"mla.kv_rank": 0}, 1, "mla.kv_rank=0 must be at least 1"),
        ({"mla.rotary_size": 3}, 1, "mla.rotary_size=3 must be even"),
        ({"attention.num_kv_heads": 2}, 1, "num_kv_heads=2 does not apply to multi-latent"),
        ({"attention.qk_norm": QkNorm.l2}, 1, "qk_norm=l2 does not apply to multi-latent"),
        ({"rotary.fraction": 0.5}, 1, "rotary.fraction=0.5 does not apply"),
        ({"mla.query_rank": 6}, 4, "mla.query_rank=6 is not divisible by parallel.fsdp=4"),
        ({"mla.kv_rank": 10}, 4, "mla.kv_rank=10 is not divisible by parallel.fsdp=4"),
        ({"mla.value_size": -1}, 1, "mla.value_size=-1 must be at least 0"),
    ],
)
def test_invalid_arguments_are_refused(fields, devices, message):
    config = Config(model=with_fields(ModelConfig(), SETTINGS | fields))
    config.train.global_batch_size = 4
    with pytest.raises(ValueError, match=message):
        validate(config, devices)
