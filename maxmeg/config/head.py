"""Settings of what a model has in place of its output weights: a classifier, or text vectors."""

import dataclasses
import enum

from maxmeg.config.setting import Section, setting

# Fields of ModelConfig that have no effect on a classifier or a biencoder, without output weights.
OUTPUT_FIELDS = ("bert.transform", "bert.output_bias", "bert.pair_head", "logit_scale")
OUTPUT_FIELDS = (*OUTPUT_FIELDS, "logit_softcap", "mtp.num_layers")


class Biencoder(enum.Enum):
    none = "none"
    shared = "shared"
    separate = "separate"


ENCODER_LAYERS = "*(attention,mlp)"  # model.layers of one encoder


def two_encoders(num_layers: int) -> str:
    """model.layers of a biencoder with two encoders, each of `num_layers` layers."""
    return f"{num_layers}(encoder_attention,encoder_mlp) {ENCODER_LAYERS}"


def name_in_two(name: str, queries: bool) -> str:
    """Of an array of one encoder, the name in a model with two: that of queries, or of texts."""
    layers = name.removeprefix("stack.groups.0.")
    if layers != name:
        return f"stack.groups.{int(not queries)}.{layers}"
    return f"query.{name}" if queries else name


@dataclasses.dataclass(repr=False)
class HeadConfig(Section):
    """A linear layer from the hidden states, or from the pooler's output, to the classes or to the
    vector of a text."""

    num_classes: int = setting(
        0,
        "number of classes that the model predicts for each text or token, instead of the next "
        "token; 1: one score for each choice (data.objective=choose); 0: as many as data.labels "
        "if data.objective needs a head, else no head",
        at_least=0,
    )
    bias: bool = setting(True, "the logits have biases", needs="num_classes")
    dropout: float = setting(
        0.0,
        "dropout rate before the classes, in [0, 1)",
        at_least=0,
        below=1,
        needs="num_classes",
        effect="none",
    )
    biencoder: Biencoder = setting(
        Biencoder.none,
        "the model turns texts into vectors, whose inner products score them (data.objective=ict "
        "or retrieve). shared: one encoder for queries and texts | separate: one for each, with "
        "model.layers=N(encoder_attention,encoder_mlp) *(attention,mlp), N layers for queries and "
        "as many for texts, and data.separate_queries=true",
        "--biencoder-shared-query-context-model",
    )
    projection: int = setting(
        0,
        "width of the vectors: a linear layer projects the hidden state of a text's first token, "
        "or the pooler's output, to it; 0: no projection",
        "--biencoder-projection-dim",
        at_least=0,
        needs="biencoder=shared|separate",
    )

    @property
    def width(self) -> int:
        """Outputs of the linear layer: classes, or the projection of text vectors; 0: no layer."""
        return self.num_classes or self.projection

    @property
    def replaces_output(self) -> bool:
        """Whether the model has no logits of tokens."""
        return self.num_classes > 0 or self.biencoder is not Biencoder.none
