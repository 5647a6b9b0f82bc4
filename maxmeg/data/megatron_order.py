"""Megatron-LM's order of GPT samples: shuffled documents of all epochs, cut, and shuffled again.

Where a sample starts is found in the cumulative lengths of the documents in their order, which
gives Megatron's `sample_index` without an array of its size. The two permutations are those of
one `numpy.random.RandomState(seed)`; they are made once on a node and memory-mapped.
"""

import dataclasses

import numpy as np

from maxmeg.data.sampling import Pieces, Samples, cut
from maxmeg.data.stored import Arrays, digest, stored

_LAST_EPOCH = 0.80  # a last epoch of which less is used is shuffled by itself
_SMALL = 1 << 18  # entries that are made sooner than found in files
_KEYS = ("documents", "ends", "shuffle")


@dataclasses.dataclass(frozen=True)
class MegatronOrder:
    """What decides the order beside corpus, seed and sequence length.

    num_samples: how many are asked for (they decide the number of epochs, which are shuffled
    together); None is one epoch. cache_dir: of the permutations; empty keeps them in memory.
    """

    num_samples: int | None = None
    cache_dir: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Epochs that hold the samples asked for, and which samples are shuffled together."""

    num_epochs: int
    num_samples: int  # of all epochs
    first_samples: int  # shuffled together; the rest, of a separate last epoch, by themselves

    @property
    def has_separate_epoch(self) -> bool:
        return self.first_samples < self.num_samples


def plan_epochs(num_tokens: int, sequence_length: int, requested: int | None) -> Plan:
    """Megatron-LM's rule; num_tokens of one epoch >= 1."""
    if requested is None:
        requested = max(0, num_tokens - 1) // sequence_length
    needed = requested * sequence_length + 1
    num_epochs = max(1, -(-needed // num_tokens))
    total = (num_epochs * num_tokens - 1) // sequence_length
    if num_epochs == 1:
        return Plan(1, total, total)
    before = ((num_epochs - 1) * num_tokens - 1) // sequence_length
    samples_per_epoch = (num_tokens - 1) // sequence_length
    separate = requested - before < int(_LAST_EPOCH * samples_per_epoch)
    return Plan(num_epochs, total, before if separate else total)


class MegatronSamples(Samples):
    """Sample n as parts of sequences, as Megatron-LM's GPTDataset has it.

    There are `num_samples`, at least as many as asked for; beyond them the first come again.
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
        self.num_samples = self.plan.num_samples
        self._seed = seed
        num_documents = self.plan.num_epochs * len(self.lengths)
        small = num_documents + self.num_samples < _SMALL
        plan = dataclasses.astuple(self.plan)
        self.identity = ("megatron", self.num_tokens, sequence_length, seed, *plan)
        name = "" if small or not order.cache_dir else digest(1, plan, seed, self.lengths)
        folder = order.cache_dir if name else ""
        arrays = stored(folder, f"megatron_order-{name}", _KEYS, self._make)
        self.documents, self.ends, self.shuffle = (arrays[key] for key in _KEYS)
        sizes = (len(self.documents), len(self.ends), len(self.shuffle))
        if sizes != (num_documents, num_documents, self.num_samples):
            raise ValueError(f"{folder}/megatron_order-{name} is damaged: delete this folder")

    def pieces(self, samples: np.ndarray) -> Pieces:
        """Parts of these samples; O(log documents) for each."""
        samples = self.checked(samples) % self.num_samples
        # As int64: searching with another type would convert the whole of `ends`.
        start = self.shuffle[samples].astype(np.int64) * self.sequence_length
        stop = start + self.sequence_length + 1
        return cut(self.lengths, self.documents, self.ends, start, stop)

    def boundaries(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of Megatron's `sample_index`: places in `documents`, and offsets there."""
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
