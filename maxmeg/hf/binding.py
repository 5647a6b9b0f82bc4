"""One tensor of a checkpoint elsewhere and the arrays of ours that hold the same numbers."""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Sequence

import numpy as np


class Place(typing.NamedTuple):
    """An array of the model, or one layer of it: the entry along dimension 0; or one expert of a
    layer: the entry along dimensions 0 and 1."""

    name: str
    layer: int | None = None
    expert: int | None = None

    @property
    def index(self) -> tuple[int, ...]:
        return tuple(i for i in (self.layer, self.expert) if i is not None)


@dataclasses.dataclass(frozen=True)
class Binding:
    """`theirs` [shape] <-> `ours`, in order. split and join are exact inverses of each other.

    stacked: dimension 0 counts experts, and split and join work on one of them too. exact: it is
    kept in float32, whatever the other tensors are written in.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: tuple[Place, ...]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    stacked: bool = False
    exact: bool = False

    def pieces(self) -> Iterator[tuple[int | None, "Binding"]]:
        """(expert, its part) where experts are stacked, else the whole."""
        if not self.stacked:
            yield None, self
            return
        for expert in range(self.shape[0]):
            ours = tuple(place._replace(expert=expert) for place in self.ours)
            yield expert, dataclasses.replace(self, shape=self.shape[1:], ours=ours, stacked=False)


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


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Projections of one width whose outputs, the last dimension, take turns."""

    count: int

    def split(self, fused: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(fused[..., i :: self.count] for i in range(self.count))

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)


def same(tensor: np.ndarray) -> tuple[np.ndarray, ...]:
    return (tensor,)


def only(parts: Sequence[np.ndarray]) -> np.ndarray:
    (part,) = parts
    return part
