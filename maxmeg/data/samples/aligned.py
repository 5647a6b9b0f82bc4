"""Pairs of texts for sequence-to-sequence training: sequence n of one corpus is the source of
sequence n of another (maxmeg preprocess --aligned)."""

import logging
from collections.abc import Sequence

import numpy as np

from maxmeg.data.chat.template import hugging_face_folder
from maxmeg.data.corpus.indexed import IndexedDataset, check_vocabulary
from maxmeg.data.corpus.loss_weights import report_no_loss
from maxmeg.data.opening import Opening
from maxmeg.data.samples.dataset import SPLITS, EpochRows, Record, identify, identify_weights
from maxmeg.data.samples.sampling import Batch, EpochOrder, empty_batch, nonempty_range
from maxmeg.data.tokenizers.load import parse_spec
from maxmeg.data.tokenizers.tokenizer import Tokenizer, json_object
from maxmeg.data.workers import RebuiltInWorkers

logger = logging.getLogger("maxmeg")
_PAIRS = 4  # key of the permutations of pairs; packing has 2 and 3


def start_token(tokenizer: Tokenizer, stated: int = -1) -> int:
    """The token that a target begins with, before what the decoder predicts.

    It is the bos of data.tokenizer; else data.start_token (`stated`); else decoder_start_token_id
    of the config.json beside a tokenizer.json; else the first of the tokenizer's bos, padding and
    end of text.
    """
    has_bos = "bos" in parse_spec(tokenizer.spec).roles
    if stated >= 0 and not has_bos:
        return stated
    folder = None if has_bos else hugging_face_folder(tokenizer)
    first = json_object(folder / "config.json").get("decoder_start_token_id") if folder else None
    choices = (first, tokenizer.bos, tokenizer.pad, tokenizer.eod)
    return next(token for token in choices if token is not None)


class AlignedDataset(EpochRows, RebuiltInWorkers):
    """Batches of one split (0 train, 1 validation, 2 test) of two corpora.

    corpora: of sources and of targets. lengths: tokens of a row of each. The source ends with the
    tokenizer's end of text; the target begins with `start_token`, and its last target is the end of
    text. The targets have the weight of their document in the loss. cuts: pairs that are too long
    are cut, and otherwise left out; `num_long` is their number. ids: number of valid ids, 0 for the
    tokenizer's, and data.start_token.
    """

    def __init__(
        self,
        corpora: Sequence[IndexedDataset],
        split: str,
        split_index: int,
        lengths: tuple[int, int],
        tokenizer: Tokenizer,
        cuts: bool,
        seed: int,
        ids: tuple[int, int] = (0, -1),
    ) -> None:
        sources, targets = self.corpora = list(corpora)
        if len(sources) != len(targets):
            raise ValueError(
                f"{sources.prefix} has {len(sources)} sequences and {targets.prefix} "
                f"{len(targets)}: make both by one maxmeg preprocess --aligned"
            )
        names = f"pairs of {sources.prefix} and {targets.prefix}"
        self._range = begin, end = nonempty_range(split, split_index, len(sources), names)
        room = np.array(lengths) - 1  # the end of text, or the first token
        sizes = np.stack([corpus.lengths[begin:end] for corpus in self.corpora], axis=1)
        fits = (sizes <= room).all(axis=1)
        self.num_long = int((~fits).sum())
        self._pairs = begin + np.flatnonzero(fits | cuts)
        if not len(self._pairs):
            raise ValueError(
                f"all {end - begin} {names} are too long for {lengths[0]} tokens of source and "
                f"{lengths[1]} of target: raise data.source_length and data.sequence_length, or "
                "set data.too_long=truncate"
            )
        weights, self._weights = (corpus.weights_of(self._pairs) for corpus in self.corpora)
        if (differ := weights != self._weights).any():
            pair = int(np.argmax(differ))
            raise ValueError(
                f"pair {self._pairs[pair]} has weight {weights[pair]} in {sources.prefix} and "
                f"{self._weights[pair]} in {targets.prefix}: make both by one maxmeg preprocess "
                "--aligned"
            )
        if not self._weights.any():
            report_no_loss(SPLITS[split_index], [corpus.prefix for corpus in self.corpora])
        self.source_length, self.sequence_length = lengths
        self.vocab_size, self._seed = ids[0] or tokenizer.vocab_size, seed
        self._first, self._end = start_token(tokenizer, ids[1]), tokenizer.eod
        self._order = EpochOrder(len(self._pairs), seed, _PAIRS, shuffle=split_index == 0)

    def __str__(self) -> str:
        return f"{len(self._pairs):,} pairs, {self.num_long:,} too long"

    @property
    def num_tokens(self) -> int:
        return int(self.corpora[1].lengths[self._pairs].sum(dtype=np.int64))

    @property
    def description(self) -> Record:
        return {
            "order": "pairs",
            "corpora": identify(self.corpora, [self._range] * 2),
            "sequence_length": self.sequence_length,
            "source_length": self.source_length,
            "seed": self._seed,
            "num_pairs": len(self._pairs),
            **identify_weights(self.corpora),
        }

    def batch(self, indices: np.ndarray) -> Batch:
        """The pairs with these numbers, any >= 0; arrays as of T5Dataset.batch."""
        S, L = self.source_length, self.sequence_length
        batch = empty_batch(len(indices), L, S)
        batch["positions"][:] = np.arange(L)
        rows = self._order(indices)
        weighted = zip(self._pairs[rows].tolist(), self._weights[rows].tolist(), strict=True)
        for row, (number, weight) in enumerate(weighted):
            source, target = (corpus.get(number) for corpus in self.corpora)
            source = [*source[: S - 1].tolist(), self._end]
            target = [self._first, *target[: L - 1].tolist(), self._end]
            batch["encoder_tokens"][row, : len(source)] = source
            batch["encoder_segment_ids"][row, : len(source)] = 1
            for name, values in (("tokens", target[:-1]), ("targets", target[1:])):
                batch[name][row, : len(values)] = values
            batch["segment_ids"][row, : len(target) - 1] = 1
            batch["loss_mask"][row, : len(target) - 1] = weight
        for corpus, name in zip(self.corpora, ("encoder_tokens", "tokens"), strict=True):
            check_vocabulary(batch[name], self.vocab_size, f"{corpus.prefix}.bin")
        return batch


def open_aligned(opening: Opening) -> AlignedDataset | None:
    """Pairs from a split of two corpora; None where another split than training has none."""
    config, names = opening.config, opening.names
    if len(names) != 2:
        raise ValueError(
            f"data.objective=seq2seq reads two corpora, SOURCE,TARGET, not {len(names)} "
            f"({', '.join(names)}): name the two files of maxmeg preprocess --aligned"
        )
    corpora = [opening.corpus(name) for name in names]
    if opening.may_skip(len(corpora[0])):
        return None
    lengths, cuts = (config.source_tokens, config.sequence_length), config.too_long.value
    rest = lengths, opening.tokenizer, cuts == "truncate", opening.seed
    ids = opening.num_ids, config.start_token
    data = AlignedDataset(corpora, opening.split, opening.index, *rest, ids)
    logger.info("%s: %s", opening.name, data)
    return data
