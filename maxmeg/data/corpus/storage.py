"""Files by path, and objects by address: `s3://bucket/key`, or any other scheme of fsspec.

Objects are read in ranges. A failed read is retried with growing delays. Every error is a
ValueError that names the object: at once for errors that only the user can correct (a missing key,
credentials, a library that is not installed), otherwise after the last retry. Credentials and
endpoints are those that the store's own library finds, such as AWS_PROFILE and AWS_ENDPOINT_URL.
"""

import concurrent.futures
import glob as local
import io
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar

Found = TypeVar("Found")

BLOCK_BYTES = 1 << 23  # bytes per request: reading them takes long compared with the latency
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between retries
_ASKED = 16  # concurrent requests
_LIBRARIES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs"}
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://")
# Errors in programs rather than connections, which a retry would repeat.
_NEVER_AGAIN = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError,
    ValueError,
)  # fmt: skip


def is_remote(path: str | os.PathLike) -> bool:
    """Whether a name is the address of an object rather than a path."""
    return bool(_ADDRESS.match(os.fspath(path)))


def open_input(path: str) -> BinaryIO:
    """A seekable stream over a file or an object, which the caller closes."""
    if is_remote(path):
        return io.BufferedReader(_Object(path), BLOCK_BYTES)
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def exists(path: str) -> bool:
    """Whether a file or object exists; False for a folder."""
    if not is_remote(path):
        return os.path.isfile(path)
    information = _try("look for", path, lambda store, key: store.info(key), missing=None)
    return information is not None and information["type"] == "file"


def state(path: str) -> tuple[int, str]:
    """Bytes of a file or an object, and a version that changes when it is written again."""
    if is_remote(path):
        information = _try("look at", path, lambda store, key: store.info(key))
        names = ("ETag", "etag", "LastModified", "updated", "mtime", "created")
        return int(information["size"]), next(
            (str(information[name]) for name in names if name in information), ""
        )
    try:
        information = os.stat(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    return information.st_size, str(information.st_mtime_ns)


def states(paths: Sequence[str]) -> list[tuple[int, str]]:
    """The `state` of each path; object stores answer several requests at a time."""
    if not any(map(is_remote, paths)):
        return [state(path) for path in paths]
    with concurrent.futures.ThreadPoolExecutor(_ASKED) as pool:
        return list(pool.map(state, paths))


def glob(pattern: str) -> list[str]:
    """The files or objects that match a pattern with * ? [ ] **, sorted."""
    if not is_remote(pattern):
        return sorted(path for path in local.glob(pattern, recursive=True) if exists(path))

    def find(store: Any, key: str) -> list[str]:
        entries = store.glob(key, detail=True)
        return [
            store.unstrip_protocol(k)
            for k, information in entries.items()
            if information["type"] == "file"
        ]

    return sorted(_try("list", pattern, find, missing=[]))


def read_range(path: str, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of a file or an object; ValueError where it has fewer."""
    if begin >= end:
        return b""
    if is_remote(path):
        return _try("read", path, lambda store, key: _read_object(store, key, begin, end))
    with open_input(path) as file:
        file.seek(begin)
        data = file.read(end - begin)
    if len(data) < end - begin:
        raise ValueError(f"{path} ends at byte {begin + len(data)}, before byte {end}: it was cut")
    return data


def _read_object(store: Any, key: str, begin: int, end: int) -> bytes:
    data = store.cat_file(key, start=begin, end=end)
    if len(data) != end - begin:
        size = store.info(key)["size"]
        if size < end:
            raise ValueError(f"it ends at byte {size}, before byte {end}: it was cut or replaced")
        raise EOFError(f"{len(data)} of the bytes [{begin}, {end}) came")
    return data


def _try(
    operation: str, path: str, function: Callable[[Any, str], Found], **missing: Found
) -> Found:
    """Call function(store, key), and retry while the connection fails. missing: the result
    without the key."""
    store, key = _store(path)
    for i in range(len(WAITS) + 1):
        try:
            return function(store, key)
        except FileNotFoundError as error:
            if missing:
                return missing["missing"]
            raise ValueError(f"{path} does not exist: check bucket and key") from error
        except _NEVER_AGAIN as error:
            raise ValueError(f"cannot {operation} {path}: {_describe(error)}") from error
        except Exception as error:  # each library has its own connection errors
            if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
                raise ValueError(
                    f"not allowed to {operation} {path}: {_describe(error)}; check the credentials "
                    "(AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) and that they "
                    "may read and list the bucket"
                ) from error
            # botocore's error for an invalid bucket name
            if type(error).__name__ == "ParamValidationError":
                raise ValueError(f"cannot {operation} {path}: {_describe(error)}") from error
            if i == len(WAITS):
                raise ValueError(
                    f"cannot {operation} {path}: {len(WAITS) + 1} attempts failed, the last with "
                    f"{_describe(error)}; check the network and the store's address "
                    "(AWS_ENDPOINT_URL), then start again"
                ) from error
        # Many processes lose the connection at once; they must not all retry at once.
        time.sleep(WAITS[i] * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")


def _store(path: str) -> tuple[Any, str]:
    match = _ADDRESS.match(path)
    assert match is not None
    library = _LIBRARIES.get(match[1], "fsspec")
    remedy = "'maxmeg[s3]'" if library in ("s3fs", "fsspec") else library
    try:
        import fsspec

        # Objects appear and disappear during a run, so listings are not cached.
        store = fsspec.filesystem(match[1], use_listings_cache=False)
    except ImportError as error:
        raise ValueError(f"{path} needs {library}: pip install {remedy}; {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}; use s3://, gs://, file:// or a path") from error
    return store, store._strip_protocol(path)


def _describe(error: Exception) -> str:
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{kind}{error}"


class _Object(io.RawIOBase):
    """An object as a file; each read is one range request."""

    def __init__(self, path: str) -> None:
        self._path, self._size, self._at = path, state(path)[0], 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = read_range(self._path, self._at, min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
