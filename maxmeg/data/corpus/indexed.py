"""Megatron-LM's indexed token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` their layout.

.idx (little endian): magic (9 bytes), version 1 (u64), dtype code (u8), number of sequences S
(u64), number of document indices D (u64), lengths (S x i32), byte offsets (S x i64), document
indices (D x i64, from 0 to S), and in multimodal files the mode of each sequence (S x i8).
`PREFIX.sums`, if present, holds checksums of both files (`data/corpus/checksum.py`), and
`PREFIX.weights.npy` the documents' weights in the loss (`data/corpus/loss_weights.py`).
"""

import array
import contextlib
import dataclasses
import functools
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxmeg.config.hints import corpus_command
from maxmeg.data.corpus import checksum, loss_weights
from maxmeg.runtime.disk import flush

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK = 1 << 20  # entries that are checked at a time, to save memory
_COPIED = 1 << 24  # bytes that are copied at a time
_WINDOWS, _WINDOW = 64, 4096  # sampled ids: positions over the file, and tokens at each
_SHOWN = 5  # damaged blocks that are listed
_REMEDY = "prepare the corpus again with `maxmeg preprocess`, or copy both files again"


def token_dtype(vocab_size: int | None) -> np.dtype:
    """Megatron-LM's rule: uint16 for fewer than 65,500 ids, else int32."""
    small = vocab_size is not None and vocab_size < 65500
    return np.dtype("<u2") if small else np.dtype("<i4")


def check_vocabulary(ids: np.ndarray, vocab_size: int, where: str | Callable[[int], str]) -> None:
    """ValueError for an id that is not in [0, vocab_size). where: the place of the ids, or a
    function of the position of the first wrong one in the flattened `ids`."""
    if not ids.size or 0 <= ids.min() <= ids.max() < vocab_size:
        return
    wrong = int(np.argmax((ids < 0) | (ids >= vocab_size)))
    raise ValueError(
        f"{where if isinstance(where, str) else where(wrong)}: id {ids.flat[wrong]} is not in the "
        f"vocabulary [0, {vocab_size}): name the tokenizer that the corpus was made with, or leave "
        "out text that holds an added token for which the model has no row"
    )


@dataclasses.dataclass(frozen=True)
class _Index:
    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    document_indices: np.ndarray
    modes: np.ndarray | None


