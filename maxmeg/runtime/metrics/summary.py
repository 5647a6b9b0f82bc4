"""The mesh and the table of parameters, printed at the start of a run."""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from maxmeg.runtime.metrics.progress import quantity

_PLAIN_WIDTH = 160


@dataclasses.dataclass(frozen=True)
class ParameterRow:
    """One array: path, shape, logical axis and mesh axes of each dimension, bytes per device."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    spec: tuple[object, ...]
    bytes_per_device: int


def print_parameters(rows: Sequence[ParameterRow], file: TextIO | None = None) -> None:
    """Print the table of all parameters, with totals."""
    from rich import box, table

    view = table.Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    count = sum(math.prod(row.shape) for row in rows)
    view.add_column("parameter", f"{quantity(count)} parameters", overflow="fold")
    view.add_column("shape")
    view.add_column("logical axes", overflow="fold")
    view.add_column("sharded over", overflow="fold")
    size = sum(row.bytes_per_device for row in rows)
    view.add_column("on each device", num_bytes(size), justify="right")
    for row in rows:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        axes = ", ".join(axis or "-" for axis in row.axes)
        spec = ", ".join(map(_mesh_axes, row.spec)) if any(row.spec) else "replicated"
        view.add_row(row.name, shape, axes, spec, num_bytes(row.bytes_per_device))
    _console(file).print(view)


def print_mesh(axes: Mapping[str, int], device_kind: str, file: TextIO | None = None) -> None:
    """Print one line: the devices, and the mesh axes that are larger than 1."""
    count = math.prod(axes.values())
    large = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    line = f"mesh: {count} {device_kind} device{'s' if count > 1 else ''}"
    print(f"{line} ({large})" if large else line, file=file or sys.stdout, flush=True)


def num_bytes(number: float) -> str:
    """'512 B', '1.50 KiB', '2.6 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def _mesh_axes(entry):
    if entry is None:
        return "-"
    return "+".join(entry) if isinstance(entry, tuple) else str(entry)


def _console(file):
    from rich import console

    file = file or sys.stdout
    width = None if file.isatty() else _PLAIN_WIDTH
    return console.Console(file=file, width=width, highlight=False, markup=False)
