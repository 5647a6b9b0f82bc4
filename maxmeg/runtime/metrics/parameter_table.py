"""The table of all parameters (log.parameters)."""

import dataclasses
import math
from collections.abc import Sequence

import jax

from maxmeg.checkpoint.names import array_name
from maxmeg.checkpoint.storage import disk_shape, row_orders
from maxmeg.config.optimizers import short_name
from maxmeg.parallel.parameter import is_variable, logical_axes


@dataclasses.dataclass(frozen=True)
class ParameterRow:
    """One array: path, shape, logical axis and mesh axes of each dimension, bytes per device."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    spec: tuple[tuple[str, ...] | None, ...]
    bytes_per_device: int


def parameter_rows(model) -> list[ParameterRow]:
    """One row per parameter of an abstract model, without the padding of a pipeline."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_variable)
    variables = {array_name(path): variable for path, variable in leaves}
    orders, rows = row_orders(variables, model.stack.layout), []
    for name, variable in variables.items():
        array = variable.get_value()
        sizes, place = array.sharding.mesh.shape, array.sharding
        named = ((axes,) if isinstance(axes, str) else axes or () for axes in place.spec)
        spec = tuple(tuple(axis for axis in axes if sizes[axis] > 1) or None for axes in named)
        shape = disk_shape(array.shape, orders.get(name.replace(".", "/")))
        local = math.prod(place.shard_shape(array.shape)) * array.dtype.itemsize
        rows.append(ParameterRow(name, shape, logical_axes(variable), spec, local))
    return rows


def parameter_table(rows: Sequence[ParameterRow], width: int) -> list[str]:
    """Lines of at most `width` columns: name, shape with sharded dimensions, bytes per device.

    "1024/tensor x 64": the first dimension is sharded over the mesh axis tensor. Names are
    those of optim.groups; those that are too long lose their beginning.
    """
    cells = [(short_name(row.name), _shape(row), num_bytes(row.bytes_per_device)) for row in rows]
    total = num_bytes(sum(row.bytes_per_device for row in rows))
    cells = [
        ("parameter", "shape / sharded over", "per device"),
        *cells,
        ("all", "", total),
    ]
    names, shapes, sizes = (max(len(row[i]) for row in cells) for i in range(3))
    names = max(min(names, width - shapes - sizes - 4), 16)
    return [
        f"{_cut(name, names):{names}}  {shape:{shapes}}  {size:>{sizes}}"
        for name, shape, size in cells
    ]


def num_bytes(number: float) -> str:
    """'512 B', '1.50 KiB', '2.6 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def _shape(row: ParameterRow) -> str:
    spec = (*row.spec, *(None,) * (len(row.shape) - len(row.spec)))
    sizes = (
        f"{size}/{'+'.join(names)}" if names else str(size)
        for size, names in zip(row.shape, spec, strict=True)
    )
    return " x ".join(sizes) or "scalar"


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else f"..{name[len(name) - width + 2 :]}"
