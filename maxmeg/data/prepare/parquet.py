"""Stream some columns of Parquet files as documents."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from maxmeg.data.corpus import storage

_MAX_ROWS = 1 << 14  # rows per batch


def rows_before(path: str) -> tuple[int, ...]:
    """The number of rows before each row group, and the number of all rows."""
    with storage.open_input(path) as file:
        metadata = _open(path, file).metadata
    counts = [0]
    for group in range(metadata.num_row_groups):
        counts.append(counts[-1] + metadata.row_group(group).num_rows)
    return tuple(counts)


def batches(
    path: str, groups: tuple[int, int], keys: Sequence[str], size: int
) -> Iterator[tuple[bytes, int]]:
    """Rows of the row groups [begin, end), with the columns of the keys alone.

    Yields (an Arrow stream of about `size` bytes, its number of rows).
    """
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
    """The values of the keys, row by row; strings that are not valid UTF-8 are returned as
    bytes."""
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
        raise ValueError(f"{path} is not a Parquet file, or is truncated: {error}") from error


def _library(path: str) -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs pyarrow: pip install 'maxmeg[parquet]'") from error
    return pyarrow
