"""The order of layers in memory, which depends on the pipeline, and on disk, which does not.

On disk, stacked arrays hold the layers in the model's order, without padding layers.
"""

import re
from collections.abc import Iterable, Sequence

from maxmeg.pipeline.layout import Layout

Order = Sequence[int]  # the model's layer in each row of a stacked array; -1: padding
STACKED = re.compile(r"(?:^|\.)stack\.groups\.(\d+)\.")


def row_orders(names: Iterable[str], layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the model's layer in each row (-1: padding) of the arrays that a pipeline reorders.

    Keys are paths in a checkpoint: "model/stack/groups/0/...".
    """
    stacked = [(name, match) for name in names if (match := STACKED.search(name))]
    if layout.trivial:
        return {}
    return {name.replace(".", "/"): layout.orders[int(match[1])] for name, match in stacked}


def disk_shape(shape: tuple[int, ...], order: Order | None) -> tuple[int, ...]:
    """Return the shape on disk: a stacked array has the model's layers without padding."""
    return shape if order is None else (max(order) + 1, *shape[1:])
