"""Blends of several datasets: their weights, Megatron-LM's order of members, and batches."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import yaml

from maxmeg.data.corpus.stored import cached, digest
from maxmeg.data.resuming import record_order
from maxmeg.data.samples.dataset import Dataset, Difference, Record, RecordedDataset, Use
from maxmeg.data.samples.gpt import GptDataset, compare_members
from maxmeg.data.samples.sampling import Batch, check_indices
from maxmeg.data.workers import Arrays, RebuiltInWorkers

MOST_MEMBERS = 32766
_BLOCK = 4096  # samples between two stored counts
_RUN_IN = 2048  # samples before a piece in which guessed counts approach the true counts
_LEAST_PIECES = 8  # per member; with fewer pieces one sample at a time is faster
_MOST_PIECES = 1024
_SMALL = 1 << 12  # fewer samples than this: computing them is faster than a cache
_KEYS = ("turns", "counts")

Items = Sequence[str | int | float]
SPLIT_NAMES = (("train",), ("validation", "valid"), ("test",))


def parse_blend(items: Items) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of `0.7 a 0.3 b`; the weights are None for `a b`.

    As in Megatron-LM, weights are given if the number of items is even and every other is a number.
    """
    if not items:
        raise ValueError("a blend must name at least one prefix of .bin/.idx files")
    numbers = [_number(item) for item in items[::2]]
    if len(items) % 2 or not any(number is not None for number in numbers):
        return [str(item).strip() for item in items], None
    weights = [number for number in numbers if number is not None]
    if len(weights) != len(numbers):
        place = numbers.index(None)
        raise ValueError(
            f"blend {' '.join(map(str, items))!r} has {items[2 * place]!r} in place of a "
            "weight: write weight and prefix in turn, or prefixes alone"
        )
    prefixes = [str(item).strip() for item in items[1::2]]
    check_weights(weights, prefixes)
    return prefixes, weights


def check_weights(weights: Sequence[float], prefixes: Sequence[str]) -> None:
    """ValueError for weights that are not positive numbers, and for too many corpora."""
    for weight, prefix in zip(weights, prefixes, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"weight {weight:g} of {prefix} must be a positive number: leave out corpora "
                "that should not be read"
            )
    if len(prefixes) > MOST_MEMBERS:
        raise ValueError(f"a blend has at most {MOST_MEMBERS} corpora, not {len(prefixes)}")


def read_blend(path: str) -> Items | dict[int, Items]:
    """The blend in a YAML or JSON file; a dict by split number where the file has several sets.

    The file holds a list `[0.7, a, 0.3, b]`, the same words as plain text, or a mapping of train,
    validation (or valid) and test to such lists.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ValueError(f"cannot read data.blend={path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"data.blend={path} is neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict):
        return _items(content, path)
    splits = {}
    for name, items in content.items():
        index = next((i for i, names in enumerate(SPLIT_NAMES) if name in names), None)
        if index is None or index in splits:
            raise ValueError(
                f"data.blend={path} has the set {name!r}: the sets are train, validation and "
                "test, each once"
            )
        if items is not None:  # Megatron-LM's files have null for a missing set
            splits[index] = _items(items, f"{path}, {name}")
    return splits


def _items(content, where: str) -> Items:
    items = content.split() if isinstance(content, str) else content
    wrong = not isinstance(items, list) or any(
        isinstance(item, bool) or not isinstance(item, (str, int, float)) for item in items
    )
    if wrong or not items:
        raise ValueError(
            f"data.blend={where}: {str(content)[:80]!r} is neither a list of weights and prefixes, "
            "like [0.7, a, 0.3, b], nor a mapping of train, validation and test to such lists"
        )
    return items


def _number(item: str | int | float) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, rounded as Megatron-LM rounds them."""
    values = np.array(weights, np.float64)
    return (values / np.sum(values)).tolist()


def member_sizes(shares: Sequence[float], size: int, surplus: float) -> tuple[list[int], int]:
    """Samples to make of every member, and of the blend, for a blend of `size` samples."""
    counts = [math.ceil(size * share) for share in shares]
    return [math.ceil(count * (1 + surplus)) for count in counts], sum(counts)


