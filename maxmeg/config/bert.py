"""Settings of BERT's embeddings and heads."""

import dataclasses
import enum

from maxmeg.config.setting import Section, setting


class Transform(enum.Enum):
    none = "none"
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"


@dataclasses.dataclass(repr=False)
class BertConfig(Section):
    """Embeddings and heads that BERT and its relatives have around the layers."""

    token_types: int = setting(
        0,
        "number of types of tokens (segments of a pair), each with a learned embedding: 2 for "
        "BERT, 1 for RoBERTa; 0: none",
        at_least=0,
    )
    embedding_norm: bool = setting(False, "normalize the sum of the embeddings")
    position_offset: int = setting(
        0,
        "added to positions before their embedding is read (RoBERTa: 2), with position=learned; "
        "model.max_position counts the rows before it too",
        at_least=0,
    )
    transform: Transform = setting(
        Transform.none,
        "a dense layer, this activation and a norm before the output weights; none: without them",
    )
    transform_bias: bool = setting(
        True,
        "that dense layer has a bias; false for ModernBERT",
        needs="transform=gelu|gelu_tanh",
    )
    output_bias: bool = setting(False, "the logits have biases")
    pooler: bool = setting(False, "a dense layer and tanh, applied to the first token of a row")
    pair_head: bool = setting(
        False,
        "predict from the pooler's output whether the two segments of a sample are swapped "
        "(data.sentence_pairs); the flag is its negation",
        "--bert-no-binary-head",
    )
