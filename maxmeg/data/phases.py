"""Blends whose weights change while a run goes on: from a step on, other weights or corpora."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np

from maxmeg.data.blending import BlendedDataset, Mixture, normalized, parse_blend, read_blend
from maxmeg.data.gpt import Dataset

_BEGINS = re.compile(r"\s*(\d+):(.*)", re.DOTALL)
_FILES = (".yaml", ".yml", ".json")


@dataclasses.dataclass(frozen=True)
class Change:
    """What is read from `step` on: prefixes, and a weight of each."""

    step: int
    prefixes: tuple[str, ...]
    weights: tuple[float, ...]


def parse_changes(items: Sequence[str]) -> list[Change]:
    """`1000:0.5,a,0.5,b,5000:late.yaml`, split at its commas, as changes in order.

    An item STEP:ITEM begins a change, which is a blend with weights, one prefix, or a file as
    `read_blend` reads it, of which the training set counts.
    """
    parts: list[tuple[int, list]] = []
    for item in items:
        found = _BEGINS.match(str(item))
        if found:
            parts.append((int(found[1]), [found[2]]))
        elif parts:
            parts[-1][1].append(item)
        else:
            raise ValueError(
                f"data.blend_changes begins with {item!r}: each change begins with its step, as "
                "1000:0.5,a,0.5,b or 1000:FILE.yaml"
            )
    changes = [_parse_change(step, words) for step, words in parts]
    for before, after in itertools.pairwise([0, *(change.step for change in changes)]):
        if after <= before:
            raise ValueError(
                f"data.blend_changes has step {after} after step {before}: steps grow, from 1 on"
            )
    return changes


def _parse_change(step: int, words: list) -> Change:
    where = f"data.blend_changes, step {step}"
    if len(words) == 1 and words[0].endswith(_FILES):
        found = read_blend(words[0])
        words = list(found.get(0, []) if isinstance(found, dict) else found)
    try:
        prefixes, weights = parse_blend(words)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if weights is None and len(prefixes) > 1:
        raise ValueError(f"{where} has no weights: give each prefix one, as {step}:0.5,a,0.5,b")
    check_unique(prefixes, where)
    return Change(step, tuple(prefixes), tuple(weights or [1.0]))


def check_unique(prefixes: Sequence[str], where: str) -> None:
    """ValueError where a corpus is named twice: which of the two goes on is not clear."""
    for prefix in prefixes:
        if list(prefixes).count(prefix) > 1:
            raise ValueError(f"{where} names {prefix} twice: add the weights up")


@dataclasses.dataclass(frozen=True)
class Phase:
    """Samples from number `start` on: of which members, by number, and with which weights."""

    start: int
    members: tuple[int, ...]
    weights: tuple[float, ...]


class ChangingBlend(Mixture):
    """Batches of several datasets, by the weights of the phase that a sample falls into.

    In every phase turns are taken as in a blend that begins there; each member gives its next
    sample, wherever the phase before left it, so that none comes twice or is left out by a change.
    The samples of a phase do not depend on later ones.
    """

    def __init__(
        self, members: Sequence[Dataset], phases: Sequence[Phase], size: int, cache_dir: str = ""
    ) -> None:
        super().__init__(members)
        self._arguments = (members, phases, size, cache_dir)
        self.phases = tuple(phases)
        self._starts = np.array([phase.start for phase in phases])
        self._size = size
        self._blends: list[BlendedDataset] = []
        taken = [np.zeros(len(self.members), np.int64)]
        for phase, end in zip(phases, [*self._starts[1:].tolist(), size], strict=True):
            parts = [self.members[member] for member in phase.members]
            blend = BlendedDataset(parts, phase.weights, end - phase.start, cache_dir)
            self._blends.append(blend)
            taken.append(taken[-1].copy())
            taken[-1][list(phase.members)] += blend.samples_of_members()
        self._taken = taken  # of each member before each phase, and in all

    def __reduce__(self) -> tuple:
        return ChangingBlend, self._arguments

    @property
    def num_samples(self) -> int:
        return self._size

    def samples_of_members(self) -> list[int]:
        """How many samples are taken of each."""
        return self._taken[-1].tolist()

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The member of each sample, and the sample's number there."""
        indices = self.checked(indices)
        at = np.searchsorted(self._starts, indices, side="right") - 1
        members, numbers = np.empty_like(indices), np.empty_like(indices)
        for phase in np.unique(at):
            rows = np.flatnonzero(at == phase)
            parts, local = self._blends[phase].locate(indices[rows] - self._starts[phase])
            members[rows] = np.array(self.phases[phase].members)[parts]
            numbers[rows] = local + self._taken[phase][members[rows]]
        return members, numbers

    def order(self, order_of: Callable[[object], list], before: int | None) -> list:
        """`order_of` this blend: of one phase, that of a blend without changes."""
        found = []
        for phase in self.phases:
            if not phase.start or before is None or phase.start < before:
                orders = [order_of(self.members[member]) for member in phase.members]
                weighted = [*phase.weights, *orders] if len(orders) > 1 else orders[0]
                found.append([phase.start, weighted])
        return found if len(found) > 1 else found[0][1]


def check_changeable(names: Sequence[str], weights: Sequence[float] | None) -> None:
    """ValueError for a blend that no other can follow."""
    if weights is None and len(names) > 1:
        raise ValueError(
            f"data.blend_changes goes on from {len(names)} corpora without weights, which are "
            "read once: give each a weight (data.paths=0.5,a,0.5,b)"
        )
    check_unique(names, "the blend before data.blend_changes")


def change(
    first: tuple[Sequence[str], Sequence[float], Sequence[Dataset]],
    items: Sequence[str],
    ends: Sequence[int],
    added: Callable[[str], Dataset],
    cache_dir: str,
) -> ChangingBlend:
    """The blend `first` (prefixes, weights, datasets), then the changes that `items` say.

    ends: the number of samples before the end of each phase. added: opens a corpus that the first
    phase has not.
    """
    names, weights, datasets = first
    members, places = list(datasets), {name: i for i, name in enumerate(names)}
    phases = [Phase(0, tuple(range(len(names))), tuple(normalized(weights)))]
    for change, start in zip(parse_changes(items), ends[:-1], strict=True):
        for name in change.prefixes:
            if name not in places:
                places[name] = len(members)
                members.append(added(name))
        which = tuple(places[name] for name in change.prefixes)
        phases.append(Phase(start, which, tuple(normalized(change.weights))))
    return ChangingBlend(members, phases, ends[-1], cache_dir)