def blending_index(shares: Sequence[float], size: int) -> np.ndarray:
    """The member of each of `size` samples: the member furthest below its share of the samples so
    far.

    Equals Megatron-LM's float64 arithmetic; among equals the first member is taken. Returns int16.
    Long indices are computed in pieces side by side: the counts at the start of a piece are
    guessed, and nearly right counts soon lead to the true order. Each guess is compared with the
    true counts at the end of the piece before; a piece with a wrong guess is computed again.
    """
    num_pieces = min(_MOST_PIECES, size // (2 * _RUN_IN))
    if num_pieces < _LEAST_PIECES * len(shares):
        return _take_turns(np.array(shares), 0, np.zeros(len(shares)), size)[0]
    length = -(-size // num_pieces)
    starts = np.arange(num_pieces) * length
    begins = np.zeros((len(shares), num_pieces))
    run_in = starts[1:] - _RUN_IN
    begins[:, 1:] = _take_turns_abreast(shares, run_in, _rounded(shares, run_in), _RUN_IN)
    turns = np.empty((num_pieces, length), np.int16)
    ends = _take_turns_abreast(shares, starts, begins.copy(), length, turns)
    true_counts = ends[:, 0]
    for piece in range(1, num_pieces):
        if np.array_equal(true_counts, begins[:, piece]):
            true_counts = ends[:, piece]
        else:
            start = int(starts[piece])
            turns[piece], true_counts = _take_turns(np.array(shares), start, true_counts, length)
    return turns.reshape(-1)[:size]


def _take_turns(
    shares: np.ndarray,
    start: int,
    counts: np.ndarray,
    size: int,
    limits: np.ndarray | float = np.inf,
) -> tuple[np.ndarray, np.ndarray]:
    """The member of each of `size` samples from number `start` on, and the members' counts after.

    limits: samples that each member has; a member without samples left is passed over.
    """
    turns, counts, lags = np.empty(size, np.int16), counts.copy(), np.empty(len(shares))
    for i in range(size):
        np.multiply(shares, float(start + i or 1), out=lags)
        np.subtract(lags, counts, out=lags)
        lags[counts >= limits] = -np.inf
        member = lags.argmax()
        turns[i] = member
        counts[member] += 1
    return turns, counts


def _take_turns_abreast(
    shares: Sequence[float],
    starts: np.ndarray,
    counts: np.ndarray,
    size: int,
    turns: np.ndarray | None = None,
) -> np.ndarray:
    """Like `_take_turns`, for many starts at once; updates counts [members, starts] in place."""
    num_starts = len(starts)
    at, most, lag = starts.astype(float), np.empty(num_starts), np.empty(num_starts)
    turn, is_more = np.empty(num_starts, np.int64), np.empty(num_starts, bool)
    columns, flat = np.arange(num_starts), counts.reshape(-1)
    for i in range(size):
        clipped = np.maximum(at, 1.0)
        most.fill(-np.inf)
        for member, share in enumerate(shares):
            np.multiply(clipped, share, out=lag)
            np.subtract(lag, counts[member], out=lag)
            np.greater(lag, most, out=is_more)
            np.maximum(lag, most, out=most)
            np.copyto(turn, member, where=is_more)
        if turns is not None:
            turns[:, i] = turn
        flat[turn * num_starts + columns] += 1
        at += 1
    return counts


def _rounded(shares: Sequence[float], places: np.ndarray) -> np.ndarray:
    """Estimated counts at these sample numbers: the shares, rounded so that they add up."""
    exact = np.outer(shares, places)
    counts = np.floor(exact)
    order = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0)
    return counts + (order < (places - counts.sum(0)))


def exhaustive_index(sizes: Sequence[int]) -> np.ndarray:
    """The member of each sample in a blend that reads every sample of its members once; int16."""
    limits, total = np.array(sizes), sum(sizes)
    return _take_turns(limits / float(total), 0, np.zeros(len(sizes)), total, limits)[0]


class Turns:
    """The member of each sample of a blend by weights, or of one epoch of each member.

    size: the number of samples; None takes every sample of the members once, and then the weights
    are the members' numbers of samples.
    """

    def __init__(self, weights: Sequence[float], size: int | None, cache_dir: str) -> None:
        total = sum(int(weight) for weight in weights) if size is None else size
        small = total < _SMALL or not cache_dir
        name = "" if small else digest(1, size, [float(weight) for weight in weights])

        def make() -> Arrays:
            if size is None:
                turns = exhaustive_index([int(weight) for weight in weights])
            else:
                turns = blending_index(normalized(weights), size)
            return {"turns": turns, "counts": count_blocks(turns, len(weights))}

        arrays = cached(cache_dir if name else "", f"blend-{name}", _KEYS, make)
        self.members, self._counts = (arrays[key] for key in _KEYS)
        if (len(self.members), len(self._counts)) != (total, total // _BLOCK + 1):
            raise ValueError(f"{cache_dir}/blend-{name} is damaged: delete this folder")

    def before(self, number: int) -> np.ndarray:
        """How many of the first `number` samples are from each member."""
        block = number // _BLOCK
        turns = self.members[block * _BLOCK : number]
        return self._counts[block] + np.bincount(turns, minlength=self._counts.shape[1])

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The member of each sample, and the sample's number within that member."""
        members, blocks = self.members[indices].astype(np.int64), indices // _BLOCK
        numbers = self._counts[blocks, members]
        for row, (member, block, index) in enumerate(
            zip(members.tolist(), blocks.tolist(), indices.tolist(), strict=True)
        ):
            numbers[row] += np.count_nonzero(self.members[block * _BLOCK : index] == member)
        return members, numbers


@dataclasses.dataclass(frozen=True)
class Phase:
    """The members (by number) that are read from sample number `start` on, and their weights."""

    start: int
    members: tuple[int, ...]
    weights: tuple[float, ...]


class Blend(RecordedDataset, RebuiltInWorkers):
    """Batches of several datasets, by the weights of the phase that contains the sample.

    Each phase orders its members like a blend that begins there. Each member continues with its
    next sample, so a change neither repeats nor leaves out samples. The samples of a phase do not
    depend on later phases. size: the number of samples, after which the blend repeats; None as in
    `Turns`, with one phase.
    """

    def __init__(
        self,
        members: Sequence[Dataset],
        phases: Sequence[Phase],
        size: int | None,
        cache_dir: str = "",
    ) -> None:
        self.members, self.phases = list(members), tuple(phases)
        self.vocab_size = self.members[0].vocab_size
        self.sequence_length = self.members[0].sequence_length
        self.turns: list[Turns] = []
        self._starts = np.array([phase.start for phase in phases])
        num_taken = [np.zeros(len(self.members), np.int64)]
        for phase, end in zip(phases, [*self._starts[1:].tolist(), size], strict=True):
            turns = Turns(phase.weights, None if end is None else end - phase.start, cache_dir)
            self.turns.append(turns)
            num_taken.append(num_taken[-1].copy())
            num_taken[-1][list(phase.members)] += turns.before(len(turns.members))
        self._num_taken = num_taken  # samples of each member before each phase, and in all
        self.num_samples = phases[-1].start + len(self.turns[-1].members)

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch of all members."""
        return sum(member.num_tokens for member in self.members)

    @property
    def samples_per_epoch(self) -> int:
        return self.num_samples

    def samples_of_members(self) -> list[int]:
        """How many of all samples are from each member."""
        return self.samples_before(self.num_samples)

    def samples_before(self, number: int) -> list[int]:
        """How many of the first `number` samples are from each member."""
        rounds, rest = divmod(number, self.num_samples)
        num_taken = rounds * self._num_taken[-1]
        if rest:
            at = int(np.searchsorted(self._starts, rest, side="right")) - 1
            num_taken = num_taken + self._num_taken[at]
            phase = self.phases[at]
            num_taken[list(phase.members)] += self.turns[at].before(rest - phase.start)
        return num_taken.tolist()

    def record(self, consumed: int) -> list[Record]:
        counts = zip(self.members, self.samples_before(consumed), strict=True)
        return [record for member, count in counts for record in record_order(member, count)]

    def compare(self, saved: Sequence[Record], consumed: int) -> Difference:
        counts = zip(self.members, self.samples_before(consumed), strict=True)
        return compare_members(saved, [(m, n) for m, n in counts if isinstance(m, GptDataset)])

    def uses(self, samples: float) -> list[Use]:
        shares = [count / self.num_samples for count in self.samples_of_members()]
        counts = zip(self.members, shares, strict=True)
        return [
            use
            for member, share in counts
            if isinstance(member, RecordedDataset)
            for use in member.uses(samples * share)
        ]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The member of each sample, and the sample's number within that member."""
        indices = check_indices(indices) % self.num_samples
        at = np.searchsorted(self._starts, indices, side="right") - 1
        members, numbers = np.empty_like(indices), np.empty_like(indices)
        for phase in np.unique(at):
            rows = np.flatnonzero(at == phase)
            parts, local = self.turns[phase].locate(indices[rows] - self._starts[phase])
            members[rows] = np.array(self.phases[phase].members)[parts]
            numbers[rows] = local + self._num_taken[phase][members[rows]]
        return members, numbers

    @property
    def reads_ahead(self) -> bool:
        """Whether a member is in object storage, so that `read_ahead` has an effect."""
        return any(getattr(member, "reads_ahead", False) for member in self.members)

    def read_ahead(self, indices: np.ndarray) -> None:
        """Start to fetch samples that will be read soon."""
        members, numbers = self.locate(indices)
        for i, member in enumerate(self.members):
            of_member = members == i
            if getattr(member, "reads_ahead", False) and of_member.any():
                member.read_ahead(numbers[of_member])  # pyright: ignore

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples with these numbers, any >= 0, with the arrays of the members' batches."""
        members, numbers = self.locate(indices)
        if not members.size:
            return self.members[0].batch(numbers)
        batch = {}
        for member in np.unique(members):
            rows = np.flatnonzero(members == member)
            for name, values in self.members[member].batch(numbers[rows]).items():
                if name not in batch:
                    batch[name] = np.empty((len(members), *values.shape[1:]), values.dtype)
                batch[name][rows] = values
        return batch


def blended(
    members: Sequence[Dataset], weights: Sequence[float], size: int | None, cache_dir: str = ""
) -> Blend:
    """A blend of one phase."""
    phase = Phase(0, tuple(range(len(members))), tuple(weights))
    return Blend(members, [phase], size, cache_dir)


def count_blocks(turns: np.ndarray, num_members: int) -> np.ndarray:
    """Samples of each member before every block of the index; int64 [blocks, members]."""
    counts = np.zeros((len(turns) // _BLOCK + 1, num_members), np.int64)
    for block in range(1, len(counts)):
        before = turns[(block - 1) * _BLOCK : block * _BLOCK]
        counts[block] = counts[block - 1] + np.bincount(before, minlength=num_members)
    return counts
