"""Stream the rows of tables: Parquet, and Arrow as Hugging Face's `datasets` saves it."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from maxmeg.data.chat.forms import form_of
from maxmeg.data.corpus import storage
from maxmeg.data.corpus.loss_weights import FIELD

_MAX_ROWS = 1 << 14  # rows per batch
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.parquet")  # a part of a split, as on the Hub


def files_of(folder: str) -> list[str]:
    """The files of a folder: those of a dataset that `Dataset.save_to_disk` wrote, in its order, or
    Parquet. ValueError where the folder holds several splits, or neither kind of files."""
    place = Path(folder)
    state, splits = place / "state.json", place / "dataset_dict.json"
    if splits.is_file():
        names = _field(splits, "splits")
        if len(names) != 1:
            raise ValueError(_several(folder, names, "{}/{}"))
        return files_of(str(place / str(names[0])))
    if state.is_file():
        entries = _field(state, "_data_files")
        return [str(place / str(entry["filename"])) for entry in entries if "filename" in entry]
    files = sorted(map(str, place.glob("*.parquet")))
    shards = {match[1] for file in files if (match := _SHARD.fullmatch(Path(file).name))}
    if len(shards) > 1:
        raise ValueError(_several(folder, sorted(shards), "{}/{}-*.parquet"))
    others = sorted(path.name for form in ("*.jsonl*", "*.arrow") for path in place.glob(form))
    if not files or others:
        content = f"with Parquet files and {others[0]}" if files else "without Parquet files"
        raise ValueError(
            f"input {folder} is a folder {content}, and no saved dataset: name its files, such as "
            f"{folder}/*.jsonl"
        )
    return files


def _several(folder: str, names: Sequence[Any], form: str) -> str:
    inputs = ", ".join(form.format(folder, name) for name in names)
    return f"input {folder} holds {len(names)} splits: name one of them, {inputs}"


def _field(path: Path, name: str) -> list:
    """A list in a JSON file of `datasets`."""
    try:
        value = json.loads(path.read_text("utf-8"))[name]
        if isinstance(value, list):
            return value
        raise ValueError(f"{name}={value!r}"[:80])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{path} is damaged: {type(error).__name__}: {error}"
        raise ValueError(f"{problem}: save the dataset again with save_to_disk") from None


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
    """Rows of the row groups [begin, end), with the columns of the keys and their weights alone.

    Yields (an Arrow stream of about `size` bytes, its number of rows).
    """
    with storage.open_input(path) as file:
        opened = _open(path, file)
        columns = _columns(path, keys, opened.schema_arrow.names)
        for batch in _parquet_batches(path, opened, range(*groups), columns, size):
            yield _stream(batch), batch.num_rows


def arrow_batches(path: str, keys: Sequence[str], size: int) -> Iterator[tuple[bytes, int, int]]:
    """As `batches`, of an Arrow file, with the number of the file's bytes that have been read."""
    with storage.open_input(path) as file:
        for batch in _arrow_batches(path, file, size):
            columns = _columns(path, keys, batch.schema.names)
            yield _stream(batch.select(columns)), batch.num_rows, file.tell()


def read_rows(path: str, size: int) -> Iterator[tuple[dict[str, Any], int]]:
    """All rows of a table as (fields, bytes, about); fields of objects that are null are absent,
    because a column has them in every row."""
    with storage.open_input(path) as file:
        if path.lower().endswith(".arrow"):
            batches = _arrow_batches(path, file, size)
        else:
            opened = _open(path, file)
            groups = range(opened.metadata.num_row_groups)
            batches = _parquet_batches(path, opened, groups, None, size)
        for batch in batches:
            columns = [_values(column) for column in batch.columns]
            for row in zip(*columns, strict=True):
                fields = _without_nulls(dict(zip(batch.schema.names, row, strict=True)))
                yield fields, batch.nbytes // batch.num_rows


def _parquet_batches(
    path: str, opened: Any, groups: Sequence[int], columns: list[str] | None, size: int
) -> Iterator[Any]:
    """Record batches of about `size` bytes."""
    arrow = _library(path)
    for group in groups:
        about = opened.metadata.row_group(group)
        rows = max(1, min(_MAX_ROWS, size * about.num_rows // max(about.total_byte_size, 1)))
        try:
            yield from opened.iter_batches(rows, row_groups=[group], columns=columns)
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is damaged in row group {group}: {error}") from error


def _arrow_batches(path: str, file: Any, size: int) -> Iterator[Any]:
    """Record batches of about `size` bytes, of a stream (as `datasets` writes) or a file."""
    arrow = _library(path)
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    try:
        if is_file:
            opened = arrow.ipc.open_file(file)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        else:
            batches = arrow.ipc.open_stream(file)
        for batch in batches:
            step = max(1, min(_MAX_ROWS, size * batch.num_rows // max(batch.nbytes, 1)))
            for first in range(0, batch.num_rows, step):
                yield batch.slice(first, step)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not an Arrow file, or is truncated: {error}") from error


def _stream(batch: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


def without_key(key: str, names: Iterable[str]) -> str:
    """The error for a row that has these fields, and not the key."""
    fields = ", ".join([*names][:8]) or "no fields"
    form = form_of(dict.fromkeys(names, ""))
    hint = (
        f"; these are chats ({form}), which data.objective=sft reads as they are, and `maxmeg "
        "preprocess chats` writes as messages"
    ) * bool(form)
    return f"no {key!r} among {fields}: see --json_keys{hint}"


def _columns(path: str, keys: Sequence[str], names: Sequence[str]) -> list[str]:
    """The keys, and the column of weights if there is one; ValueError where a key is no column."""
    for key in keys:
        if key not in names:
            raise ValueError(f"{path}: {without_key(key, names)}")
    return [*keys, FIELD] if FIELD in names and FIELD not in keys else [*keys]


def rows(data: bytes) -> Iterator[dict[str, Any]]:
    """The fields of each row; strings that are not valid UTF-8 are returned as bytes."""
    import pyarrow

    for batch in pyarrow.ipc.open_stream(data):
        for values in zip(*map(_values, batch.columns), strict=True):
            yield dict(zip(batch.schema.names, values, strict=True))


def _values(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except ValueError:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    """The value; bytes for a text that is not UTF-8, None for what Python has no type for."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error.object
    except ValueError:
        return None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


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
