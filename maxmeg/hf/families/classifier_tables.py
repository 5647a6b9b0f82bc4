"""Tables of transformers' classifiers: of texts (ForSequenceClassification), of words
(ForTokenClassification) and of choices (ForMultipleChoice)."""

import dataclasses
import typing
from collections.abc import Mapping

from maxmeg.config.data import Objective
from maxmeg.config.model import ModelConfig
from maxmeg.hf.families.encoder_tables import (
    BERT,
    BUFFERS,
    EMBEDDINGS,
    MEGATRON_BERT,
    ROBERTA,
    without_heads,
)
from maxmeg.hf.families.keys import Fields, Ignored, Json, Key, Keys, Part, refused
from maxmeg.hf.families.tables import LLAMA, MISTRAL, QWEN2, QWEN3, Family

OBJECTIVES = {
    "ForSequenceClassification": Objective.classify,
    "ForTokenClassification": Objective.tag,
    "ForMultipleChoice": Objective.choose,
}


class Classes(Part):
    """The number of classes, and the dropout before them. fallback: key whose dropout rate holds
    where classifier_dropout is null."""

    def __init__(self, fallback: str = ""):
        self.fallback = fallback

    def read(self, keys: Keys, fields: Fields) -> None:
        names = class_names(keys.values)
        kind = keys.take("problem_type")
        if kind not in (None, "single_label_classification") or len(names) < 2:
            raise refused(
                "problem_type",
                kind if kind else f"{kind} with {len(names)} class",
                "only single_label_classification of at least two classes is supported, no "
                "regression",
            )
        fields["head.num_classes"] = len(names)
        self.read_dropout(keys, fields)

    def read_dropout(self, keys: Keys, fields: Fields) -> None:
        rate = keys.take("classifier_dropout")
        if rate is None and self.fallback:
            rate = keys.take(self.fallback, 0.1)
        fields["head.dropout"] = float(rate or 0.0)

    def write(self, model: ModelConfig) -> Json:
        if model.head.num_classes < 2:
            raise ValueError(f"model.head.num_classes={model.head.num_classes} is less than 2")
        names = [f"LABEL_{number}" for number in range(model.head.num_classes)]
        return written_names(names) | self.write_dropout(model)

    def write_dropout(self, model: ModelConfig) -> Json:
        return {"classifier_dropout": model.head.dropout}


class Score(Classes):
    """One score of each choice."""

    def read(self, keys: Keys, fields: Fields) -> None:
        fields["head.num_classes"] = 1
        self.read_dropout(keys, fields)

    def write(self, model: ModelConfig) -> Json:
        return self.write_dropout(model)


def class_names(config: Mapping[str, typing.Any]) -> list[str]:
    """The names of the classes in a config.json, in order; two, LABEL_0 and LABEL_1, if it names
    none."""
    named = config.get("id2label")
    if not isinstance(named, dict):
        count = config.get("num_labels", 2)
        count = count if isinstance(count, int) and 0 < count < 10**6 else 2
        return [f"LABEL_{number}" for number in range(count)]
    numbers = {str(number): str(name) for number, name in named.items()}
    if {*numbers} != {str(n) for n in range(len(numbers))}:
        raise refused("id2label", named, "it must name the classes 0, 1, ... without a gap")
    return [numbers[str(number)] for number in range(len(numbers))]


def written_names(names: list[str]) -> Json:
    """The keys of config.json for classes of these names."""
    by_number = {str(number): name for number, name in enumerate(names)}
    return {"id2label": by_number, "label2id": {name: i for i, name in enumerate(names)}}


def objective_of(family: str) -> Objective | None:
    """The objective of the models of a family; None for those without a classifier."""
    return next((o for ending, o in OBJECTIVES.items() if family.endswith(ending)), None)


def encoder(base: Family, prefix: str, classes: Part, names: Mapping[str, str]) -> Family:
    """A classifier on an encoder; names: of its linear layer, and of the pooler if it has one."""
    plain, ends = (
        without_heads(base),
        {name: f"{prefix}.{theirs}" for name, theirs in EMBEDDINGS.items()},
    )
    ends.pop("bert.pooler")
    final_norm = {name: theirs for name, theirs in base.ends.items() if name == "final_norm"}
    return dataclasses.replace(
        plain,
        parts=[*plain.parts, classes],
        ends={**ends, **final_norm, **names, "output": "lm_head"},
        constants={**plain.constants, "bert.pooler": "bert.pooler" in names},
        ignored=BUFFERS,
    )


def encoders(name: str, base: Family, prefix: str) -> dict[str, Family]:
    """The three classifiers on an encoder."""
    classes, score = Classes("hidden_dropout_prob"), Score("hidden_dropout_prob")
    linear, pooler = {"classifier.linear": "classifier"}, f"{prefix}.pooler.dense"
    of_texts = {**linear, "bert.pooler": pooler}
    if base is ROBERTA:
        of_texts = {"classifier.linear": "classifier.out_proj", "bert.pooler": "classifier.dense"}
    return {
        f"{name}ForSequenceClassification": encoder(base, prefix, classes, of_texts),
        f"{name}ForTokenClassification": encoder(base, prefix, classes, linear),
        f"{name}ForMultipleChoice": encoder(base, prefix, score, {**linear, "bert.pooler": pooler}),
    }


def decoders(name: str, base: Family) -> dict[str, Family]:
    """The two classifiers on a causal model, which read the last token of a text."""
    plain = [p for p in base.parts if not (isinstance(p, Key) and p.name == "tie_word_embeddings")]
    plain.append(Ignored("tie_word_embeddings"))
    ends = {**base.ends, "classifier.linear": "score"}

    def family(bias: bool, classes: Part) -> Family:
        fields = {**base.constants, "tied": True, "head.bias": bias}
        return dataclasses.replace(base, parts=[*plain, classes], ends=ends, constants=fields)

    return {
        f"{name}ForSequenceClassification": family(False, Classes()),
        f"{name}ForTokenClassification": family(True, Classes()),
    }


CLASSIFIERS: dict[str, Family] = {
    **encoders("Bert", BERT, "bert"),
    **encoders("Roberta", ROBERTA, "roberta"),
    **encoders("MegatronBert", MEGATRON_BERT, "bert"),
    **decoders("Llama", LLAMA),
    **decoders("Mistral", MISTRAL),
    **decoders("Qwen2", QWEN2),
    **decoders("Qwen3", QWEN3),
}
BODIES = dict.fromkeys(name.partition("For")[0] for name in CLASSIFIERS)
NAMES = f"{', '.join(OBJECTIVES)} of {', '.join(BODIES)}"  # as messages list them
