"""Several datasets as one: their weights, Megatron-LM's order of taking turns, and batches."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import yaml

from maxmeg.data.gpt import Batch, Dataset
from maxmeg.data.stored import Arrays, digest, stored

MOST_MEMBERS = 32766
_BLOCK = 4096  # turns between two stored counts
_FEW = 12  # members up to which plain numbers are faster than arrays
_RUN_IN = 2048  # turns before a piece in which its guessed counts become the true ones
_LEAST_PIECES = 8  # for each member; fewer are slower than turns one by one
_MOST_PIECES = 1024
_SMALL = 1 << 12  # turns that are made sooner than found in files
_KEYS = ("turns", "counts")

Items = Sequence[str | int | float]
SPLIT_NAMES = (("train",), ("validation", "valid"), ("test",))


def parse_blend(items: Items) -> tuple[list[str], list[float] | None]:
    """Prefixes, and weights where there are any: `0.7 a 0.3 b`, or `a b` without.

    As in Megatron-LM, an even number of items of which every other is a number has weights.
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
            f"blend {' '.join(map(str, items))!r} has {items[2 * place]!r} where a weight must "
            "stand: write weight and prefix in turn, or prefixes alone"
        )
    prefixes = [str(item).strip() for item in items[1::2]]
    check_weights(weights, prefixes)
    return prefixes, weights


def check_weights(weights: Sequence[float], prefixes: Sequence[str]) -> None:
    """ValueError for weights that no blend can have."""
    for weight, prefix in zip(weights, prefixes, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"weight {weight:g} of {prefix} must be a positive number: leave out a corpus "
                "that is not to be read"
            )
    if len(prefixes) > MOST_MEMBERS:
        raise ValueError(f"a blend has at most {MOST_MEMBERS} corpora, not {len(prefixes)}")


def read_blend(path: str) -> Items | dict[int, Items]:
    """The blend of a YAML or JSON file; a dict, by number of the split, where it has several.

    The file holds a list `[0.7, a, 0.3, b]`, the same words as plain text, or a mapping of train,
    validation (or valid) and test to such lists, each a set of its own.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except OSError as error:
        raise ValueError(f"cannot read data.blend={path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"data.blend={path} is neither YAML nor JSON: {error}") from error
    if not isinstance(found, dict):
        return _items(found, path)
    splits = {}
    for name, items in found.items():
        index = next((i for i, names in enumerate(SPLIT_NAMES) if name in names), None)
        if index is None or index in splits:
            raise ValueError(
                f"data.blend={path} has the set {name!r}: the sets are train, validation and "
                "test, each once"
            )
        if items is not None:  # Megatron's files say null for a set that is not there
            splits[index] = _items(items, f"{path}, {name}")
    return splits


def _items(found, where: str) -> Items:
    items = found.split() if isinstance(found, str) else found
    wrong = not isinstance(items, list) or any(
        isinstance(item, bool) or not isinstance(item, (str, int, float)) for item in items
    )
    if wrong or not items:
        raise ValueError(
            f"data.blend={where}: {str(found)[:80]!r} is not a list of weights and prefixes, like "
            "[0.7, a, 0.3, b], nor a mapping of train, validation and test to such lists"
        )
    return items


def _number(item: str | int | float) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights as shares of their sum, rounded as Megatron-LM rounds them."""
    values = np.array(weights, np.float64)
    return (values / np.sum(values)).tolist()


def member_sizes(shares: Sequence[float], size: int, surplus: float) -> tuple[list[int], int]:
    """Samples to ask of every member, and of the blend, where `size` are wanted."""
    wanted = [math.ceil(size * share) for share in shares]
    return [math.ceil(count * (1 + surplus)) for count in wanted], sum(wanted)


