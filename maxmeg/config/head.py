"""Settings of the classifier that a model has in place of its output weights."""

import dataclasses

from maxmeg.config.setting import setting

# Fields of ModelConfig that have no effect on a classifier, which has no output weights.
OUTPUT_FIELDS = ("bert.transform", "bert.output_bias", "bert.pair_head", "logit_scale")
OUTPUT_FIELDS = (*OUTPUT_FIELDS, "logit_softcap", "mtp.num_layers")


@dataclasses.dataclass
class HeadConfig:
    """A linear layer from the hidden states, or from the pooler's output, to the classes."""

    num_classes: int = setting(
        0,
        "number of classes that the model predicts for each text or token, in place of tokens; "
        "1: the score of a choice; 0: as many as data.labels if data.objective needs a head, else "
        "none: a language model",
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
