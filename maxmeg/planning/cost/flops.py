"""Floating-point operations of training, counted as Megatron-LM counts them."""

from maxmeg.config.model import ModelConfig
from maxmeg.models.mixers import pattern

_TRAINING = 3  # forward, and backward to inputs and to weights
_MULTIPLY_ADD = 2


def training_flops(
    model: ModelConfig,
    sequence_length: int,
    batch_size: int = 1,
    tensor: int = 1,
    causal: bool | None = None,
    frozen: bool = False,
) -> float:
    """FLOPs of one step over `batch_size` sequences; recomputation is not counted.

    These are the products with the weights that each mixer reports, the logits (of the padded
    vocabulary), and the attention scores (half of them in a causal model, those within the window
    in a `local` layer). An MTP layer is one more layer of the last kind, with logits of its own.
    Norms, embeddings and softmax are left out, as in Megatron-LM. causal: whether half of the
    scores count; None: as in the model. frozen: no weight has a gradient (the small adapters beside
    them are left out).
    """
    causal = model.attention.causal if causal is None else causal
    tokens = batch_size * sequence_length
    logits = logit_weights(model, tensor)
    joining = model.hidden_size * (2 * model.hidden_size + 3)  # with norms, as Megatron-LM has it
    weights = logits + model.mtp.num_layers * (logits + joining)
    scores = 0
    layers = pattern(model)
    last = layers[-1][0][-len(model.layer_kinds[-1]) :]
    for unit, repeats in [*layers, (last, model.mtp.num_layers)]:
        for mixer in [mixer for sublayer in unit for mixer in sublayer.mixers]:
            weights += repeats * mixer.weights()
            scores += repeats * mixer.scores(sequence_length)
    scores = batch_size * scores / (2 if causal else 1)
    times = _TRAINING - 1 if frozen else _TRAINING
    return float(_MULTIPLY_ADD * (times * tokens * weights + _TRAINING * scores))


def logit_flops(model: ModelConfig, tokens: int) -> float:
    """FLOPs of the logits of `tokens` tokens in training."""
    return float(_MULTIPLY_ADD * _TRAINING * tokens * logit_weights(model, 1))


def logit_weights(model: ModelConfig, tensor: int) -> int:
    return model.hidden_size * model.padded_vocab_size(tensor)
