"""Folders for checkpoints, on the disk and in object storage."""

import itertools
import os
from pathlib import Path

import pytest
from s3_server import s3  # noqa: F401

from maxmeg.checkpoint.places import place_of

_number = itertools.count()


@pytest.fixture(params=["disk", "s3"])
def folder(request, tmp_path) -> Path:
    """An absent folder, on the disk or in an S3 of one's own."""
    if request.param == "disk":
        return tmp_path / "run"
    request.getfixturevalue("s3")
    import s3fs

    bucket = f"bucket-{os.getpid()}-{next(_number)}"
    s3fs.S3FileSystem().mkdir(bucket)
    return place_of(f"s3://{bucket}/run")
