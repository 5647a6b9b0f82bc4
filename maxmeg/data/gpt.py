"""Batches for language models: tokens, targets, loss mask, positions, segments."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.megatron_order import MegatronOrder, MegatronSamples
from maxmeg.data.sampling import GptSamples, Pieces, split_range

_PROBED = 64  # documents searched for an end-of-document id

SPLITS = ("train", "validation", "test")

Batch = dict[str, np.ndarray]
# (text, numbers of the samples) -> other text of that shape, and of each row how much is used
Transform = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class Dataset(Protocol):
    """What loaders and blends need of a dataset: a sample is a function of its number."""

    vocab_size: int
    sequence_length: int

    @property
    def num_tokens(self) -> int: ...

    @property
    def samples_per_epoch(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class DocumentRules:
    """What happens to documents inside a sample, and at their ends (DataConfig's fields)."""

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    fim: Transform | None = None

    @property
    def any(self) -> bool:
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


class GptDataset:
    """Batches of one split (0 train, 1 validation, 2 test) of one or more corpora.

    Each corpus is split by itself; the ranges are read one after the other. With an `order` the
    samples are Megatron-LM's, from `seed`; without, those of training are in our own order and
    the others in reading order. An end-of-document id belongs to the document before it:
    positions and segments change after it. Segments count from 1.
    """

    def __init__(
        self,
        corpora: Sequence[IndexedDataset],
        split: str,
        split_index: int,
        sequence_length: int,
        vocab_size: int,
        seed: int = 0,
        rules: DocumentRules = DocumentRules(),
        order: MegatronOrder | None = None,
    ) -> None:
        part = (corpora, split, split_index)
        self._arguments = (*part, sequence_length, vocab_size, seed, rules, order)
        self.corpora = list(corpora)
        self.split_index = split_index
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.rules = rules
        ranges = [split_range(split, split_index, len(c)) for c in self.corpora]
        self.ranges = ranges  # the split's sequences [begin, end) of each corpus
        self._begins = np.array([begin for begin, _ in ranges])
        self._bounds = np.cumsum([0] + [end - begin for begin, end in ranges])
        lengths = [c.lengths[a:b] for c, (a, b) in zip(self.corpora, ranges, strict=True)]
        for corpus in self.corpora:
            if corpus.dtype.kind not in "iu":
                raise ValueError(f"{corpus.prefix}.bin holds {corpus.dtype}, not token ids")
        joined = lengths[0] if len(lengths) == 1 else np.concatenate(lengths)
        try:
            if order is None:
                self.samples = GptSamples(joined, sequence_length, seed, shuffle=split_index == 0)
            else:
                self.samples = MegatronSamples(joined, sequence_length, seed, order)
        except ValueError as error:
            names = ", ".join(c.prefix for c in self.corpora)
            raise ValueError(f"{SPLITS[split_index]} split {split!r} of {names}: {error}") from None
        if rules.any:
            self._check_eod()

    def __reduce__(self) -> tuple:
        return GptDataset, self._arguments

    @property
    def num_tokens(self) -> int:
        """Tokens of the split, once through."""
        return self.samples.num_tokens

    @property
    def samples_per_epoch(self) -> int:
        return self.samples.samples_per_epoch

    @property
    def num_samples(self) -> int:
        """Samples of the order; of our own, in which epochs differ, those of one."""
        return self.samples.num_samples

    def batch(self, indices: np.ndarray) -> Batch:
        """Samples by number, any >= 0; every array is [len(indices), sequence_length].

        tokens, targets, positions int32; loss_mask float32; segment_ids int32 where attention
        stays within documents. ValueError for an id beyond the vocabulary.
        """
        indices, used = np.asarray(indices), None
        text = self._read(indices)
        if self.rules.fim is not None:
            text, used = self.rules.fim(text, indices)
        tokens = np.ascontiguousarray(text[:, :-1])
        batch = {"tokens": tokens, "targets": np.ascontiguousarray(text[:, 1:])}
        loss_mask = np.ones(tokens.shape, np.float32)
        if used is not None:  # padding is no target
            loss_mask[np.arange(self.sequence_length) >= used[:, None] - 1] = 0
        positions = np.arange(self.sequence_length, dtype=np.int32)
        batch["positions"] = np.tile(positions, (len(tokens), 1))
        batch["loss_mask"] = loss_mask
        if not self.rules.any:
            return batch
        is_eod = tokens == self.rules.eod
        if self.rules.eod_mask_loss:
            loss_mask[is_eod] = 0
        starts = np.zeros(tokens.shape, bool)
        starts[:, 1:] = is_eod[:, :-1]
        if self.rules.reset_position_ids:
            origin = np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
            batch["positions"] = (positions - origin).astype(np.int32)
        if self.rules.reset_attention_mask:
            batch["segment_ids"] = np.cumsum(starts, axis=1, dtype=np.int32) + 1
        return batch

    @property
    def reads_ahead(self) -> bool:
        """Whether `read_ahead` fetches anything."""
        return any(getattr(corpus, "is_remote", False) for corpus in self.corpora)

    def read_ahead(self, indices: np.ndarray) -> None:
        """Samples that will be asked for soon."""
        self._expect(*self._places(np.asarray(indices)), now=False)

    def _expect(self, pieces, corpus, local, starts: np.ndarray, now: bool) -> None:
        for i, dataset in enumerate(self.corpora if self.reads_ahead else ()):
            mine = corpus == i
            if mine.any():
                dataset.expect(starts[mine], pieces.lengths[mine], now)

    def _places(self, indices: np.ndarray) -> tuple[Pieces, np.ndarray, np.ndarray, np.ndarray]:
        """Parts of samples; of each the corpus, the sequence there, and the first token."""
        pieces = self.samples.pieces(indices)
        corpus = np.searchsorted(self._bounds, pieces.sequences, side="right") - 1
        local = pieces.sequences - self._bounds[corpus] + self._begins[corpus]
        starts = np.empty_like(local)
        for i, dataset in enumerate(self.corpora):
            mine = slice(None) if len(self.corpora) == 1 else corpus == i
            starts[mine] = dataset.starts(local[mine])
        starts += pieces.offsets
        return pieces, corpus, local, starts

    def _read(self, indices: np.ndarray) -> np.ndarray:
        """The samples' tokens, [len(indices), sequence_length + 1]."""
        pieces, corpus, local, starts = self._places(indices)
        self._expect(pieces, corpus, local, starts, now=True)
        wide = any(dataset.dtype.itemsize > 4 for dataset in self.corpora)
        dtype = np.int64 if wide else np.int32
        text = np.empty((len(indices), self.sequence_length + 1), dtype)
        flat = text.reshape(-1)
        sources = [dataset.tokens for dataset in self.corpora]
        at = 0
        for i, start, length in zip(
            corpus.tolist(), starts.tolist(), pieces.lengths.tolist(), strict=True
        ):
            flat[at : at + length] = sources[i][start : start + length]
            at += length
        if text.size and (text.max() >= self.vocab_size or text.min() < 0):
            self._explain_id(text, pieces, corpus, local)
        return text.astype(np.int32, copy=False)

    def _explain_id(self, text: np.ndarray, pieces, corpus: np.ndarray, local: np.ndarray) -> None:
        flat = text.reshape(-1)
        at = int(np.argmax((flat < 0) | (flat >= self.vocab_size)))
        piece = int(np.searchsorted(np.cumsum(pieces.lengths), at, side="right"))
        file = f"{self.corpora[corpus[piece]].prefix}.bin"
        raise ValueError(
            f"{file}, sequence {local[piece]}: id {flat[at]} is not in the vocabulary [0, "
            f"{self.vocab_size}): the corpus was made with another tokenizer; name that one"
        )

    def _check_eod(self) -> None:
        """The options that need ends of documents are refused where the corpus has none."""
        if self.rules.eod is None:
            raise ValueError("reset_* and eod_mask_loss need the tokenizer's end-of-document id")
        for corpus in self.corpora:
            chosen = np.linspace(0, len(corpus) - 1, min(_PROBED, len(corpus))).astype(int)
            ends = np.searchsorted(corpus.document_indices, chosen, side="right")
            last = np.minimum(corpus.document_indices[ends], len(corpus)) - 1
            probed = (corpus.get(int(i))[-(1 << 16) :] for i in np.unique(last))
            if not any((tokens == self.rules.eod).any() for tokens in probed):
                raise ValueError(
                    f"{corpus.prefix}.bin has no end-of-document id {self.rules.eod}, which "
                    "reset_position_ids, reset_attention_mask and eod_mask_loss need: prepare it "
                    "with --append_eod"
                )
