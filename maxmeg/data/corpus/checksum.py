"""CRC-32 checksums of .bin and .idx files, by blocks, in `PREFIX.sums`: they locate damage.

The side file is text: a line with its format, one line per file (suffix, size in bytes, hexadecimal
CRC-32 of every block), and the CRC-32 of these lines. CRC-32 detects every single flipped bit and
every burst of up to 32 bits; it does not protect against deliberate changes.
"""

import concurrent.futures
import dataclasses
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from maxmeg.data.corpus.stored import write_atomically

BLOCK_BYTES = 1 << 20
SUFFIX = ".sums"
_THREADS = 8  # reading and zlib release the GIL
_FORMAT = "maxmeg sums 1 block_bytes"
_REMEDY = (
    "check where the files come from, then create the checksums again with "
    "`maxmeg preprocess verify --create PREFIX`, or delete the checksums"
)


@dataclasses.dataclass(frozen=True)
class FileSums:
    """Size of a file in bytes and the CRC-32 of each of its blocks, uint32."""

    size: int
    blocks: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sums:
    """The contents of a side file: the checksums of each file, by its suffix such as `.bin`."""

    files: Mapping[str, FileSums]
    block_bytes: int = BLOCK_BYTES


class BlockSums:
    """Computes the checksums of a stream while it is written."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes, self._size, self._crc = block_bytes, 0, 0
        self._blocks: list[int] = []

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the stream."""
        view, at = memoryview(data).cast("B"), 0
        while at < len(view):
            room = self._block_bytes - self._size % self._block_bytes
            part = view[at : at + room]
            self._crc = zlib.crc32(part, self._crc)
            self._size += len(part)
            at += len(part)
            if len(part) == room:
                self._blocks.append(self._crc)
                self._crc = 0

    def finish(self) -> FileSums:
        """The checksums of all bytes so far."""
        rest = [self._crc] if self._size % self._block_bytes else []
        return FileSums(self._size, np.array(self._blocks + rest, np.uint32))


def render(sums: Sums) -> bytes:
    """The bytes of a side file."""
    lines = [f"{_FORMAT} {sums.block_bytes}"]
    for suffix, file in sums.files.items():
        lines.append(" ".join([suffix, str(file.size), *(f"{b:08x}" for b in file.blocks)]))
    text = "".join(line + "\n" for line in lines).encode()
    return text + f"{zlib.crc32(text):08x}\n".encode()


def read_sums(prefix: str) -> Sums | None:
    """The contents of the side file of `prefix`; None without a side file; ValueError if
    damaged."""
    path = Path(prefix + SUFFIX)
    if not path.is_file():
        return None
    data = path.read_bytes()
    text, checksum = data[:-9], data[-9:]
    if checksum != f"{zlib.crc32(text):08x}\n".encode():
        raise ValueError(f"{path} is damaged (its last line is not its checksum): {_REMEDY}")
    first, *lines = text.decode("utf-8", "replace").splitlines()
    match = re.fullmatch(re.escape(_FORMAT) + r" ([1-9]\d*)", first)
    if not match:
        raise ValueError(f"{path} begins with {first[:80]!r}, not {_FORMAT!r}: {_REMEDY}")
    block_bytes, files = int(match[1]), {}
    for line in lines:
        if not re.fullmatch(r"\.(bin|idx) \d+( [0-9a-f]{8})*", line):
            raise ValueError(f"{path} has the line {line[:80]!r}: {_REMEDY}")
        suffix, size, *blocks = line.split(" ")
        files[suffix] = FileSums(int(size), np.array([int(b, 16) for b in blocks], np.uint32))
    wrong = [s for s, f in files.items() if len(f.blocks) != -(-f.size // block_bytes)]
    if wrong or set(files) != {".bin", ".idx"}:
        raise ValueError(f"{path} describes {sorted(files)}, not all of .bin and .idx: {_REMEDY}")
    return Sums(files, block_bytes)


def sums_of_file(path: str | os.PathLike, block_bytes: int = BLOCK_BYTES) -> FileSums:
    """Compute the checksums of a file, in several threads."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:

        def crc(begin: int) -> int:
            return zlib.crc32(os.pread(file.fileno(), block_bytes, begin))

        begins = range(0, size, block_bytes)
        if len(begins) <= 1:
            blocks = [crc(begin) for begin in begins]
        else:
            with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
                blocks = list(pool.map(crc, begins))
    return FileSums(size, np.array(blocks, np.uint32))


def damaged_blocks(prefix: str, suffix: str, sums: Sums) -> list[tuple[int, int]]:
    """Byte ranges [begin, end) of `prefix` + `suffix` that differ from their checksums.

    ValueError where the size of the file differs, as the damage then cannot be located.
    """
    path, expected = Path(prefix + suffix), sums.files[suffix]
    actual = sums_of_file(path, sums.block_bytes)
    if actual.size != expected.size:
        raise ValueError(
            f"{path} has {actual.size} bytes, but {prefix}{SUFFIX} describes {expected.size}: it "
            f"was truncated, or rewritten without its checksums; copy it again, or {_REMEDY}"
        )
    size = sums.block_bytes
    wrong = np.flatnonzero(actual.blocks != expected.blocks).tolist()
    return [(i * size, min((i + 1) * size, expected.size)) for i in wrong]


def check_index(prefix: str) -> None:
    """ValueError where PREFIX.idx differs from the side file; does nothing without a side file."""
    sums = read_sums(prefix)
    damaged = damaged_blocks(prefix, ".idx", sums) if sums else []
    if damaged:
        begin, end = damaged[0]
        raise ValueError(
            f"{prefix}.idx differs from {prefix}{SUFFIX} in {len(damaged)} blocks, first in bytes "
            f"[{begin}, {end}): it is damaged, copy it again; if another program rewrote it, "
            f"{_REMEDY}"
        )


def create_sums(prefix: str) -> Sums:
    """Write the side file for the .bin and .idx files as they are."""
    sums = Sums({suffix: sums_of_file(prefix + suffix) for suffix in (".bin", ".idx")})
    path = Path(prefix + SUFFIX)
    try:
        write_atomically(path, render(sums))
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}; choose a folder that is writable"
        ) from error
    return sums
