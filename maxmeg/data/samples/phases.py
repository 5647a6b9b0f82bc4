"""Blends that change during a run: from some step on, other weights or corpora."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

from maxmeg.data.samples.blending import Blend, Phase, normalized, parse_blend, read_blend
from maxmeg.data.samples.dataset import Dataset

_BEGINS = re.compile(r"\s*(\d+):(.*)", re.DOTALL)
_FILES = (".yaml", ".yml", ".json")


@dataclasses.dataclass(frozen=True)
class Change:
    """The prefixes that are read from `step` on, and their weights."""

    step: int
    prefixes: tuple[str, ...]
    weights: tuple[float, ...]


def parse_changes(items: Sequence[str]) -> list[Change]:
    """The changes in `1000:0.5,a,0.5,b,5000:late.yaml`, split at its commas, in order of steps.

    An item STEP:ITEM begins a change: a blend with weights, one prefix, or a file for `read_blend`,
    whose training set is used.
    """
    parts: list[tuple[int, list]] = []
    for item in items:
        match = _BEGINS.match(str(item))
        if match:
            parts.append((int(match[1]), [match[2]]))
        elif parts:
            parts[-1][1].append(item)
        else:
            raise ValueError(
                f"data.blend_changes begins with {item!r}: each change begins with its step, as in "
                "1000:0.5,a,0.5,b or 1000:FILE.yaml"
            )
    changes = [_parse_change(step, words) for step, words in parts]
    for before, after in itertools.pairwise([0, *(change.step for change in changes)]):
        if after <= before:
            raise ValueError(
                f"data.blend_changes has step {after} after step {before}: steps must increase, "
                "from 1 on"
            )
    return changes


def _parse_change(step: int, words: list) -> Change:
    where = f"data.blend_changes, step {step}"
    if len(words) == 1 and words[0].endswith(_FILES):
        blend = read_blend(words[0])
        words = list(blend.get(0, []) if isinstance(blend, dict) else blend)
    try:
        prefixes, weights = parse_blend(words)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if weights is None and len(prefixes) > 1:
        raise ValueError(f"{where} has no weights: give each prefix one, as {step}:0.5,a,0.5,b")
    check_unique(prefixes, where)
    return Change(step, tuple(prefixes), tuple(weights or [1.0]))


def check_unique(prefixes: Sequence[str], where: str) -> None:
    """ValueError where a corpus is named twice, because its order could not be continued."""
    for prefix in prefixes:
        if list(prefixes).count(prefix) > 1:
            raise ValueError(f"{where} names {prefix} twice: add up the two weights")


def check_changeable(names: Sequence[str], weights: Sequence[float] | None) -> None:
    """ValueError for a blend that cannot be followed by another blend."""
    if weights is None and len(names) > 1:
        raise ValueError(
            f"data.blend_changes follows {len(names)} corpora without weights, which are "
            "read once: give each a weight (data.paths=0.5,a,0.5,b)"
        )
    check_unique(names, "the blend before data.blend_changes")


def change(
    first: tuple[Sequence[str], Sequence[float], Sequence[Dataset]],
    items: Sequence[str],
    ends: Sequence[int],
    added: Callable[[str], Dataset],
    cache_dir: str,
) -> Blend:
    """The blend `first` (prefixes, weights, datasets), followed by the changes in `items`.

    ends: the number of samples up to the end of each phase. added: opens a corpus that a change
    adds.
    """
    names, weights, datasets = first
    members, numbers = list(datasets), {name: i for i, name in enumerate(names)}
    phases = [Phase(0, tuple(range(len(names))), tuple(normalized(weights)))]
    for change, start in zip(parse_changes(items), ends[:-1], strict=True):
        for name in change.prefixes:
            if name not in numbers:
                numbers[name] = len(members)
                members.append(added(name))
        phase_members = tuple(numbers[name] for name in change.prefixes)
        phases.append(Phase(start, phase_members, tuple(normalized(change.weights))))
    return Blend(members, phases, ends[-1], cache_dir)
