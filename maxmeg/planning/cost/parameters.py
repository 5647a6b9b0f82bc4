"""Numbers of parameters of a model, by formulas without JAX.

Letters: D hidden size, H and G query and key/value heads, K head size, F feed-forward size, E
experts.
"""

import functools

from maxmeg.config.bert import Transform
from maxmeg.config.head import Biencoder
from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import ModelConfig, Norm, NormPlace, Position


def num_parameters(model: ModelConfig) -> tuple[int, int]:
    """(all parameters, those that one token uses), MTP layers included.

    A token uses top_k of the routed experts. The vocabulary is not padded; a tied table counts
    once; the arrays that balance experts without gradients count.
    """
    D, kinds = model.hidden_size, model.layer_kinds
    tables = (1 if model.tied else 2) * model.vocab_size
    tables += model.max_position if model.position is Position.learned else 0
    depth = 3 * _norm(model, D) + _linear(2 * D, D)  # of MTP, beside its layer
    layers = [*kinds, *[model.mtp_layer] * model.mtp.num_layers]
    tables += model.bert.token_types
    is_relative = model.position is Position.relative
    biases = 2 * is_relative * model.relative.buckets * model.attention.num_heads
    encoders = 2 if model.head.biencoder is Biencoder.separate else 1
    total = biases + encoders * (tables * D + _bert(model)) + model.mtp.num_layers * depth
    total += sum(_layer(model, layer) for layer in layers) + model.layer_scale * len(kinds)
    sparse = sum("moe" in mixers for layer in layers for mixers in layer)
    idle = (model.moe.num_experts - model.moe.top_k) * sparse
    return total, total - (idle * _expert(model) if sparse else 0)


def _bert(model: ModelConfig) -> int:
    """Vectors and heads around the layers, with the final norm."""
    D, bert = model.hidden_size, model.bert
    transform = bert.transform is not Transform.none
    norms = (model.norm_place is not NormPlace.post_residual) + bert.embedding_norm + transform
    total = norms * _norm(model, D) + bert.pooler * _linear(D, D, True)
    total += transform * _linear(D, D, bert.transform_bias)
    head = model.head
    total += _linear(D, head.width, head.bias) if head.width else 0
    return total + bert.pair_head * _linear(D, 2, True) + bert.output_bias * model.vocab_size


def _layer(model: ModelConfig, layer: tuple[tuple[str, ...], ...]) -> int:
    """layer: its sublayers, each the names of its mixers."""
    total = 0
    for mixers in layer:
        before = len(mixers) if model.parallel_norms else 1
        norms = {NormPlace.pre: before, NormPlace.sandwich: before + 1}
        norms = 0 if "raw_attention" in mixers else norms.get(model.norm_place, 1)
        total += norms * _norm(model, model.hidden_size)
        total += sum(MIXERS[name](model) for name in mixers)
    return total


def _attention(model: ModelConfig, is_local: bool = False) -> int:
    heads, D, H, G = model.attention, model.hidden_size, model.attention.num_heads, model.kv_heads
    G = (heads.local_kv_heads if is_local else 0) or G
    K = model.local_head_size if is_local else model.head_size
    projections = 1 if heads.keys_as_values and not is_local else 2
    total = _linear(D, H * K * (1 + heads.output_gate), heads.bias_qkv)
    total += projections * _linear(D, G * K, heads.bias_qkv)
    normed = {QkNorm.head: (K, K), QkNorm.heads: (H * K, G * K)}
    total += sum(_norm(model, width) for width in normed.get(model.attention.qk_norm, ()))
    return total + _heads_out(model, K)


def _mla(model: ModelConfig) -> int:
    D, H, mla = model.hidden_size, model.attention.num_heads, model.mla
    width, bias = H * model.key_size, model.attention.bias_qkv
    total = D * width
    if rank := mla.query_rank:
        total = _linear(D, rank, bias) + _norm(model, rank) + rank * width
    total += _linear(D, mla.kv_rank + mla.rotary_size, bias) + _norm(model, mla.kv_rank)
    total += mla.kv_rank * H * (model.head_size + model.value_size)
    return total + _heads_out(model, model.value_size)


def _heads_out(model: ModelConfig, size: int) -> int:
    """Output projection and sinks. size: of a head's output."""
    heads = model.attention
    width = heads.num_heads * size
    return _linear(width, model.hidden_size, heads.bias_out) + heads.num_heads * heads.sinks


def _conv(model: ModelConfig) -> int:
    D, bias = model.hidden_size, model.conv.bias
    return 4 * _linear(D, D, bias) + (model.conv.kernel_size + bias) * D


def _mamba(model: ModelConfig) -> int:
    D, H, mamba = model.hidden_size, model.mamba_heads, model.mamba
    width, keys = H * mamba.head_dim, 2 * model.mamba_groups * mamba.state_size
    convolved = (mamba.kernel_size + mamba.conv_bias) * (width + keys)
    inward = _linear(D, 2 * width + keys + H, mamba.bias)
    return inward + convolved + 3 * H + width * mamba.norm + _linear(width, D, mamba.bias)


def _delta(model: ModelConfig, low_rank: bool = False) -> int:
    D, H, N, P = (
        model.hidden_size,
        model.delta.num_heads,
        model.delta.key_size,
        model.delta_value_size,
    )
    keys, values = 2 * model.delta_key_heads * N, H * P
    convolved = model.delta.kernel_size * (keys + values)
    inward, rank = D * (keys + values + H), model.delta.rank or N
    gates = D * (values + H) + H
    if low_rank:
        gates = (2 * D + values + H * N) * rank + H * N
    return inward + convolved + gates + H + P + values * D


def _mlp(model: ModelConfig) -> int:
    return _projections(model, model.hidden_size, model.ffn)


def _moe(model: ModelConfig) -> int:
    D, E, moe = model.hidden_size, model.moe.num_experts, model.moe
    state = moe.bias_balancing + bool(moe.global_aux_loss)
    total = E * (_expert(model) + D + moe.logit_bias + state) + 2 * D * moe.latent_size
    if moe.shared_ffn_size:
        total += _projections(model, D, moe.shared_ffn_size) + D * moe.shared_gate
    return total


def _expert(model: ModelConfig) -> int:
    return _projections(model, model.moe.latent_size or model.hidden_size, model.expert_ffn)


def _projections(model: ModelConfig, width: int, F: int) -> int:
    inward = (1 + model.gated) * _linear(width, F, model.mlp.bias)
    return inward + _linear(F, width, model.mlp.bias)


def _linear(inputs: int, outputs: int, bias: bool = False) -> int:
    return (inputs + bias) * outputs


def _norm(model: ModelConfig, width: int) -> int:
    return width * (1 + (model.norm is Norm.layernorm and model.norm_bias))


MIXERS = {
    "attention": _attention,
    "local": functools.partial(_attention, is_local=True),
    "raw_attention": _attention,
    "nope_attention": _attention,
    "mla": _mla,
    "local_mla": _mla,
    "conv": _conv,
    "mamba": _mamba,
    "gated_delta": _delta,
    "kda": functools.partial(_delta, low_rank=True),
    "mlp": _mlp,
    "moe": _moe,
    "encoder_attention": _attention,
    "encoder_mlp": _mlp,
    "encoder_norm": lambda model: 0,  # beside its norm
    "cross": _attention,
    "encoder_cross": _attention,
    "chunked_cross": _attention,
}
