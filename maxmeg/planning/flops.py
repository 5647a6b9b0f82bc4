"""Floating-point operations of training, counted as Megatron-LM counts them. Imports no JAX."""

import dataclasses

from maxmeg.config.model import ModelConfig

_TRAINING = 3  # forward, and backward to inputs and to weights
_MULTIPLY_ADD = 2


def training_flops(
    model: ModelConfig,
    sequence_length: int,
    batch_size: int = 1,
    tensor: int = 1,
    causal: bool = True,
    frozen: bool = False,
) -> float:
    """FLOPs of one step over `batch_size` sequences; recomputation is not counted.

    Projections and logits (of the padded vocabulary), and attention scores, of which a causal
    model needs half, and a layer with a window those within it; of experts those that a token
    goes to. Each further token takes a layer of the last kind, and the logits once more. Norms,
    embeddings and softmax are left out, as in Megatron-LM. frozen: no weight has a gradient
    (adapters beside them, which are small, are left out).
    """
    tokens = batch_size * sequence_length
    products = model.hidden_size * (3 if model.gated else 2)
    mlps = products * model.ffn * model.num_layers
    if model.num_experts:
        latent, sides = model.expert_latent_size, products // model.hidden_size
        chosen = sides * (latent or model.hidden_size) * model.experts_per_token * model.expert_ffn
        chosen += products * model.shared_ffn_size + 2 * model.hidden_size * latent
        router = model.hidden_size * (model.num_experts + model.shared_gate)
        sparse = sum(map(model.has_experts, range(model.num_layers)))
        dense = model.num_layers - sparse
        mlps = products * model.ffn * dense + (chosen + router) * sparse
    logits = model.hidden_size * model.padded_vocab_size(tensor)
    pairs = model.num_layers * sequence_length**2
    if model.attention_window:
        every = model.attention_global_every
        local = model.num_layers - (model.num_layers // every if every else 0)
        pairs -= local * max(sequence_length - model.attention_window, 0) ** 2
    size = model.num_heads * (model.key_size + model.value_size)
    scores = size * batch_size * pairs / (2 if causal else 1)
    weights = tokens * (model.num_layers * attention_weights(model) + mlps + logits)
    times = _TRAINING - 1 if frozen else _TRAINING
    found = float(_MULTIPLY_ADD * (times * weights + _TRAINING * scores))
    if not model.mtp_depths:
        return found
    each = training_flops(last_layer(model), sequence_length, batch_size, tensor, causal, frozen)
    joining = model.hidden_size * (2 * model.hidden_size + 3)  # with norms, as Megatron-LM has it
    return found + model.mtp_depths * (each + float(_MULTIPLY_ADD * times * tokens * joining))


def attention_weights(model: ModelConfig) -> int:
    """Of the projections of a layer; beside latents those of their norms, as Megatron-LM has it."""
    width, heads, rank = model.hidden_size, model.num_heads, model.mla_query_rank
    if not model.mla_kv_rank:
        return 2 * width * model.head_size * (heads + model.kv_heads)
    queries = (
        rank * (width + heads * model.key_size + 1) if rank else width * heads * model.key_size
    )
    keys = model.mla_kv_rank * (width + heads * (model.head_size + model.value_size) + 1)
    return queries + keys + width * (model.mla_rotary_size + heads * model.value_size)


def last_layer(model: ModelConfig) -> ModelConfig:
    """The model of one layer, of the kind of the model's last."""
    every = model.attention_global_every
    whole = {"attention_window": 0} if every and model.num_layers % every == 0 else {}
    experts = model.num_experts if model.has_experts(model.num_layers - 1) else 0
    placed = {"num_experts": experts, "first_dense_layers": 0, "expert_every": 1}
    one = {"num_layers": 1, "attention_global_every": 0, "expert_pattern": (), **placed}
    return dataclasses.replace(model, mtp_depths=0, **one, **whole)
