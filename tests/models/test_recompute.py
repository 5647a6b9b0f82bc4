"""What a layer keeps for backward, and that gradients do not depend on it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.config.model import Activation, ModelConfig, Norm, QkNorm, Recompute
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM

B, L, D, LAYERS = 2, 1024, 64, 3
TOLERANCE = 2e-6  # of the largest value, float32
UNROLLED = ((Recompute.none, False), (Recompute.full, False))  # recompute, scan_layers
KINDS = {
    "gpt": {"activation": Activation.gelu_tanh, "norm": Norm.layernorm, "bias_mlp": True},
    "llama": {"num_kv_heads": 2, "qk_norm": QkNorm.head},
}
LATENT = {"mla_kv_rank": 8, "mla_query_rank": 12, "mla_rotary_size": 4, "mla_value_size": 10}


def run(kind: str, recompute: str, scan_layers: bool = True):
    """(config, stack, function of (stack, x))."""
    config = ModelConfig(vocab_size=64, num_layers=LAYERS, hidden_size=D, num_heads=4)
    config.recompute, config.scan_layers = Recompute(recompute), scan_layers
    for name, value in (KINDS | {"latent": LATENT})[kind].items():
        setattr(config, name, value)
    stack = LM(jax.random.key(0), config).stack

    def function(stack, x_BLD):
        positions_BL = jnp.broadcast_to(jnp.arange(x_BLD.shape[1]), x_BLD.shape[:2])
        return stack(x_BLD, Context(positions_BL))[0]

    return config, stack, function


def kept(kind: str, recompute: str, L: int = L) -> tuple[float, float]:
    """Elements kept for backward and those that a matrix product reads, in units of B x L x D."""
    config, stack, function = run(kind, recompute)
    x_BLD = jax.ShapeDtypeStruct((B, L, D), jnp.float32)
    pull = jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], stack, x_BLD)
    parameters = sum(a.size for a in jax.tree.leaves(stack))
    total = sum(a.size for a in jax.tree.leaves(pull) if a.ndim > 2 and a.shape[:3] != (B, L, 1))
    width = D + D + 2 * config.kv_heads * config.head_size + D + (1 + config.gated) * config.ffn
    return (total - parameters) / (B * L * D), LAYERS * width / D


@pytest.mark.parametrize("kind", KINDS)
def test_only_results_of_matrix_products_are_kept(kind):
    full, _ = kept(kind, "full")
    none, needed = kept(kind, "none")
    assert full <= 1.05 * LAYERS
    assert none <= 1.05 * needed


def test_attention_of_short_sequences_is_kept_unless_selective():
    """Its weights, B x heads x L x L a layer, and its output."""
    none, selective, full = (kept("llama", mode.value, L=256)[0] for mode in Recompute)
    assert none - selective == pytest.approx(LAYERS * (4 * 256 / D + 1), rel=0.01)
    assert selective > 2 * full


def test_what_is_made_of_latents_is_kept_unless_selective():
    """Queries, keys and values of 4 heads, of 16 + 4, 16 and 10; latents in any mode but full."""
    none, selective, full = (kept("latent", mode.value)[0] for mode in Recompute)
    assert none - selective == pytest.approx(LAYERS * 4 * (20 + 16 + 10) / D, rel=1e-3)
    ffn = 2 * ModelConfig(hidden_size=D).ffn
    assert selective - full == pytest.approx(LAYERS * (12 + 8 + 4 + D + ffn) / D, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_depend_neither_on_recomputation_nor_on_the_loop(kind):
    x_BLD = jax.random.normal(jax.random.key(1), (B, 32, D))
    found = []
    for recompute, scan_layers in (*itertools.product(Recompute, [True]), *UNROLLED):
        _, stack, function = run(kind, recompute.value, scan_layers)
        gradient = jax.jit(jax.grad(lambda s, x, f=function: jnp.sum(jnp.sin(f(s, x))), (0, 1)))
        found.append(jax.tree.leaves(gradient(stack, x_BLD)))
    for others in found[1:]:
        for a, b in zip(found[0], others, strict=True):
            scale = np.abs(np.asarray(a)).max()
            assert np.abs(np.asarray(a) - np.asarray(b)).max() <= TOLERANCE * scale


def test_a_cache_is_the_same_with_and_without_the_loop():
    x_BLD = jax.random.normal(jax.random.key(1), (B, 8, D))
    ctx = Context(jnp.broadcast_to(jnp.arange(8), (B, 8)), cache_offset=jnp.int32(0))
    found = []
    for scan_layers in (True, False):
        _, stack, _ = run("llama", "none", scan_layers)
        out = jax.jit(lambda s, x: s(x, ctx, s.init_cache(B, 12))[:2])
        found.append(out(stack, x_BLD))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_without_the_loop_backward_reads_no_stack_of_activations():
    """A loop's backward takes each layer's part out of arrays [LAYERS, ...]."""
    x_BLD = jax.ShapeDtypeStruct((B, 32, D), jnp.float32)
    for scan_layers in (True, False):
        _, stack, function = run("llama", "none", scan_layers)
        pull = jax.eval_shape(lambda *a, f=function: jax.vjp(f, *a)[1], stack, x_BLD)
        parameters = {a.shape for a in jax.tree.leaves(stack)}
        stacked = [a for a in jax.tree.leaves(pull) if a.shape[:2] == (LAYERS, B)]
        assert bool([a for a in stacked if a.shape not in parameters]) == scan_layers
