"""Probabilities of the classes of texts, pairs, words and choices, by a model with a classifier."""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmeg.config.data import Objective, TooLong
from maxmeg.data.labelled.dataset import LabelledDataset
from maxmeg.data.labelled.files import Example, Words
from maxmeg.data.labelled.rows import encode_all
from maxmeg.inference.load import Trained
from maxmeg.inference.requests import check_ids
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM

BATCH, MULTIPLE = 32, 32  # examples at a time; lengths are padded to multiples: few compiles
Text = str | tuple[str, str]


def class_probabilities(
    trained: Trained,
    program: Callable,
    examples: Sequence[Text | Sequence[Text]],
    truncate: bool = False,
) -> list[Float[np.ndarray, "..."]]:
    """Return float32 probabilities for each example. program: `logits`, jitted.

    With data.objective=classify an example is a text or a pair of texts, and has [C] of them;
    choose: its choices, texts or pairs (choice, context), [choices]; tag: words, [words, C] (nan in
    place of words without a token). truncate: cut examples that exceed the context. ValueError for
    these otherwise, and for a model without a classifier.
    """
    config, objective = trained.config.model, trained.config.data.objective
    if not (config.head.num_classes and objective.is_labelled):
        raise ValueError(
            f"model.head.num_classes={config.head.num_classes}, data.objective={objective.value}: "
            "the model has no classifier; train one with --config=classify:FOLDER"
        )
    room = config.max_position - config.bert.position_offset
    too_long = TooLong.truncate if truncate else TooLong.drop
    settings = {"sequence_length": room, "too_long": too_long}
    data = dataclasses.replace(trained.config.data, **settings)
    rows, _ = encode_all(
        data,
        trained.tokenizer,
        [read(objective, number, example) for number, example in enumerate(examples)],
        may_drop=False,
    )
    check_ids(rows.ids, config.vocab_size, tokenizer=trained.tokenizer)
    dataset = LabelledDataset(rows, room, config.vocab_size, shuffle=False)
    results: list[np.ndarray] = [np.zeros(0)] * len(rows)
    order = np.argsort(-rows.lengths, kind="stable")
    for first in range(0, len(order), BATCH):
        numbers = np.resize(order[first : first + BATCH], min(BATCH, len(order)))
        length = min(-(-int(rows.lengths[numbers].max()) // MULTIPLE) * MULTIPLE, room)
        names = ("tokens", "positions", "segment_ids", "token_types")
        batch = dataset.batch(numbers)
        arrays = (jnp.asarray(batch[name][:, :length]) for name in names)
        logits_BLC = np.asarray(program(trained.model, *arrays))
        for row, number in enumerate(numbers[: len(order) - first].tolist()):
            begin, end = rows.starts[rows.firsts[number : number + 2]]
            labels = rows.labels[begin:end]
            places = np.flatnonzero(labels >= 0)
            scores = logits_BLC[row, places]
            scores = scores[:, 0] if objective is Objective.choose else scores
            values = np.asarray(jax.nn.softmax(scores))
            if objective is Objective.tag:
                words = np.full((len(examples[number]), values.shape[1]), np.nan, np.float32)
                words[labels[places]] = values
                values = words
            results[number] = values[0] if objective is Objective.classify else values
    return results


def read(objective: Objective, number: int, example: Text | Sequence[Text]) -> Example | Words:
    """An example without its label; of words the labels are their numbers."""
    place = f"example {number}"
    if objective is Objective.tag:
        if isinstance(example, str) or not all(isinstance(word, str) for word in example):
            raise ValueError(f"{place}: give a list of words")
        return Words(place, tuple(map(str, example)), tuple(range(len(example))))
    texts = list(example) if objective is Objective.choose else [example]
    pairs: list[typing.Any] = [(t, "") if isinstance(t, str) else tuple(t) for t in texts]
    if any(len(pair) != 2 or not all(isinstance(part, str) for part in pair) for pair in pairs):
        raise ValueError(f"{place}: {example!r:.80} is neither a text nor a pair of texts")
    return Example(place, tuple(pairs), 0)


def logits(
    model: LM,
    ids_BL: Int[Array, "B L"],
    positions_BL: Int[Array, "B L"],
    segments_BL: Int[Array, "B L"],
    types_BL: Int[Array, "B L"],
) -> Float[Array, "B L C"]:
    """float32 logits of each token."""
    ctx = Context(positions_BL, segments_BL, token_types_BL=types_BL, sequence_sharded=False)
    return model.hidden(ids_BL, ctx)[0]
