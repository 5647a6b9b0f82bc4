"""The placement of layers on pipeline stages. No JAX.

A stack of `repeats` layers is stored as places [stages x chunks x slots], stage-major, so that
sharding dimension 0 over `pipe` gives every stage its own layers. Chunk c (in model order) is the
(c // stages)-th of stage c % stages. A place without a layer is padding: -1.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
    """orders[g] [stages x chunks x slots]: the layer of group g in each place, or -1."""

    stages: int
    chunks: int
    orders: tuple[tuple[int, ...], ...]

    @property
    def trivial(self) -> bool:
        """Whether the places hold the layers in model order, without padding."""
        return all(order == tuple(range(len(order))) for order in self.orders)

    def padded(self, group: int) -> bool:
        """Whether some chunk holds fewer layers of the group than another."""
        return -1 in self.orders[group]

    def slots(self, group: int) -> int:
        """Number of places in a chunk."""
        return len(self.orders[group]) // (self.stages * self.chunks)

    @property
    def repeats(self) -> tuple[int, ...]:
        """Number of layers in each group."""
        return tuple(max(order) + 1 for order in self.orders)

    def layers(self, group: int) -> np.ndarray:
        """[stages, chunks x slots]: index in the whole model of each place's layer, or -1."""
        first = sum(self.repeats[:group])
        order = np.array(self.orders[group], np.int32).reshape(self.stages, -1)
        return np.where(order >= 0, order + first, -1)

    def places(self, group: int) -> np.ndarray:
        """[repeats]: the place of each layer of the group, the inverse of its order."""
        order = np.array(self.orders[group])
        places = np.empty(order.max() + 1, np.int64)
        places[order[order >= 0]] = np.flatnonzero(order >= 0)
        return places


def arrange(repeats: tuple[int, ...], stages: int, counts: tuple[int, ...]) -> Layout:
    """The layout of groups of `repeats` layers over chunks of `counts` layers in model order.

    Chunks with fewer layers of a group than the largest one are padded.
    """
    chunks = len(counts) // stages
    ends = np.cumsum(counts)
    starts = ends - counts
    orders, first = [], 0
    for number in repeats:
        low = np.clip(starts - first, 0, number)
        high = np.clip(ends - first, 0, number)
        slots = int((high - low).max())
        order = np.full((stages, chunks, slots), -1)
        for c in range(len(counts)):
            order[c % stages, c // stages, : high[c] - low[c]] = np.arange(low[c], high[c])
        orders.append(tuple(order.reshape(-1).tolist()))
        first += number
    return Layout(stages, chunks, tuple(orders))
