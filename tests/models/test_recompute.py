"""Recomputation: what backward stores, what the compiled program computes again, same gradients."""

import ast
import functools
import pathlib

import cached
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_layers import drawn
from tables import thinned

from maxmeg.config.mixers import Activation, QkNorm
from maxmeg.config.model import ModelConfig, Norm
from maxmeg.config.recompute import NAMES, POLICIES
from maxmeg.config.schema import Config
from maxmeg.config.setting import set_field, with_fields
from maxmeg.layers.context import Context
from maxmeg.layers.recurrent import STORED
from maxmeg.models.lm import LM
from maxmeg.objectives.language_modelling import LANGUAGE_MODELLING
from maxmeg.parallel.batch import Batch
from maxmeg.planning import hlo
from maxmeg.step import local_gradients

ROOT = pathlib.Path(__file__).parents[2]
B, L, D, LAYERS = 2, 1024, 64, 3
TOLERANCE = 2e-6  # of the largest value, float32
KINDS = {
    "gpt": {"mlp.activation": Activation.gelu_tanh, "norm": Norm.layernorm, "mlp.bias": True},
    "llama": {"attention.num_kv_heads": 2, "attention.qk_norm": QkNorm.head},
}
LATENT = {
    "layers": "*(mla,mlp)",
    "mla.kv_rank": 8,
    "mla.query_rank": 12,
    "mla.rotary_size": 4,
    "mla.value_size": 10,
}


def run(kind: str, recompute: str, scan_layers: bool = True):
    """(config, abstract stack, function of (stack, x))."""
    config = with_fields(
        ModelConfig(),
        {"vocab_size": 64, "num_layers": LAYERS, "hidden_size": D, "attention.num_heads": 4},
    )
    config.recompute, config.scan_layers = recompute, scan_layers
    for name, value in (KINDS | {"latent": LATENT})[kind].items():
        set_field(config, name, value)
    stack = jax.eval_shape(lambda key: LM(key, config).stack, jax.random.key(0))

    def function(stack, x_BLD):
        positions_BL = jnp.broadcast_to(jnp.arange(x_BLD.shape[1]), x_BLD.shape[:2])
        return stack(x_BLD, Context(positions_BL))[0]

    return config, stack, function


@functools.cache
def kept(kind: str, recompute: str, L: int = L) -> tuple[float, float]:
    """Elements kept for backward and those that a matrix product reads, in units of B x L x D."""
    config, stack, function = run(kind, recompute)
    x_BLD = jax.ShapeDtypeStruct((B, L, D), jnp.float32)
    pull = jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], stack, x_BLD)
    parameters = sum(a.size for a in jax.tree.leaves(stack))
    total = sum(a.size for a in jax.tree.leaves(pull) if a.ndim > 2 and a.shape[:3] != (B, L, 1))
    width = D + D + 2 * config.kv_heads * config.head_size + D + (1 + config.gated) * config.ffn
    return (total - parameters) / (B * L * D), LAYERS * width / D


@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_only_results_of_matrix_products_are_kept(kind):
    full, _ = kept(kind, "full")
    minimal, needed = kept(kind, "minimal")
    assert full <= 1.05 * LAYERS
    assert minimal <= 1.05 * needed


def test_attention_of_short_sequences_and_named_activations_are_kept():
    """Attention's weights, B x heads x L x L a layer, and output, unless selective; queries of
    width D and the MLP's columns beside each layer's input; a policy and a name."""
    minimal, selective, full = (kept("llama", mode, L=256)[0] for mode in POLICIES)
    assert minimal - selective == pytest.approx(LAYERS * (4 * 256 / D + 1), rel=0.01)
    assert selective > 2 * full
    named, both = (
        kept("llama", recompute, L=256)[0]
        for recompute in ("query,mlp_up", "selective,attention_weights")
    )
    assert named - full == pytest.approx(LAYERS * (1 + ModelConfig(hidden_size=D).ffn / D))
    assert both - selective == pytest.approx(LAYERS * 4 * 256 / D)


