"""Floating-point operations of training, counted as Megatron-LM counts them."""

from maxmeg.config.bert import Transform
from maxmeg.config.model import ModelConfig
from maxmeg.models.mixers import pattern

_TRAINING = 3  # forward, gradients of inputs, gradients of weights
_MULTIPLY_ADD = 2


def training_flops(
    model: ModelConfig,
    sequence_length: int,
    batch_size: int = 1,
    tensor: int = 1,
    causal: bool | None = None,
    frozen: bool = False,
) -> float:
    """FLOPs of one step over `batch_size` sequences, without recomputation.

    Counted are the matrix products with weights (`MixerSpec.weights`), the attention scores
    (`MixerSpec.scores`, half of them in a causal model) and the logits of the padded vocabulary,
    with the dense layer before them (model.bert.transform), or a classifier's logits (with the
    pooler). An MTP layer is one more layer of the
    last kind, with logits of its own. Norms, embeddings and softmax are left out, as in
    Megatron-LM. causal: whether to halve the scores; None: as in the model. frozen: weights have no
    gradients; the adapters beside them are left out.
    """
    causal = model.attention.causal if causal is None else causal
    tokens = batch_size * sequence_length
    before = model.hidden_size * (model.bert.transform is not Transform.none)
    outputs = model.head.num_classes or model.padded_vocab_size(tensor)
    before += model.hidden_size * (model.head.num_classes > 0 and model.bert.pooler)
    logits = model.hidden_size * (outputs + before)
    joining = model.hidden_size * (2 * model.hidden_size + 3)  # with norms, as Megatron-LM has it
    weights, scores = weights_and_scores(model, sequence_length)
    weights += logits + model.mtp.num_layers * (logits + joining)
    scores = batch_size * scores / (2 if causal else 1)
    times = _TRAINING - 1 if frozen else _TRAINING
    return float(_MULTIPLY_ADD * (times * tokens * weights + _TRAINING * scores))


def layer_flops(model: ModelConfig, sequence_length: int) -> tuple[float, float]:
    """Forward FLOPs of the average layer for one sequence: products with weights, and attention
    scores."""
    weights, scores = weights_and_scores(model, sequence_length)
    scores *= 1 if model.attention.causal else _MULTIPLY_ADD
    return _MULTIPLY_ADD * sequence_length * weights / model.num_layers, scores / model.num_layers


def weights_and_scores(model: ModelConfig, sequence_length: int) -> tuple[int, int]:
    """Sums of `MixerSpec.weights` and `MixerSpec.scores` over all layers, MTP's included."""
    layers = pattern(model)
    last = layers[-1][0][-len(model.layer_kinds[-1]) :]
    mixers = [
        (mixer, repeats)
        for unit, repeats in [*layers, (last, model.mtp.num_layers)]
        for sublayer in unit
        for mixer in sublayer.mixers
    ]
    return (
        sum(repeats * mixer.weights() for mixer, repeats in mixers),
        sum(repeats * mixer.scores(sequence_length) for mixer, repeats in mixers),
    )
