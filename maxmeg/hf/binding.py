"""One tensor of a checkpoint elsewhere and the arrays of ours that hold the same numbers."""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import numpy as np


class Place(typing.NamedTuple):
    """An array of the model, or one layer of it: the entry along dimension 0."""

    name: str
    layer: int | None = None


@dataclasses.dataclass(frozen=True)
class Binding:
    """`theirs` [shape] <-> `ours`, in order. split and join are exact inverses of each other."""

    theirs: str
    shape: tuple[int, ...]
    ours: tuple[Place, ...]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Projections fused into one along their outputs.

    Their outputs are `groups` times so many of each of ours as `widths` says: (1, (Q, K, V)) is
    [q k v], (G, (H / G x K, K, K)) is [q.. k v] of every group of heads, (1, (F,)) one projection.
    Ours are [in, out]; theirs are [out, in] (outputs_first) or [in, out]; biases are vectors.
    """

    groups: int
    widths: tuple[int, ...]
    outputs_first: bool = True

    @property
    def outputs(self) -> int:
        return self.groups * sum(self.widths)

    def split(self, fused: np.ndarray) -> tuple[np.ndarray, ...]:
        """Views of the fused tensor, or copies where groups interleave."""
        rows = fused if self.outputs_first else fused.T
        inner = rows.shape[1:]
        grouped = rows.reshape(self.groups, -1, *inner)
        parts = np.split(grouped, np.cumsum(self.widths)[:-1], axis=1)
        return tuple(part.reshape(-1, *inner).T for part in parts)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        rows = [part.T.reshape(self.groups, -1, *part.shape[:-1]) for part in parts]
        fused = np.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]
        fused = fused.reshape(-1, *fused.shape[2:])
        return fused if self.outputs_first else fused.T


def same(tensor: np.ndarray) -> tuple[np.ndarray, ...]:
    return (tensor,)


def only(parts: Sequence[np.ndarray]) -> np.ndarray:
    (part,) = parts
    return part
