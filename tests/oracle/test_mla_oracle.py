"""Multi-latent attention is that of transformers' DeepSeek models: output, gradients, decoding."""

import math

import cached
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from maxmeg.config.mixers import RotaryScaling
from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.setting import with_fields
from maxmeg.layers.context import Context
from maxmeg.layers.mla import Mla
from maxmeg.models.mixers import MIXERS

TOLERANCE = 1e-5  # of the largest value, float32: the order of sums differs
B, L, D, H, K, N, V, R, QUERY = 2, 24, 32, 4, 12, 8, 10, 16, 20
ORIGINAL, FACTOR = 8, 4.0
V3 = (v3.DeepseekV3Config, v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding)
V2 = (v2.DeepseekV2Config, v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding)


def yarn(mscale: float, all_dim: float) -> dict:
    return {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }


CASES = {  # their classes and settings
    "v3": (V3, {"q_lora_rank": QUERY}),
    "v3, yarn": (V3, {"q_lora_rank": QUERY, "rope_parameters": yarn(1.0, 1.0)}),
    "v3, yarn of two scales": (V3, {"q_lora_rank": QUERY, "rope_parameters": yarn(1.0, 0.7)}),
    "v3, halves, biases, no query rank": (
        V3,
        {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
    ),
    "v3, biases": (V3, {"q_lora_rank": QUERY, "attention_bias": True}),
    "v2": (V2, {"q_lora_rank": QUERY, "rope_parameters": yarn(0.707, 0.707)}),
    "v2-lite": (V2, {"q_lora_rank": None}),
}


def amplified(scale: float) -> float:
    return 0.1 * scale * math.log(FACTOR) + 1


def settings(fields: dict) -> ModelConfig:
    """The ModelConfig of the same layer; YaRN's scales are of the scores and of cos and sin."""
    config = with_fields(
        ModelConfig(),
        {
            "hidden_size": D,
            "attention.num_heads": H,
            "attention.head_dim": K,
            "layers": "*(mla,mlp)",
            "mla.kv_rank": R,
            "mla.query_rank": fields["q_lora_rank"] or 0,
            "mla.rotary_size": N,
            "mla.value_size": V,
            "mla.norm_eps": 1e-6,
            "rotary.interleaved": fields.get("rope_interleave", True),
            "attention.bias_qkv": fields.get("attention_bias", False),
            "attention.bias_out": fields.get("attention_bias", False),
        },
    )
    if "rope_parameters" in fields:
        scale, all_dim = (fields["rope_parameters"][name] for name in ("mscale", "mscale_all_dim"))
        config.rotary.scaling = RotaryScaling.yarn
        config.rotary.factor, config.rotary.original_length = FACTOR, ORIGINAL
        config.rotary.low, config.rotary.high = 1.0, 32.0
        config.rotary.attention_factor = amplified(scale) / amplified(all_dim)
        config.attention.scale = (K + N) ** -0.5 * amplified(all_dim) ** 2
    return config


def their_layer(name: str):
    """(attention, cos and sin or what rotates, its config), with random weights."""
    (config_of, attention_of, rotary_of), fields = CASES[name]
    parameters = {"rope_type": "default", **fields.get("rope_parameters", {}), "rope_theta": 1e4}
    config = config_of(
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=H,
        kv_lora_rank=R,
        qk_nope_head_dim=K,
        qk_rope_head_dim=N,
        v_head_dim=V,
        max_position_embeddings=int(ORIGINAL * FACTOR),
        attn_implementation="eager",
        **fields | {"rope_parameters": parameters},
    )
    torch.manual_seed(0)
    layer = attention_of(config, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return layer, rotary_of(config), config


def as_ours(layer, arrays: dict[str, np.ndarray]) -> Mla:
    """Our layer with their arrays, by name: weights, or gradients of them."""
    joined = arrays["kv_b_proj.weight"].reshape(H, K + V, R)
    both = {"key_up": joined[:, :K].reshape(-1, R), "value_up": joined[:, K:].reshape(-1, R)}
    names = {
        "query": "q_proj",
        "query_down": "q_a_proj",
        "query_up": "q_b_proj",
        "kv_down": "kv_a_proj_with_mqa",
        "out": "o_proj",
    }
    for ours, weight in both.items():
        getattr(layer, ours).weight[...] = jnp.asarray(weight.T)
    for ours, theirs in names.items():
        linear = getattr(layer, ours)
        assert (linear is not None) == (f"{theirs}.weight" in arrays)
        if linear is not None:
            linear.weight[...] = jnp.asarray(arrays[f"{theirs}.weight"].T)
            assert (linear.bias is not None) == (f"{theirs}.bias" in arrays)
            if linear.bias is not None:
                linear.bias[...] = jnp.asarray(arrays[f"{theirs}.bias"])
    layer.kv_norm.weight[...] = jnp.asarray(arrays["kv_a_layernorm.weight"])
    if layer.query_norm is not None:
        layer.query_norm.weight[...] = jnp.asarray(arrays["q_a_layernorm.weight"])
    return layer


def our_layer(fields: dict, arrays: dict) -> Mla:
    spec = MIXERS["mla"](settings(fields), ParallelConfig())
    return as_ours(Mla(jax.random.key(0), spec), arrays)


def check_equal(actual, wanted) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        limit = TOLERANCE * float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)


def decoded(layer: Mla, x_BLD):
    """Output for the last token, which is decoded after the others, and the cache."""
    size = cached.size_of(B, L)
    before, last = cached.context(size, 0, L - 1), cached.context(size, L - 1, 1)
    _, cache, _ = layer(x_BLD[:, :-1], before, cached.empty(layer, size))
    return layer(x_BLD[:, -1:], last, cache)[:2]


@pytest.mark.parametrize("name", CASES)
def test_output_gradients_and_decoding(name: str):
    theirs, rotary, config = their_layer(name)
    x, slope = torch.randn(B, L, D, requires_grad=True), torch.randn(B, L, D)
    turn = rotary(x, torch.arange(L)[None])
    mask = torch.full((L, L), -torch.inf).triu(1)[None, None]
    expected, _ = theirs(x, position_embeddings=turn, attention_mask=mask)
    (expected * slope).sum().backward()
    weights, slopes = (
        {n: (p.grad if of_loss else p).detach().numpy() for n, p in theirs.named_parameters()}
        for of_loss in (False, True)
    )
    fields = CASES[name][1]
    layer, positions = our_layer(fields, weights), jnp.broadcast_to(jnp.arange(L), (B, L))

    def loss(layer, x_BLD):
        y_BLD = layer(x_BLD, Context(positions))[0]
        return jnp.sum(y_BLD * slope.numpy()), y_BLD

    inputs = jnp.asarray(x.detach().numpy())
    function = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, actual), gradients = function(layer, inputs)
    check_equal(actual, expected.detach().numpy())
    check_equal(gradients, (our_layer(fields, slopes), x.grad.numpy()))
    next_BLD, cache = jax.jit(decoded)(layer, inputs)
    check_equal(next_BLD, expected[:, -1:].detach().numpy())
    kept = DynamicCache(config=config)
    with torch.no_grad():
        theirs(x, position_embeddings=turn, attention_mask=mask, past_key_values=kept)
    check_equal(cached.in_order(cache[0], L)[..., 0, :R], kept.layers[0].keys[:, 0].numpy())
