"""Read pytorch_model.bin, in one file or in shards, without torch.

torch.save writes a zip archive: a pickle with the dtype, shape and storage of every tensor, and the
storages, uncompressed. A child process (`torch_child.py`) lists the tensors by an unpickler that
runs no code; this process maps the storages. The files are not trusted: every place is checked.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.hf.formats.safetensors import DTYPES, MAX_DIMENSIONS, SafetensorsFolder, mapped

CHILD = Path(__file__).with_name("torch_child.py")
COMMAND = [sys.executable, "-P", str(CHILD)]  # -P: its neighbours must not shadow its imports


class TorchFile:
    """One file: `tensors` by name, and `read`; ValueError if it is damaged, or wants other code
    than that of tensors."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._size = self.path.stat().st_size
        request = json.dumps({"ask": "weights", "of": [str(self.path)]}).encode() + b"\n"
        answer = subprocess.run(COMMAND, input=request, stdout=subprocess.PIPE, check=False).stdout
        reply = json.loads(answer or '{"error": "its reader ended"}')
        if "found" not in reply:
            problem = reply.get("unsafe") or reply.get("error")
            raise ValueError(f"{self.path}: {problem.removeprefix(f'{self.path} ')}")
        self._places: dict[str, Mapping[str, Any]] = reply["found"]
        self.tensors = {name: self._checked(name) for name in self._places}

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only view of the file, which stays mapped as long as it."""
        info, place = self.tensors[name], self._places[name]
        size, count = info.dtype.itemsize, span(place)
        if not math.prod(info.shape):
            return np.zeros(info.shape, info.dtype)
        flat = mapped(self.path, self._size, place["start"] + size * place["offset"], count * size)
        strides = [size * stride for stride in place["strides"]]
        numbers = np.frombuffer(flat, info.dtype, count)
        return np.lib.stride_tricks.as_strided(numbers, info.shape, strides, writeable=False)

    def _checked(self, name: str) -> TensorInfo:
        """Return dtype and shape of a tensor; ValueError unless its storage holds all of it."""
        place = self._places[name]
        dtype, sizes = DTYPES[place["dtype"]], (*place["shape"], *place["strides"], place["offset"])
        fits = len(place["shape"]) == len(place["strides"]) <= MAX_DIMENSIONS and min(sizes) >= 0
        end = place["start"] + place["length"]
        fits = fits and 0 <= place["start"] <= end <= self._size
        if not fits or (place["offset"] + span(place)) * dtype.itemsize > place["length"]:
            raise ValueError(
                f"{self.path}: {name} of shape {place['shape']} does not fit into its "
                f"{place['length']} bytes of the file: download it again"
            )
        return TensorInfo(dtype, tuple(place["shape"]))


def span(place: Mapping[str, Any]) -> int:
    """Return the number of elements from a tensor's first to its last."""
    pairs = zip(place["shape"], place["strides"], strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs) if all(place["shape"]) else 0


class TorchFolder(SafetensorsFolder):
    """The weights of a Hugging Face folder in the format of torch."""

    single, suffix, opened = "pytorch_model.bin", ".bin", TorchFile


def open_weights(folder: str | os.PathLike[str]) -> SafetensorsFolder:
    """Open the weights of a folder: safetensors, or files of torch where there are none.

    ValueError for a folder without either.
    """
    names = [f"{TorchFolder.single}{end}" for end in ("", ".index.json")]
    is_torch = any((Path(folder) / name).is_file() for name in names)
    if is_torch and not [*Path(folder).glob("*.safetensors*")]:
        return TorchFolder(folder)
    return SafetensorsFolder(folder)
