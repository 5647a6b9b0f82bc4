"""Which arrays of the model hold the numbers of one tensor in another checkpoint format."""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Sequence

import numpy as np


class Place(typing.NamedTuple):
    """An array of the model; with `layer` its entry along dimension 0, with `expert` too that along
    dimensions 0 and 1."""

    name: str
    layer: int | None = None
    expert: int | None = None

    @property
    def index(self) -> tuple[int, ...]:
        return tuple(i for i in (self.layer, self.expert) if i is not None)


@dataclasses.dataclass(frozen=True)
class Binding:
    """The tensor `theirs` of this shape, and the arrays `ours` that it splits into, in order.

    split and join are exact inverses. stacked: dimension 0 counts experts; split and join also work
    on a single expert. exact: written in float32, whatever dtype the other tensors have.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: tuple[Place, ...]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    stacked: bool = False
    exact: bool = False

    @classmethod
    def of_array(cls, theirs: str, array: str, shape: tuple[int, ...]) -> "Binding":
        """Return the binding of a tensor that is one array as it is."""
        return cls(theirs, shape, (Place(array),), lambda tensor: (tensor,), lambda parts: parts[0])

    def pieces(self) -> Iterator[tuple[int | None, "Binding"]]:
        """Yield (expert, its binding) where experts are stacked, else (None, this binding)."""
        if not self.stacked:
            yield None, self
            return
        for expert in range(self.shape[0]):
            ours = tuple(place._replace(expert=expert) for place in self.ours)
            yield expert, dataclasses.replace(self, shape=self.shape[1:], ours=ours, stacked=False)


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Projections fused into one tensor along their outputs.

    The fused outputs are `groups` blocks, each with widths[i] outputs of projection i: groups=1,
    widths=(Q, K, V) is [q k v]; groups=G, widths=(H / G x K, K, K) is [q.. k v] for each of G
    key/value heads; groups=1, widths=(F,) is one projection. The arrays are [..., in, out], the
    fused tensor is [out, in, ...] (outputs_first) or as the arrays; biases are vectors.
    """

    groups: int
    widths: tuple[int, ...]
    outputs_first: bool = True

    @property
    def outputs(self) -> int:
        return self.groups * sum(self.widths)

    def split(self, fused: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return views of the fused tensor, or copies where groups interleave."""
        rows = fused if self.outputs_first else fused.T
        inner = rows.shape[1:]
        grouped = rows.reshape(self.groups, -1, *inner)
        parts = np.split(grouped, np.cumsum(self.widths)[:-1], axis=1)
        return tuple(part.reshape(-1, *inner).T for part in parts)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        rows = [part.T.reshape(self.groups, -1, *part.shape[-2::-1]) for part in parts]
        fused = np.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]
        fused = fused.reshape(-1, *fused.shape[2:])
        return fused if self.outputs_first else fused.T


@dataclasses.dataclass(frozen=True)
class Shaped:
    """A vector that is stored with dimensions of size 1."""

    shape: tuple[int, ...]

    def split(self, tensor: np.ndarray) -> tuple[np.ndarray, ...]:
        return (tensor.reshape(-1),)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0].reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Projections of equal width whose outputs, the last dimension, interleave."""

    outputs_first: typing.ClassVar = False
    count: int

    def split(self, fused: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(fused[..., i :: self.count] for i in range(self.count))

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class Consecutive:
    """Projections [..., in, out] of equal width, one after the other in [..., out, in]."""

    outputs_first: typing.ClassVar = True
    count: int

    def split(self, fused: np.ndarray) -> tuple[np.ndarray, ...]:
        parts = np.split(fused, self.count, axis=-2)
        return tuple(np.swapaxes(part, -1, -2) for part in parts)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.swapaxes(part, -1, -2) for part in parts], axis=-2)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Projections of equal width, one after the other in the last dimension, that of outputs."""

    outputs_first: typing.ClassVar = False
    count: int

    def split(self, fused: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(np.split(fused, self.count, axis=-1))

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, axis=-1)