def test_what_is_made_of_latents_is_kept_unless_selective():
    """Queries, keys and values of 4 heads, of 16 + 4, 16 and 10; latents in any mode but full."""
    minimal, selective, full = (kept("latent", mode)[0] for mode in POLICIES)
    assert minimal - selective == pytest.approx(LAYERS * 4 * (20 + 16 + 10) / D, rel=1e-3)
    ffn = 2 * ModelConfig(hidden_size=D).ffn
    assert selective - full == pytest.approx(LAYERS * (12 + 8 + 4 + D + ffn) / D, rel=0.02)


def test_every_name_is_an_activation_of_some_layer():
    """The second arguments of all calls of `stored` are config.recompute's names."""
    paths = [*ROOT.glob("maxmeg/**/*.py"), *ROOT.glob("kernels/*.py")]
    sources = [text for path in paths if "stored(" in (text := path.read_text())]
    calls = (
        node
        for text in sources
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("stored")
    )
    names = {arg.value for call in calls for arg in call.args[1:2] if isinstance(arg, ast.Constant)}
    assert names | set(STORED.values()) == set(NAMES)


PRODUCTS = 8  # matrix products of a layer's forward, two of them attention's


@functools.cache
def gradient_program(recompute: str, **more: int):
    """(number of matrix products of the compiled gradient of the loss, the gradients)."""
    sizes = {"vocab_size": 64, "hidden_size": D, "attention.num_heads": 4}
    config = with_fields(ModelConfig(), sizes | KINDS["gpt"] | more)
    config.recompute = recompute
    rng, shape = np.random.default_rng(0), (1, B, 32)
    batch = Batch(
        tokens=rng.integers(0, 64, shape),
        targets=rng.integers(0, 64, shape),
        positions=np.broadcast_to(np.arange(32), shape),
        loss_mask=np.ones(shape),
        rows=np.arange(B)[None],
        divisors=np.full((1, 1 + config.mtp.num_layers), 64.0),
        microbatch_weight=np.ones(1),
    )

    @jax.jit
    def gradients(model, batch):
        return local_gradients(model, batch, None, Config(model=config), LANGUAGE_MODELLING)[0]

    model = LM(jax.random.key(0), config)
    compiled = gradients.lower(model, jax.tree.map(jnp.asarray, batch)).compile()
    instructions = hlo.parse(compiled.as_text()).instructions()
    products = sum(runs for _, instruction, runs in instructions if instruction.opcode == "dot")
    return products, jax.tree.leaves(compiled(model, jax.tree.map(jnp.asarray, batch)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "layers", "again"),
    [
        ("selective", {"num_layers": 1}, 2),  # attention's two products
        ("full", {"num_layers": 1}, PRODUCTS - 1),  # all but the last
        ("full", {"num_layers": 5, "scan_unroll": 2}, 5 * (PRODUCTS - 1)),  # and one after the loop
    ],
)
def test_the_compiled_program_recomputes_and_gradients_are_the_same(recompute, layers, again):
    stored, expected = gradient_program("minimal", **layers)
    products, gradients = gradient_program(recompute, **layers)
    assert products - stored == again
    for a, b in zip(expected, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * np.abs(np.asarray(a)).max())


@pytest.mark.slow
def test_a_cache_is_the_same_with_and_without_the_loop():
    x_BLD = jax.random.normal(jax.random.key(1), (B, 8, D))
    size = cached.size_of(B, 8)
    ctx = cached.context(size, 0, 8)
    actual = []
    for scan_layers in (True, False):
        config, _, _ = run("llama", "minimal", scan_layers)
        stack = drawn(lambda key, config=config: LM(key, config).stack, 0.1)
        out = jax.jit(lambda s, x: s(x, ctx, s.init_cache(size))[:2])
        actual.append(out(stack, x_BLD))
    for a, b in zip(*map(jax.tree.leaves, actual), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_without_the_loop_backward_reads_no_stack_of_activations():
    """A loop's backward takes each layer's part out of arrays [LAYERS, ...]."""
    x_BLD = jax.ShapeDtypeStruct((B, 32, D), jnp.float32)
    for scan_layers in (True, False):
        _, stack, function = run("llama", "minimal", scan_layers)
        pull = jax.eval_shape(lambda *a, f=function: jax.vjp(f, *a)[1], stack, x_BLD)
        parameters = {a.shape for a in jax.tree.leaves(stack)}
        stacked = [a for a in jax.tree.leaves(pull) if a.shape[:2] == (LAYERS, B)]
        assert bool([a for a in stacked if a.shape not in parameters]) == scan_layers
