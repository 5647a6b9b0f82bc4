"""Formats of labelled data: the columns and the classes of published sets. No JAX."""

import dataclasses
import enum


class Format(enum.Enum):
    suffix = "suffix"
    cola = "cola"
    sst2 = "sst2"
    mrpc = "mrpc"
    qqp = "qqp"
    mnli = "mnli"
    snli = "snli"
    qnli = "qnli"
    rte = "rte"
    wnli = "wnli"
    race = "race"
    conll = "conll"


class Scored(enum.Enum):
    first = "first"
    last = "last"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A tab-separated file. columns: names in its header line, of the text or the two texts, then
    of the label. labels: in the order of the classes. numbered: labels stand as numbers in the
    file. header: names of all columns of a file without a header line. skipped: a label whose rows
    are left out."""

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    numbered: bool = True
    header: tuple[str, ...] = ()
    skipped: str = ""


ENTAILMENT = ("entailment", "not_entailment")
INFERENCE = ("contradiction", "entailment", "neutral")  # Megatron-LM's order
GLUE = {
    Format.cola: Layout(
        ("sentence", "label"),
        ("unacceptable", "acceptable"),
        header=("source", "label", "mark", "sentence"),
    ),
    Format.sst2: Layout(("sentence", "label"), ("negative", "positive")),
    Format.mrpc: Layout(("#1 String", "#2 String", "Quality"), ("not_equivalent", "equivalent")),
    Format.qqp: Layout(("question1", "question2", "is_duplicate"), ("not_duplicate", "duplicate")),
    Format.mnli: Layout(("sentence1", "sentence2", "gold_label"), INFERENCE, False, skipped="-"),
    Format.snli: Layout(("sentence1", "sentence2", "gold_label"), INFERENCE, False, skipped="-"),
    Format.qnli: Layout(("question", "sentence", "label"), ENTAILMENT, False),
    Format.rte: Layout(("sentence1", "sentence2", "label"), ENTAILMENT, False),
    Format.wnli: Layout(("sentence1", "sentence2", "label"), ("not_entailment", "entailment")),
}
