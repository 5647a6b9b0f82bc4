"""Megatron-LM's order of GPT samples: the documents of all epochs are shuffled, cut into samples,
and the samples are shuffled.

The start of a sample is found in the cumulative lengths of the shuffled documents, which gives
Megatron-LM's `sample_index` without an array of that size. The two permutations are those of
`numpy.random.RandomState(seed)`; they are computed once per node and memory-mapped.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from maxmeg.data.corpus.stored import cached, digest
from maxmeg.data.samples.sampling import Pieces, Samples, check_epochs, check_indices, cut, joined
from maxmeg.data.workers import Arrays

_LAST_EPOCH = 0.80  # a last epoch that is used less than this is shuffled by itself
_SMALL = 1 << 18  # fewer entries than this: computing them is faster than a cache
_KEYS = ("documents", "ends", "shuffle")


@dataclasses.dataclass(frozen=True)
class MegatronOrder:
    """The settings that decide the order, besides corpus, seed and sequence length.

    num_samples: samples that the run reads; they decide the number of epochs that are shuffled
    together. None means one epoch. cache_dir: the folder for the permutations; empty keeps them in
    memory. parts: (first sample, num_samples) of each part of the order of a run whose length was
    changed, from `continued`; empty for an order of one part. max_epochs: as data.max_epochs.
    """

    num_samples: int | None = None
    cache_dir: str = ""
    parts: tuple[tuple[int, int | None], ...] = ()
    max_epochs: float = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The number of epochs for the samples that a run reads, and which samples are shuffled
    together."""

    num_epochs: int
    num_samples: int  # in all epochs
    first_samples: int  # shuffled together; the samples of a separate last epoch follow

    @property
    def has_separate_epoch(self) -> bool:
        return self.first_samples < self.num_samples


