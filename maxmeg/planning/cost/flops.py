"""Floating-point operations of training, counted as Megatron-LM counts them."""

from maxmeg.config.bert import Transform
from maxmeg.config.head import Biencoder
from maxmeg.config.model import ModelConfig
from maxmeg.models.mixers import mtp_unit, pattern

_TRAINING = 3  # forward, gradients of inputs, gradients of weights
MULTIPLY_ADD = 2


def training_flops(
    model: ModelConfig,
    sequence_length: int,
    batch_size: int = 1,
    tensor: int = 1,
    causal: bool | None = None,
    frozen: bool = False,
    source_length: int = 0,
    max_targets: int = 0,
) -> float:
    """FLOPs of one step over `batch_size` sequences, without recomputation.

    Counted are the matrix products with weights (`MixerSpec.weights`), the attention scores
    (`MixerSpec.scores`, half of them in a causal model) and the logits of the padded vocabulary,
    with the dense layer before them (model.bert.transform), or a classifier's logits or the
    vectors of a biencoder at each token (with the pooler). An MTP layer has logits of its own.
    Norms, embeddings and softmax are left out, as in
    Megatron-LM. causal: whether to halve the scores; None: as in the model, of an encoder-decoder
    those of the decoder's own tokens. frozen: weights have no gradients; the adapters beside them
    are left out. source_length: tokens of an encoder-decoder's source. max_targets: tokens of a
    sequence whose logits are computed; 0: all.
    """
    before = model.hidden_size * (model.bert.transform is not Transform.none)
    head = model.head
    outputs = head.width if head.replaces_output else model.padded_vocab_size(tensor)
    before += model.hidden_size * (head.replaces_output and model.bert.pooler)
    logits = model.hidden_size * (outputs + before)
    joining = model.hidden_size * (2 * model.hidden_size + 3)  # with norms, as Megatron-LM has it
    products, scores = products_and_scores(model, sequence_length, source_length, causal)
    products += sequence_length * model.mtp.num_layers * (logits + joining)
    read_source = source_length * (head.biencoder is Biencoder.separate)
    products += ((max_targets or sequence_length) + read_source) * logits
    times = _TRAINING - 1 if frozen else _TRAINING
    return float(MULTIPLY_ADD * batch_size * (times * products + _TRAINING * scores))


def products_and_scores(
    model: ModelConfig, length: int, source_length: int = 0, causal: bool | None = None
) -> tuple[float, float]:
    """Multiplications of a sample's products with weights and of its scores in all layers, MTP's
    included: `MixerSpec.multiplications`, the scores halved where causal."""
    layers, products, all_scores = pattern(model), 0.0, 0.0
    for unit, repeats in [*layers, (mtp_unit(model), model.mtp.num_layers)]:
        for sublayer in unit:
            is_source = sublayer.side == "source"
            tokens, other = (source_length, length) if is_source else (length, source_length)
            for mixer in sublayer.mixers:
                weights, scores = mixer.multiplications(tokens, other)
                is_causal = model.attention.causal and not (is_source or mixer.reads_memory)
                is_causal = is_causal if causal is None else causal
                products += repeats * weights
                all_scores += repeats * scores / (2 if is_causal else 1)
    return products, all_scores
