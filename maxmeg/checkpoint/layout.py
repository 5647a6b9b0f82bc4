"""The order of layers in memory, which depends on the pipeline, and on disk, which does not.

On disk, stacked arrays hold the layers in the model's order, without padding layers.
"""

import re
from collections.abc import Iterable, Sequence

from maxmeg.pipeline.layout import Layout

Order = Sequence[int]  # the model's layer in each row of a stacked array; -1: padding
STACKED = re.compile(r"(?:^|\.)stack\.groups\.(\d+)\.")


def group_of(name: str, layout: Layout) -> int | None:
    """Return the group of a stacked array if the pipeline reorders its layers, else None."""
    match = STACKED.search(name)
    return None if layout.trivial or match is None else int(match[1])


def row_orders(names: Iterable[str], layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the model's layer in each row (-1: padding) of the arrays that a pipeline reorders.

    Keys are paths in a checkpoint: "model/stack/groups/0/...".
    """
    groups = {name.replace(".", "/"): group_of(name, layout) for name in names}
    return {path: layout.orders[group] for path, group in groups.items() if group is not None}


def disk_shape(shape: tuple[int, ...], order: Order | None) -> tuple[int, ...]:
    """Return the shape on disk: a stacked array has the model's layers without padding."""
    return shape if order is None else (max(order) + 1, *shape[1:])
