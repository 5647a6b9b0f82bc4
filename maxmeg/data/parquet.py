"""Parquet files as documents: some columns of their rows, streamed."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from maxmeg.data import storage

_MAX_ROWS = 1 << 14  # at once


def rows_before(path: str) -> tuple[int, ...]:
    """How many rows come before each row group, and in all."""
    with storage.open_input(path) as file:
        metadata = _open(path, file).metadata
    counts = [0]
    for group in range(metadata.num_row_groups):
        counts.append(counts[-1] + metadata.row_group(group).num_rows)
    return tuple(counts)


def batches(
    path: str, groups: tuple[int, int], keys: Sequence[str], size: int
) -> Iterator[tuple[bytes, int]]:
    """Rows of row groups [begin, end), the columns of the keys alone: Arrow's stream of about
    `size` bytes and how many rows it holds."""
    arrow = _library(path)
    with storage.open_input(path) as file:
        opened = _open(path, file)
        names = opened.schema_arrow.names
        for key in keys:
            if key not in names:
                raise ValueError(f"{path} has no column {key!r} among {names[:8]}: see --json_keys")
        for group in range(*groups):
            about = opened.metadata.row_group(group)
            rows = max(1, min(_MAX_ROWS, size * about.num_rows // max(about.total_byte_size, 1)))
            try:
                for batch in opened.iter_batches(rows, row_groups=[group], columns=list(keys)):
                    sink = arrow.BufferOutputStream()
                    with arrow.ipc.new_stream(sink, batch.schema) as stream:
                        stream.write_batch(batch)
                    yield sink.getvalue().to_pybytes(), batch.num_rows
            except (arrow.ArrowException, OSError) as error:
                raise ValueError(f"{path} is damaged in row group {group}: {error}") from error


def rows(data: bytes, keys: Sequence[str]) -> Iterator[list[Any]]:
    """The values of the keys, row by row; bytes that are not UTF-8 stay bytes."""
    import pyarrow

    for batch in pyarrow.ipc.open_stream(data):
        columns = [_values(batch.column(key)) for key in keys]
        yield from map(list, zip(*columns, strict=True))


def _values(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error.object


def _open(path: str, file: Any) -> Any:
    arrow = _library(path)
    try:
        return arrow.parquet.ParquetFile(file)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no Parquet file, or was cut: {error}") from error


def _library(path: str) -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs pyarrow: pip install 'maxmeg[parquet]'") from error
    return pyarrow