def plan_epochs(num_tokens: int, sequence_length: int, requested: int | None) -> Plan:
    """Megatron-LM's rule; num_tokens: tokens per epoch, at least 1."""
    if requested is None:
        requested = max(0, num_tokens - 1) // sequence_length
    num_needed = requested * sequence_length + 1
    num_epochs = max(1, -(-num_needed // num_tokens))
    total = (num_epochs * num_tokens - 1) // sequence_length
    if num_epochs == 1:
        return Plan(1, total, total)
    before = ((num_epochs - 1) * num_tokens - 1) // sequence_length
    samples_per_epoch = (num_tokens - 1) // sequence_length
    separate = requested - before < int(_LAST_EPOCH * samples_per_epoch)
    return Plan(num_epochs, total, before if separate else total)


class MegatronSamples(Samples):
    """Sample n as pieces of sequences, in the order of Megatron-LM's GPTDataset.

    There are `num_samples` samples, at least as many as requested; after the last one they repeat.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        sequence_length: int,
        seed: int = 0,
        order: MegatronOrder = MegatronOrder(),
    ) -> None:
        super().__init__(lengths, sequence_length)
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} must lie in [0, 2^32) for Megatron's order")
        requested = order.num_samples
        if requested is not None and requested < 1:
            raise ValueError(f"num_samples={requested} must be at least 1")
        if not self.num_tokens or not (self.samples_per_epoch or requested):
            raise self.too_small()
        self.plan = plan_epochs(self.num_tokens, sequence_length, requested)
        check_epochs(self.plan.num_epochs, order.max_epochs)
        self.num_samples = self.plan.num_samples
        self._seed = seed
        num_documents = self.plan.num_epochs * len(self.lengths)
        small = num_documents + self.num_samples < _SMALL
        self.order = {"order": "megatron", "seed": seed, "parts": [[0, requested]]}
        plan = dataclasses.astuple(self.plan)
        name = "" if small or not order.cache_dir else digest(1, plan, seed, self.lengths)
        folder = order.cache_dir if name else ""
        arrays = cached(folder, f"megatron_order-{name}", _KEYS, self._make)
        self.documents, self.ends, self.shuffle = (arrays[key] for key in _KEYS)
        sizes = (len(self.documents), len(self.ends), len(self.shuffle))
        if sizes != (num_documents, num_documents, self.num_samples):
            raise ValueError(f"{folder}/megatron_order-{name} is damaged: delete this folder")

    def pieces(self, samples: np.ndarray) -> Pieces:
        """The pieces of these samples; O(log documents) per sample."""
        samples = check_indices(samples) % self.num_samples
        # As int64: searching with another type would convert the whole of `ends`.
        start = self.shuffle[samples].astype(np.int64) * self.sequence_length
        stop = start + self.sequence_length + 1
        return cut(self.lengths, self.documents, self.ends, start, stop)

    def boundaries(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of Megatron-LM's `sample_index`: positions in `documents`, and token offsets
        there."""
        start = np.asarray(samples, np.int64) * self.sequence_length
        places = np.searchsorted(self.ends, start, side="right")
        offsets = start - (self.ends[places] - self.lengths[self.documents[places]])
        return np.where(start == 0, 0, places), offsets

    def _make(self) -> Arrays:
        random, plan = np.random.RandomState(self._seed), self.plan
        count, separate = len(self.lengths), int(plan.has_separate_epoch)
        each = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
        parts = [np.tile(each, plan.num_epochs - separate), *[each] * separate]
        for part in parts:
            random.shuffle(part)
        documents = np.concatenate(parts)
        wide = plan.num_samples >= np.iinfo(np.uint32).max - 1
        shuffle = np.arange(plan.num_samples, dtype=np.int64 if wide else np.uint32)
        random.shuffle(shuffle[: plan.first_samples])
        if separate:
            random.shuffle(shuffle[plan.first_samples :])
        ends = np.cumsum(self.lengths[documents], dtype=np.int64)
        return {"documents": documents, "ends": ends, "shuffle": shuffle}


class ContinuedSamples(Samples):
    """Several orders one after the other; order i begins with sample `starts[i]`."""

    def __init__(self, parts: Sequence[MegatronSamples], starts: Sequence[int]) -> None:
        super().__init__(parts[0].lengths, parts[0].sequence_length)
        self._parts, self._starts = list(parts), np.array(starts)
        requested = [part.order["parts"][0][1] for part in parts]
        self.order = {
            **parts[0].order,
            "parts": [list(part) for part in zip(starts, requested, strict=True)],
        }
        self.num_samples = starts[-1] + parts[-1].num_samples

    def pieces(self, samples: np.ndarray) -> Pieces:
        """The pieces of these samples; beyond `num_samples` the last order repeats."""
        samples = check_indices(samples)
        part_numbers = np.searchsorted(self._starts, samples, side="right") - 1
        parts = []
        for part in np.unique(part_numbers):
            rows = np.flatnonzero(part_numbers == part)
            pieces = self._parts[part].pieces(samples[rows] - self._starts[part])
            parts.append(dataclasses.replace(pieces, rows=rows[pieces.rows]))
        return joined(parts)


def make_samples(
    lengths: np.ndarray, sequence_length: int, seed: int, order: MegatronOrder
) -> MegatronSamples | ContinuedSamples:
    """The samples of an order with one or more parts; each later part has its own seed."""
    if len(order.parts) < 2:
        num_samples = order.parts[0][1] if order.parts else order.num_samples
        order = dataclasses.replace(order, num_samples=num_samples, parts=())
        return MegatronSamples(lengths, sequence_length, seed, order)
    parts = [
        MegatronSamples(
            lengths,
            sequence_length,
            (seed + start) % 2**32,
            MegatronOrder(requested, order.cache_dir),
        )
        for start, requested in order.parts
    ]
    return ContinuedSamples(parts, [start for start, _ in order.parts])


def continued(
    parts: Sequence[tuple[int, int | None]],
    size: tuple[int, int],
    consumed: int,
    num_requested: int | None,
) -> tuple[tuple[int, int | None], ...]:
    """`MegatronOrder.parts` of a run that read `consumed` samples and needs `num_requested` in all.

    parts: the parts that the run has begun, which do not change. If they hold too few samples,
    another part follows at the end of the last complete pass. size: (tokens per epoch, sequence
    length).
    """
    all_parts = list(parts)
    start, count = all_parts[-1]
    num_samples = plan_epochs(*size, count).num_samples
    end = start + num_samples * max(1, -(-(consumed - start) // num_samples))
    if num_requested is not None and num_requested > end:
        all_parts.append((end, num_requested - end))
    return tuple(all_parts)