def blending_index(shares: Sequence[float], size: int) -> np.ndarray:
    """Whose turn it is at each of `size` samples: the member that lags most behind its share.

    In Megatron-LM's arithmetic, float64; of equal members the first. int16. Long indices are made
    in pieces side by side. Where a piece begins the counts are guessed: any start that is nearly
    right runs into the true turns soon. Each guess is compared with the true end of the piece
    before, and a piece whose guess was wrong is made again.
    """
    num_pieces = min(_MOST_PIECES, size // (2 * _RUN_IN))
    if num_pieces < _LEAST_PIECES * len(shares):
        return _take_turns(shares, 0, np.zeros(len(shares)), size)[0]
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
            turns[piece], true_counts = _take_turns(shares, start, true_counts, length)
    return turns.reshape(-1)[:size]


def _take_turns(
    shares: Sequence[float], start: int, counts: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Turns from `start` on, one by one, and the counts after them."""
    turns = np.empty(size, np.int16)
    if len(shares) > _FEW:
        shares_array, counts, lags = np.array(shares), counts.copy(), np.empty(len(shares))
        for i in range(size):
            np.multiply(shares_array, float(start + i or 1), out=lags)
            np.subtract(lags, counts, out=lags)
            turn = lags.argmax()
            turns[i] = turn
            counts[turn] += 1
        return turns, counts
    plain, members = counts.tolist(), range(len(shares))
    for i in range(size):
        at = start + i or 1
        lags = [shares[member] * at - plain[member] for member in members]
        turn = lags.index(max(lags))
        turns[i] = turn
        plain[turn] += 1
    return turns, np.array(plain)


def _take_turns_abreast(
    shares: Sequence[float],
    starts: np.ndarray,
    counts: np.ndarray,
    size: int,
    turns: np.ndarray | None = None,
) -> np.ndarray:
    """As `_take_turns`, for many starts at once; counts [members, starts] become those after."""
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
    """About the counts at these places: shares of each, rounded so that they add up to it."""
    exact = np.outer(shares, places)
    counts = np.floor(exact)
    order = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0)
    return counts + (order < (places - counts.sum(0)))


def exhaustive_index(sizes: Sequence[int]) -> np.ndarray:
    """Whose turn it is until every member has given all its samples once; int16."""
    total = sum(sizes)
    shares, left = np.array(sizes) / float(total), np.array(sizes)
    counts, turns = np.zeros(len(sizes)), np.empty(total, np.int16)
    for i in range(total):
        lags = np.where(left > 0, shares * float(i or 1) - counts, -np.inf)
        turn = lags.argmax()
        turns[i] = turn
        counts[turn] += 1
        left[turn] -= 1
    return turns


class Mixture:
    """Batches of several datasets: `locate` says which sample of which one each sample is."""

    def __init__(self, members: Sequence[Dataset]) -> None:
        self.members = list(members)
        self.vocab_size = self.members[0].vocab_size
        self.sequence_length = self.members[0].sequence_length

    @property
    def num_tokens(self) -> int:
        """Tokens of all members, once through."""
        return sum(member.num_tokens for member in self.members)

    @property
    def num_samples(self) -> int:
        """Samples in all, beyond which the first come again."""
        raise NotImplementedError

    @property
    def samples_per_epoch(self) -> int:
        return self.num_samples

    def samples_of_members(self) -> list[int]:
        """How many of the samples are of each."""
        raise NotImplementedError

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The member of each sample, and the sample's number there."""
        raise NotImplementedError

    def order(self, order_of: Callable[[object], list], before: int | None) -> list:
        """What decides the samples before number `before`; order_of: the same of a member."""
        raise NotImplementedError

    def checked(self, indices: np.ndarray) -> np.ndarray:
        """Numbers of samples, any >= 0, as those below `num_samples`."""
        indices = np.asarray(indices, np.int64)
        if indices.size and indices.min() < 0:
            raise ValueError(f"sample {indices.min()} is negative")
        return indices % self.num_samples

    @property
    def reads_ahead(self) -> bool:
        """Whether `read_ahead` fetches anything."""
        return any(getattr(member, "reads_ahead", False) for member in self.members)

    def read_ahead(self, indices: np.ndarray) -> None:
        """Samples that will be asked for soon."""
        members, numbers = self.locate(indices)
        for i, member in enumerate(self.members):
            mine = members == i
            if getattr(member, "reads_ahead", False) and mine.any():
                member.read_ahead(numbers[mine])  # pyright: ignore

    def batch(self, indices: np.ndarray) -> Batch:
        """Samples by number, any >= 0, as every member gives them."""
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


class BlendedDataset(Mixture):
    """Batches of several datasets by weight; of those without, each as often as it has samples.

    `size` samples in all, beyond which the first come again; None takes every sample of the
    members once, whose numbers are then the weights.
    """

    def __init__(
        self,
        members: Sequence[Dataset],
        weights: Sequence[float],
        size: int | None,
        cache_dir: str = "",
    ) -> None:
        super().__init__(members)
        self._arguments = (members, weights, size, cache_dir)
        self.weights = list(weights)
        total = sum(int(weight) for weight in weights) if size is None else size
        small = total < _SMALL or not cache_dir
        name = "" if small else digest(1, size, [float(weight) for weight in weights])

        def make() -> Arrays:
            if size is None:
                turns = exhaustive_index([int(weight) for weight in weights])
            else:
                turns = blending_index(normalized(weights), size)
            return {"turns": turns, "counts": count_blocks(turns, len(self.members))}

        arrays = stored(cache_dir if name else "", f"blend-{name}", _KEYS, make)
        self.turns, self._counts = (arrays[key] for key in _KEYS)
        if (len(self.turns), len(self._counts)) != (total, total // _BLOCK + 1):
            raise ValueError(f"{cache_dir}/blend-{name} is damaged: delete this folder")

    def __reduce__(self) -> tuple:
        return BlendedDataset, self._arguments

    @property
    def num_samples(self) -> int:
        return len(self.turns)

    def order(self, order_of: Callable[[object], list], before: int | None) -> list:
        """The weights, and what decides the members' samples."""
        return [*self.weights, *map(order_of, self.members)]

    def samples_of_members(self) -> list[int]:
        """How many samples the blend takes of each."""
        last = self.turns[(len(self._counts) - 1) * _BLOCK :]
        return (self._counts[-1] + np.bincount(last, minlength=len(self.members))).tolist()

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The member of each sample, and the sample's number there."""
        indices = self.checked(indices)
        members, blocks = self.turns[indices].astype(np.int64), indices // _BLOCK
        numbers = self._counts[blocks, members]
        for row, (member, block, index) in enumerate(
            zip(members.tolist(), blocks.tolist(), indices.tolist(), strict=True)
        ):
            numbers[row] += np.count_nonzero(self.turns[block * _BLOCK : index] == member)
        return members, numbers


def count_blocks(turns: np.ndarray, num_members: int) -> np.ndarray:
    """Turns of each member before every block of the index; int64, [blocks, members]."""
    counts = np.zeros((len(turns) // _BLOCK + 1, num_members), np.int64)
    for block in range(1, len(counts)):
        before = turns[(block - 1) * _BLOCK : block * _BLOCK]
        counts[block] = counts[block - 1] + np.bincount(before, minlength=num_members)
    return counts