class IndexedDataset:
    """Read-only, memory-mapped sequences of `PREFIX.bin` and `PREFIX.idx`.

    Opening checks every size, offset and boundary, the checksum of .idx if there is one, and with
    `vocab_size` the token ids at some positions; ValueError names the file and the rule. Worker
    processes open the same files again without these checks.

    modes: int8 per sequence of a multimodal file (0 is text), else None. weights: float32 per
    document, or None if all are 1. may_be_empty: accept a file without tokens. remote: the files in
    object storage (`remote.py`), whose tokens are fetched on use.
    """

    tokens: Any  # an array or RemoteTokens

    def __init__(
        self,
        prefix: str | os.PathLike,
        check: bool = True,
        vocab_size: int | None = None,
        check_sums: bool = True,
        may_be_empty: bool = False,
        remote: Any = None,
    ) -> None:
        self.prefix, self._remote, self.is_remote = os.fspath(prefix), remote, remote is not None
        local = self.prefix if remote is None else remote.local
        index = _read_index(Path(local + ".idx"), may_be_empty)
        if check:
            _check_index(Path(local + ".idx"), index)
            if check_sums:
                checksum.check_index(local)
        self.dtype = index.dtype
        self.lengths = index.lengths
        self.document_indices = index.document_indices
        self.modes = index.modes
        weights = Path(local + loss_weights.SUFFIX)
        self.weights = loss_weights.read_weights(weights, self.num_documents, check)
        self._pointers = index.pointers
        tokens = 0
        if len(index.lengths):
            tokens = int(index.pointers[-1]) // index.dtype.itemsize + int(index.lengths[-1])
        if remote is None:
            self.tokens = _map_tokens(Path(local + ".bin"), index.dtype, tokens, may_be_empty)
        else:
            self.tokens = remote.tokens(index.dtype, tokens)
        if vocab_size is not None:
            self.check_ids(vocab_size)

    def __reduce__(self) -> tuple:
        return IndexedDataset, (self.prefix, False, None, True, False, self._remote)

    def expect(self, starts: np.ndarray, lengths: np.ndarray, now: bool = False) -> None:
        """Announce that `tokens[start : start + length]` will be read soon, or with `now` at
        once."""
        if self.is_remote:
            self.tokens.expect(starts, lengths, now)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def starts(self, sequences: np.ndarray) -> np.ndarray:
        """The positions in `tokens` at which these sequences start."""
        return self._pointers[sequences] // self.dtype.itemsize

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of sequence i; without a length, to its end."""
        size = int(self.lengths[i])
        length = size - offset if length is None else length
        assert 0 <= offset <= offset + length <= size
        start = int(self._pointers[i]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def sequence_at(self, position: int) -> int:
        """The sequence that holds `tokens[position]`."""
        start = position * self.dtype.itemsize
        return int(np.searchsorted(self._pointers, start, side="right")) - 1

    def document_of(self, sequence: int) -> int:
        """The document that a sequence belongs to."""
        return int(np.searchsorted(self.document_indices, sequence, side="right")) - 1

    def weights_of(self, sequences: np.ndarray) -> np.ndarray:
        """The weights in the loss, float32, of the documents that these sequences belong to."""
        if self.weights is None:
            return np.ones(len(sequences), np.float32)
        documents = np.searchsorted(self.document_indices, sequences, side="right") - 1
        return np.asarray(self.weights[documents])

    def has_loss(self, begin: int, end: int) -> bool:
        """Whether a document of the sequences [begin, end) has another weight than 0."""
        if self.weights is None:
            return True
        return bool(self.weights[self.document_of(begin) : self.document_of(end - 1) + 1].any())

    def document_starts(self) -> np.ndarray:
        """Positions in `tokens` at which documents start, and the end: [num_documents + 1]."""
        last = len(self) - 1
        starts = self.starts(np.minimum(self.document_indices, last))
        return np.where(self.document_indices > last, self.num_tokens, starts)

    def check_ids(self, vocab_size: int) -> None:
        """ValueError where an id is not in [0, vocab_size); large files are sampled."""
        if self.dtype.kind not in "iu":
            raise ValueError(f"{self.prefix}.bin holds {self.dtype}, not token ids")
        rest = max(self.num_tokens - _WINDOW, 0)
        begins = np.unique(np.linspace(0, rest, min(_WINDOWS, 1 + rest)).astype(np.int64))
        self.expect(begins, np.full(len(begins), min(_WINDOW, self.num_tokens)), now=True)

        def where(begin: int, wrong: int) -> str:
            sequence = self.sequence_at(begin + wrong)
            document = self.document_of(sequence)
            return f"{self.prefix}.bin, sequence {sequence} of document {document}"

        for begin in begins.tolist():
            ids = self.tokens[begin : begin + _WINDOW]
            check_vocabulary(ids, vocab_size, functools.partial(where, begin))

    def verify(self) -> None:
        """ValueError where .bin differs from its checksums, naming the damaged documents, or has
        none."""
        sums = checksum.read_sums(self.prefix)
        if sums is None:
            raise ValueError(
                f"there is no {self.prefix}{checksum.SUFFIX} to verify against: make it with "
                f"`maxmeg preprocess verify --create {self.prefix}`"
            )
        checksum.check_index(self.prefix)
        damaged = checksum.damaged_blocks(self.prefix, ".bin", sums)
        if not damaged:
            return
        lines = []
        for begin, end in damaged[:_SHOWN]:
            bounds = (begin // self.dtype.itemsize, (end - 1) // self.dtype.itemsize)
            first, last = (self.sequence_at(position) for position in bounds)
            lines.append(
                f"bytes [{begin}, {end}): sequences {first} to {last}, documents "
                f"{self.document_of(first)} to {self.document_of(last)}"
            )
        num_others = len(damaged) - len(lines)
        lines += [f"and {num_others} more blocks"] if num_others else []
        raise ValueError(
            f"{self.prefix}.bin differs from {self.prefix}{checksum.SUFFIX} in {len(damaged)} "
            "blocks; " + "; ".join(lines) + f": it is damaged; {_REMEDY}"
        )


def _map(path: Path, may_be_empty: bool = False) -> mmap.mmap | bytes:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {corpus_command(str(path.with_suffix('')))}")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            if may_be_empty:
                return b""
            raise ValueError(f"{path} is empty: {_REMEDY}")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_index(path: Path, may_be_empty: bool) -> _Index:
    data = _map(path)
    if len(data) < HEADER.size:
        raise ValueError(
            f"{path} has {len(data)} bytes, less than the header's {HEADER.size}: {_REMEDY}"
        )
    magic, version, code, sequences, documents = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"{path} starts with {magic!r}, not {MAGIC!r}: it is not a token index")
    if version != VERSION:
        raise ValueError(f"{path} has version {version}; only version {VERSION} exists: {_REMEDY}")
    if code not in DTYPES:
        raise ValueError(f"{path} has dtype code {code}, not one of 1 to 8: {_REMEDY}")
    size = HEADER.size + 12 * sequences + 8 * documents
    if len(data) not in (size, size + sequences):
        raise ValueError(
            f"{path} has {len(data)} bytes, but {sequences} sequences and {documents} document "
            f"indices need {size}: it is truncated or corrupt; {_REMEDY}"
        )
    if not sequences and not may_be_empty:
        raise ValueError(f"{path} holds no sequences: the corpus had no text; {_REMEDY}")
    at = HEADER.size
    lengths = np.frombuffer(data, "<i4", sequences, at)
    pointers = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
    indices = np.frombuffer(data, "<i8", documents, at + 12 * sequences)
    modes = np.frombuffer(data, "<i1", sequences, size) if len(data) > size else None
    return _Index(DTYPES[code], lengths, pointers, indices, modes)


def _check_index(path: Path, index: _Index) -> None:
    """Check that no length is negative, offsets are sums of lengths, and documents are in order."""
    expected = 0
    for begin in range(0, len(index.lengths), _CHUNK):
        lengths = index.lengths[begin : begin + _CHUNK].astype(np.int64)
        if lengths.min() < 0:
            i = int(np.argmax(lengths < 0))
            raise ValueError(
                f"{path} gives sequence {begin + i} the negative length {lengths[i]}: {_REMEDY}"
            )
        ends = expected + np.cumsum(lengths) * index.dtype.itemsize
        right = np.concatenate([[expected], ends[:-1]])
        wrong = index.pointers[begin : begin + _CHUNK] != right
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"{path} places sequence {begin + i} at byte {index.pointers[begin + i]}, but the "
                f"sequences before it end at byte {right[i]}: {_REMEDY}"
            )
        expected = int(ends[-1])
    indices, count = index.document_indices, len(index.lengths)
    if not len(indices) or indices[0] != 0 or indices[-1] != count:
        ends = (int(indices[0]), int(indices[-1])) if len(indices) else ()
        raise ValueError(
            f"{path} has document indices from {ends}, not from 0 to its {count} "
            f"sequences: {_REMEDY}"
        )
    for begin in range(0, len(indices) - 1, _CHUNK):
        falls = np.diff(indices[begin : begin + _CHUNK + 1]) < 0
        if falls.any():
            i = begin + int(np.argmax(falls))
            raise ValueError(
                f"{path} ends document {i} at sequence {indices[i + 1]}, before its start at "
                f"{indices[i]}: {_REMEDY}"
            )


def _map_tokens(path: Path, dtype: np.dtype, count: int, may_be_empty: bool) -> np.ndarray:
    size = count * dtype.itemsize
    data = _map(path, may_be_empty)
    if len(data) != size:
        raise ValueError(
            f"{path} has {len(data)} bytes, but its .idx describes {size} ({count} tokens of "
            f"{dtype}): it is truncated or belongs to another .idx; {_REMEDY}"
        )
    return np.frombuffer(data, dtype)


class IndexedWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`, byte for byte as Megatron-LM does, `PREFIX.sums`, and
    `PREFIX.weights.npy` if a document has another weight than 1.

    A context manager: the files appear when the block ends without an error, .idx last. Until then
    the data is in temporary files beside them, so a writer that is killed leaves no complete pair.
    """

    def __init__(
        self,
        prefix: str | os.PathLike,
        vocab_size: int | None = None,
        dtype: np.dtype | type | str | None = None,
        multimodal: bool = False,
        checksums: bool = True,
    ) -> None:
        self.prefix = os.fspath(prefix)
        if dtype is None:
            self.dtype = token_dtype(vocab_size)
        else:
            self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            names = ", ".join(str(d) for d in CODES)
            raise ValueError(f"{self.dtype} cannot be stored in .bin files: choose one of {names}")
        self.num_tokens = 0
        self._lengths = array.array("i")
        self._ends = array.array("q", [0])
        self._weights = array.array("f")
        self._modes = array.array("b") if multimodal else None
        self._sums = checksum.BlockSums() if checksums else None
        suffixes = (".bin", ".idx", checksum.SUFFIX, loss_weights.SUFFIX)
        self._temporary = {s: f"{self.prefix}{s}.{os.getpid()}.tmp" for s in suffixes}
        with _explain_failure(self.prefix):
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._temporary[".bin"], "wb", buffering=1 << 20)  # noqa: SIM115

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def add_document(
        self,
        tokens: Sequence[int] | np.ndarray,
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
    ) -> None:
        """Add a document with sequences of these lengths (by default one) and modes (by default 0).

        tokens: of all sequences; an array of any shape is read row by row.
        """
        values = np.asarray(tokens).reshape(-1)
        lengths = [len(values)] if lengths is None else lengths
        assert sum(lengths) == len(values) and (modes is None or len(modes) == len(lengths))
        if self.dtype.kind in "iu" and values.size:
            bounds = np.iinfo(self.dtype.name)
            low, high = int(values.min()), int(values.max())
            if low < bounds.min or high > bounds.max:
                raise ValueError(
                    f"ids from {low} to {high} do not fit {self.dtype}: give a larger vocab_size"
                )
        counts = np.array(lengths, np.int64)
        self.add_documents(values.astype(self.dtype), counts, np.array([len(counts)]))
        if self._modes is not None:
            self._modes.extend(modes if modes is not None else [0] * len(counts))

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Add all documents of a dataset with the same dtype."""
        ends = dataset.document_indices[1:]
        self.add_documents(dataset.tokens, dataset.lengths, ends, dataset.weights)
        if self._modes is not None and dataset.modes is not None:
            self._modes.frombytes(dataset.modes.tobytes())

    def add_documents(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        ends: np.ndarray,
        weights: np.ndarray | None = None,
    ) -> None:
        """Add documents as arrays: tokens of the writer's dtype, the lengths of their sequences,
        the number of sequences up to the end of each document, and their float32 weights (by
        default 1)."""
        assert tokens.dtype == self.dtype
        data = tokens.data.cast("B") if len(tokens) else memoryview(b"")
        for begin in range(0, len(data), _COPIED):
            self._write(data[begin : begin + _COPIED])
        self.num_tokens += len(tokens)
        before = len(self._lengths)
        self._lengths.frombytes(lengths.astype(np.int32, copy=False).tobytes())
        self._ends.frombytes((ends + before).astype(np.int64).tobytes())
        weights = np.ones(len(ends), np.float32) if weights is None else weights
        self._weights.frombytes(weights.astype(np.float32, copy=False).tobytes())

    def _write(self, data: memoryview) -> None:
        with _explain_failure(self.prefix):
            self._bin.write(data)
        if self._sums is not None:
            self._sums.update(data)

    def finish(self) -> None:
        """Flush the data, then rename the temporary files to their final names."""
        try:
            with _explain_failure(self.prefix):
                _sync_and_close(self._bin)
                index = checksum.BlockSums()
                with open(self._temporary[".idx"], "wb") as file:
                    for part in self._index_parts():
                        file.write(part)
                        index.update(part)
                    _sync_and_close(file)
                suffixes = [".bin", ".idx"]
                if self._sums is not None:
                    sums = checksum.Sums({".bin": self._sums.finish(), ".idx": index.finish()})
                    with open(self._temporary[checksum.SUFFIX], "wb") as file:
                        file.write(checksum.render(sums))
                        _sync_and_close(file)
                    suffixes.insert(1, checksum.SUFFIX)
                weights = np.frombuffer(self._weights, np.float32)
                if (weights != 1).any():
                    with open(self._temporary[loss_weights.SUFFIX], "wb") as file:
                        np.save(file, weights)
                        _sync_and_close(file)
                    suffixes.insert(1, loss_weights.SUFFIX)
                for suffix in (".idx", checksum.SUFFIX, loss_weights.SUFFIX):
                    Path(self.prefix + suffix).unlink(missing_ok=True)
                for suffix in suffixes:
                    os.replace(self._temporary[suffix], self.prefix + suffix)
                flush(Path(self.prefix).parent)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Removes the temporary files."""
        with contextlib.suppress(OSError):
            self._bin.close()
        for path in self._temporary.values():
            Path(path).unlink(missing_ok=True)

    def _index_parts(self) -> Iterator[bytes]:
        lengths = np.frombuffer(self._lengths, np.int32)
        code = CODES[self.dtype]
        yield HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._ends))
        yield lengths.astype("<i4", copy=False).tobytes()
        last = 0
        for begin in range(0, len(lengths), _CHUNK):
            ends = last + np.cumsum(lengths[begin : begin + _CHUNK], dtype=np.int64)
            yield (np.concatenate([[last], ends[:-1]]) * self.dtype.itemsize).tobytes()
            last = ends[-1]
        yield np.frombuffer(self._ends, np.int64).astype("<i8", copy=False).tobytes()
        if self._modes is not None:
            yield self._modes.tobytes()


@contextlib.contextmanager
def _explain_failure(prefix: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {prefix}.bin and .idx: {error.strerror or error}; choose a folder that "
            "is writable and has space"
        ) from error


def _sync_and_close(file) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
