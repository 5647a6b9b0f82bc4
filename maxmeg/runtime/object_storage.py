"""Object storage for TensorStore and fsspec: addresses, the environment's settings, errors."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARIES = {"s3": "s3fs", "gs": "gcsfs"}


def is_remote(place: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(place)


def key_value_store(url: str) -> dict[str, Any] | str:
    """Return TensorStore's key-value store of a folder. Of S3 it has the endpoint, the region and
    the credentials of the variables that the AWS tools read."""
    scheme, separator, place = url.partition("://")
    if not separator:
        return {"driver": "file", "path": url}
    if scheme != "s3":
        return url
    bucket, _, path = place.partition("/")
    values = {
        "endpoint": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        "aws_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        "aws_credentials": {"type": "environment"} if "AWS_ACCESS_KEY_ID" in os.environ else None,
    }
    options = {name: value for name, value in values.items() if value}
    return {"driver": "s3", "bucket": bucket, "path": path, **options}


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a folder, and the folder's path in it. It keeps no listings.

    ValueError for another scheme than gs:// and s3://, and for a library that is not installed.
    """
    library = LIBRARIES.get(url.partition("://")[0])
    if library is None:
        raise ValueError(f"{url} is neither a path nor at s3:// or gs://")
    try:
        import fsspec

        files, path = fsspec.core.url_to_fs(url)
        keep_no_listings(files)
        return files, path
    except ImportError as error:
        package = "'maxmeg[s3]'" if library == "s3fs" else library
        raise ValueError(f"{url} needs {library}: pip install {package}") from error


def keep_no_listings(files: Any) -> None:
    """Let a file system of fsspec ask the store for every listing: TensorStore, other threads and
    other processes write to the same folders."""
    files.dircache.use_listings_cache = False
    files.dircache.clear()


@contextlib.contextmanager
def as_os_errors(place: Path) -> Iterator[None]:
    """Raise errors of the store's library, which has many types, as OSError with the folder."""
    try:
        yield
    except (OSError, ValueError) as error:
        if is_remote(place) and isinstance(error, PermissionError):
            raise refused(place, error) from error
        raise
    except Exception as error:
        if not is_remote(place):
            raise
        if "Credential" in type(error).__name__:
            raise refused(place, error) from error
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", os.fspath(place)) from error


def refused(place: Path, error: Exception) -> PermissionError:
    return PermissionError(
        errno.EACCES,
        f"{error}: check the credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY) and that they may list, read and write",
        os.fspath(place),
    )
