"""Samples for causal language models: tokens, targets, loss mask, positions, segments."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from maxmeg.data.corpus.indexed import IndexedDataset, check_vocabulary
from maxmeg.data.corpus.loss_weights import report_no_loss
from maxmeg.data.resuming import compare_orders
from maxmeg.data.samples.dataset import (
    SPLITS,
    Difference,
    Record,
    RecordedDataset,
    Use,
    identify,
    identify_weights,
)
from maxmeg.data.samples.megatron_order import MegatronOrder, make_samples
from maxmeg.data.samples.sampling import Batch, GptSamples, Pieces, split_range
from maxmeg.data.workers import RebuiltInWorkers

_PROBED = 64  # documents searched for an end-of-document id

# (text, numbers of the samples) -> text of that shape, and the tokens before padding of each row
Transform = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class DocumentRules:
    """How positions, segments and the loss change at the ends of documents (DataConfig's
    fields)."""

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    fim: Transform | None = None

    @property
    def any(self) -> bool:
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


class GptDataset(RecordedDataset, RebuiltInWorkers):
    """Batches of one split (0 train, 1 validation, 2 test) of one or more corpora.

    Each corpus is split by itself; the ranges are concatenated. With an `order` the samples are in
    Megatron-LM's order for `seed`. Without one, training samples are in maxmeg's own shuffled
    order, and the samples of other splits in reading order. An end-of-document token belongs to the
    document before it: positions and segments change after it. Segments count from 1.
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
                self.samples = make_samples(joined, sequence_length, seed, order)
        except ValueError as error:
            names = ", ".join(c.prefix for c in self.corpora)
            raise ValueError(f"{SPLITS[split_index]} split {split!r} of {names}: {error}") from None
        if not any(c.has_loss(*part) for c, part in zip(self.corpora, ranges, strict=True)):
            report_no_loss(SPLITS[split_index], [c.prefix for c in self.corpora])
        if rules.any:
            self._check_eod()

    @functools.cached_property
    def description(self) -> Record:
        return {
            "corpora": identify(self.corpora, self.ranges),
            "sequence_length": self.sequence_length,
            **self.samples.order,
            **identify_weights(self.corpora),
        }

    def record(self, consumed: int) -> list[Record]:
        records = super().record(consumed)
        for record in records:
            if "parts" in record:  # parts that have not begun may change
                record["parts"] = [part for part in record["parts"] if part[0] < consumed]
        return records

    def compare(self, saved: Sequence[Record], consumed: int) -> Difference:
        return compare_members(saved, [(self, consumed)])

    def uses(self, samples: float) -> list[Use]:
        uses = []
        for corpus, (begin, end) in zip(self.corpora, self.ranges, strict=True):
            tokens = int(corpus.lengths[begin:end].sum(dtype=np.int64))
            read = samples * tokens / max(self.num_tokens, 1)
            first, last = np.searchsorted(corpus.document_indices[:-1], [begin, end])
            epochs = read * self.sequence_length / max(tokens, 1)
            uses.append(Use(corpus.prefix, int(last - first), tokens, read, epochs))
        return uses

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch of the split."""
        return self.samples.num_tokens

    @property
    def samples_per_epoch(self) -> int:
        return self.samples.samples_per_epoch

    @property
    def num_samples(self) -> int:
        """Samples in the order, before it repeats; in the native order, the samples of one
        epoch."""
        return self.samples.num_samples

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples with these numbers, any >= 0; every array is [len(indices), sequence_length].

        tokens, targets and positions are int32; loss_mask is float32, the weight of the document
        that the target belongs to; segment_ids int32 is included if reset_attention_mask is set.
        ValueError for an id beyond the vocabulary.
        """
        indices, lengths = np.asarray(indices), None
        text = self._read(indices)
        weights = self._read_weights(indices)
        if self.rules.fim is not None:
            before = text
            text, lengths = self.rules.fim(before, indices)
            if self.is_weighted:
                weights = permuted_weights(weights, before, text, self.rules.eod)
        tokens = np.ascontiguousarray(text[:, :-1])
        batch = {"tokens": tokens, "targets": np.ascontiguousarray(text[:, 1:])}
        loss_mask = np.ascontiguousarray(weights[:, 1:])
        if lengths is not None:  # padding is not a target
            loss_mask[np.arange(self.sequence_length) >= lengths[:, None] - 1] = 0
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
        """Whether a corpus is in object storage, so that `read_ahead` has an effect."""
        return any(getattr(corpus, "is_remote", False) for corpus in self.corpora)

    def read_ahead(self, indices: np.ndarray) -> None:
        """Start to fetch samples that will be read soon."""
        self._expect(*self._places(np.asarray(indices)), now=False)

    def _expect(self, pieces, corpus, local, starts: np.ndarray, now: bool) -> None:
        for i, dataset in enumerate(self.corpora if self.reads_ahead else ()):
            in_corpus = corpus == i
            if in_corpus.any():
                dataset.expect(starts[in_corpus], pieces.lengths[in_corpus], now)

    def _places(self, indices: np.ndarray) -> tuple[Pieces, np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of samples, and of each piece the corpus, its sequence, and its first
        token."""
        pieces = self.samples.pieces(indices)
        corpus = np.searchsorted(self._bounds, pieces.sequences, side="right") - 1
        local = pieces.sequences - self._bounds[corpus] + self._begins[corpus]
        starts = np.empty_like(local)
        for i, dataset in enumerate(self.corpora):
            in_corpus = slice(None) if len(self.corpora) == 1 else corpus == i
            starts[in_corpus] = dataset.starts(local[in_corpus])
        starts += pieces.offsets
        return pieces, corpus, local, starts

    def _read(self, indices: np.ndarray) -> np.ndarray:
        """The tokens of the samples, [len(indices), sequence_length + 1]."""
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

        def where(wrong: int) -> str:
            piece = int(np.searchsorted(np.cumsum(pieces.lengths), wrong, side="right"))
            return f"{self.corpora[corpus[piece]].prefix}.bin, sequence {local[piece]}"

        check_vocabulary(text, self.vocab_size, where)
        return text.astype(np.int32, copy=False)

    @property
    def is_weighted(self) -> bool:
        """Whether documents of a corpus have weights in the loss."""
        return any(corpus.weights is not None for corpus in self.corpora)

    def _read_weights(self, indices: np.ndarray) -> np.ndarray:
        """The weight of each token's document, float32 [len(indices), sequence_length + 1]."""
        shape = (len(indices), self.sequence_length + 1)
        if not self.is_weighted:
            return np.ones(shape, np.float32)
        pieces, corpus, local, _ = self._places(indices)
        weights = np.empty(len(local), np.float32)
        for i, dataset in enumerate(self.corpora):
            weights[corpus == i] = dataset.weights_of(local[corpus == i])
        return np.repeat(weights, pieces.lengths).reshape(shape)

    def _check_eod(self) -> None:
        """ValueError where the rules need end-of-document tokens and a corpus has none."""
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


def permuted_weights(
    weights: np.ndarray, text: np.ndarray, permuted: np.ndarray, eod: int | None
) -> np.ndarray:
    """The weights of tokens, [samples, L], after fill-in-the-middle, which permutes tokens within
    documents and drops the ends of documents without other tokens. ValueError where a document
    begins without an end-of-document token before it."""
    if ((np.diff(weights) != 0) & (text[:, :-1] != eod)).any():
        raise ValueError(
            "data.fim_rate and weights of documents need an end-of-document token after every "
            "document: prepare the corpus with --append_eod"
        )
    result = np.empty_like(weights)
    for row, (old, new) in enumerate(zip(text == eod, permuted == eod, strict=True)):
        starts = np.flatnonzero(~old & np.append(True, old[:-1]))
        starts = np.append(starts, len(old) - 1)  # of tokens after the last end
        documents = np.cumsum(new) - new
        result[row] = weights[row, starts[np.minimum(documents, len(starts) - 1)]]
    return result


def compare_members(
    saved: Sequence[Record], members: Sequence[tuple[GptDataset, int]]
) -> Difference:
    """Compare datasets, each with a number of its samples, with a record, token by token."""
    corpora = {}
    for member, _ in members:
        for identity, corpus in zip(member.description["corpora"], member.corpora, strict=True):
            corpora[tuple(identity[:3])] = corpus
    after = [(record, member.samples) for member, n in members for record in member.record(n)]
    return compare_orders(saved, corpora, after)
