"""Batches of labelled examples: classes of texts and of words, and choices."""

import logging
import zlib

import numpy as np

from maxmeg.config.data import Objective
from maxmeg.data.corpus.indexed import check_vocabulary
from maxmeg.data.labelled.files import read_examples
from maxmeg.data.labelled.rows import Rows, encode_all
from maxmeg.data.opening import Opening
from maxmeg.data.samples.dataset import EpochRows, Record
from maxmeg.data.samples.sampling import Batch, EpochOrder, empty_batch

logger = logging.getLogger("maxmeg")
_KEY = 4  # of the order of examples; sampling and packing have 0 to 3


class LabelledDataset(EpochRows):
    """Each row is one example: its texts in order, each with positions of its own and apart from
    the others. Example n of a run depends on (n, seed) alone.

    between_choices: of a row's texts one is right. shuffle: another order in each epoch.
    """

    def __init__(
        self,
        rows: Rows,
        sequence_length: int,
        vocab_size: int,
        between_choices: bool = False,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.rows, self.sequence_length, self.vocab_size = rows, sequence_length, vocab_size
        self._between_choices, self._seed, self._shuffle = between_choices, seed, shuffle
        self._order = EpochOrder(len(rows), seed, _KEY, shuffle)

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        return len(self.rows.ids)

    @property
    def description(self) -> Record:
        ids = np.ascontiguousarray(self.rows.ids, "<i4")
        return {
            "documents": [len(self.rows), zlib.crc32(ids.tobytes())],
            "sequence_length": self.sequence_length,
            "seed": self._seed,
        }

    def batch(self, indices: np.ndarray) -> Batch:
        """The examples with these numbers, any >= 0; arrays are [len(indices), sequence_length].

        tokens, targets, positions, segment_ids (from 1 for each text; 0 is padding) and token_types
        (0 for a first text, 1 for a second) are int32, loss_mask float32. targets: classes where
        loss_mask is 1; between choices 1 at the token of each choice that is scored, and loss_mask
        1 at that of the right one.
        """
        rows, batch = self.rows, empty_batch(len(indices), self.sequence_length, 0, "token_types")
        for row, example in enumerate(self._order(np.asarray(indices)).tolist()):
            first, last = rows.firsts[example : example + 2].tolist()
            begin = int(rows.starts[first])
            size = int(rows.starts[last]) - begin
            labels = rows.labels[begin : begin + size]
            has_label = labels >= 0
            batch["tokens"][row, :size] = rows.ids[begin : begin + size]
            if self._between_choices:
                batch["targets"][row, :size] = has_label
                batch["loss_mask"][row, :size] = labels == 1
            else:
                batch["targets"][row, :size] = np.where(has_label, labels, 0)
                batch["loss_mask"][row, :size] = has_label
            for number, text in enumerate(range(first, last), 1):
                at, end = (rows.starts[text : text + 2] - begin).tolist()
                batch["positions"][row, at:end] = np.arange(end - at)
                batch["segment_ids"][row, at:end] = number
                batch["token_types"][row, at + int(rows.seconds[text]) : end] = 1
        return batch


def open_labelled(opening: Opening) -> LabelledDataset | None:
    """The examples of a split of files; None where another split than training has none.
    ValueError as `read_examples` and `encode_all`, and for ids beyond the vocabulary."""
    config, files, is_training = opening.config, ", ".join(opening.names), opening.index == 0
    examples = []
    for name in opening.names:
        rows = read_examples(config, name)
        begin, end = opening.range(len(rows))
        examples += rows[begin:end]
    if not examples and not is_training:
        return None
    if not examples:
        raise ValueError(
            f"data.split={opening.split!r} leaves no example of {files} for training: give it more "
            "weight"
        )
    rows, counts = encode_all(config, opening.tokenizer, examples, may_drop=is_training)
    logger.info("%s examples of %s: %s", opening.name, files, counts)
    choices, size = config.objective is Objective.choose, opening.num_ids
    check_vocabulary(rows.ids, size, files)
    return LabelledDataset(rows, config.sequence_length, size, choices, opening.seed, is_training)
