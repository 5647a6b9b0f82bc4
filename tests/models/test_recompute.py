"""Recomputation: what backward stores. (Same gradients: test_random_layouts.py; what the compiled
program computes again: absent/test_compiled_step.py.)"""

import jax
import jax.numpy as jnp
import pytest

from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import ModelConfig
from maxmeg.config.recompute import POLICIES
from maxmeg.config.setting import with_fields
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM

B, D, LAYERS = 2, 64, 3
SIZES = {"vocab_size": 64, "num_layers": LAYERS, "hidden_size": D, "attention.num_heads": 4}
LLAMA = {"attention.num_kv_heads": 2, "attention.qk_norm": QkNorm.head}
LATENT = {
    "layers": "*(mla,mlp)",
    "mla.kv_rank": 8,
    "mla.query_rank": 12,
    "mla.rotary_size": 4,
    "mla.value_size": 10,
}


def stored(fields: dict, length: int):
    """(abstract stack, abstract arrays that backward reads)."""
    config = with_fields(ModelConfig(), SIZES | fields)
    stack = jax.eval_shape(lambda key: LM(key, config).stack, jax.random.key(0))

    def function(stack, x_BLD):
        positions_BL = jnp.broadcast_to(jnp.arange(length), (B, length))
        return stack({"target": x_BLD}, Context(positions_BL))[0]

    x_BLD = jax.ShapeDtypeStruct((B, length, D), jnp.float32)
    pull = jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], stack, x_BLD)
    return stack, jax.tree.leaves(pull)


def kept(fields: dict, recompute: str, length: int) -> float:
    """Elements kept for backward beside the parameters, in units of B x length x D."""
    stack, arrays = stored(fields | {"recompute": recompute}, length)
    total = sum(a.size for a in arrays if a.ndim > 2 and a.shape[:3] != (B, length, 1))
    return (total - sum(a.size for a in jax.tree.leaves(stack))) / (B * length * D)


def test_attention_of_short_sequences_and_named_activations_are_kept():
    """Attention's weights, B x heads x L x L a layer, and output, unless selective; queries of
    width D and the MLP's columns beside each layer's input; a policy and a name."""
    minimal, selective, full, named, both = (
        kept(LLAMA, recompute, 256)
        for recompute in (*POLICIES, "query,mlp_up", "selective,attention_weights")
    )
    assert full == pytest.approx(LAYERS, rel=0.05)  # the layers' inputs
    assert minimal - selective == pytest.approx(LAYERS * (4 * 256 / D + 1), rel=0.01)
    assert selective > 2 * full
    assert named - full == pytest.approx(LAYERS * (1 + ModelConfig(hidden_size=D).ffn / D))
    assert both - selective == pytest.approx(LAYERS * 4 * 256 / D)


def test_what_is_made_of_latents_is_kept_unless_selective():
    """Queries, keys and values of 4 heads, of 16 + 4, 16 and 10; latents in any mode but full."""
    minimal, selective, full = (kept(LATENT, mode, 1024) for mode in POLICIES)
    assert minimal - selective == pytest.approx(LAYERS * 4 * (20 + 16 + 10) / D, rel=1e-3)
    ffn = 2 * ModelConfig(hidden_size=D).ffn
    assert selective - full == pytest.approx(LAYERS * (12 + 8 + 4 + D + ffn) / D, rel=0.02)


def test_without_the_loop_backward_reads_no_stack_of_activations():
    """A loop's backward takes each layer's part out of arrays [LAYERS, ...]."""
    for scan_layers in (True, False):
        stack, arrays = stored(LLAMA | {"scan_layers": scan_layers}, 32)
        parameters = {a.shape for a in jax.tree.leaves(stack)}
        stacked = {a.shape for a in arrays if a.shape[:2] == (LAYERS, B)}
        assert bool(stacked - parameters) == scan_layers
