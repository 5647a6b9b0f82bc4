"""Read checkpoints of torch.distributed.checkpoint, such as Megatron-LM's torch_dist folders.

`.metadata` lists the parts of every tensor and their places in the files `__RANK_NUMBER.distcp`. A
child process with torch (`hf/formats/torch_child.py`) reads them, so that this process neither
needs torch nor unpickles anything: values come over a pipe, one part at a time.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import subprocess
import sys
import typing
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.hf.formats.torch_files import CHILD

METADATA, COMMON, OBJECT = ".metadata", "common.pt", "common_state/shard_0_1"
DTYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}

Box = tuple[tuple[int, int], ...]  # begin and end in every dimension


class UnsafePickleError(ValueError):
    """A pickle names code that no checkpoint needs; says which file and what it names."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A box of a tensor and its place in a file."""

    box: Box
    file: str
    start: int
    length: int


class TorchDistReader:
    """`tensors` by name, `read`, and the `arguments` of the run; a context manager.

    `tensors` has the tensors of a dtype that weights have, `dtypes` the dtype names of all tensors.

    python: an interpreter with torch. ValueError for a folder that is not such a checkpoint, for
    parts that leave gaps, overlap or exceed the tensor, and for truncated files; UnsafePickleError.
    """

    def __init__(self, folder: str | pathlib.Path, python: str = sys.executable) -> None:
        self._folder = pathlib.Path(folder)
        if not (self._folder / METADATA).is_file():
            raise ValueError(f"{self._folder} has no {METADATA}: give a torch_dist folder")
        # -P: the child's neighbours must not shadow what torch imports.
        command = [python, "-P", str(CHILD)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._out: typing.Any = self._child.stdout
        try:
            catalogue = self._ask("catalogue", str(self._folder / METADATA))
            self._objects = catalogue["objects"]
            self.dtypes = {name: str(s["dtype"]) for name, s in catalogue["tensors"].items()}
            self._by_entry: dict[str, dict[int, list[Part]]] = {}
            self._shapes = {name: tuple(s["shape"]) for name, s in catalogue["tensors"].items()}
            self._parts = {
                name: [self._part(name, chunk) for chunk in stored["chunks"]]
                for name, stored in catalogue["tensors"].items()
            }
            self.tensors = {
                name: TensorInfo(DTYPES[dtype], self._shapes[name])
                for name, dtype in self.dtypes.items()
                if dtype in DTYPES
            }
        except BaseException:
            self.close()
            raise

    def arguments(self) -> dict[str, typing.Any]:
        """Return the plain values of Megatron-LM's arguments; empty if the checkpoint has none."""
        path = self._folder / COMMON
        if path.is_file():
            return self._ask("arguments", str(path), 0, path.stat().st_size)
        place = self._objects.get(OBJECT)
        if place is None:
            return {}
        name, start, length = self._place(OBJECT, place)
        return self._ask("arguments", str(self._folder / name), start, length)

    def read(self, name: str, *index: int) -> np.ndarray:
        """Return a tensor, or an entry of its first dimensions."""
        if name not in self.tensors:
            raise ValueError(f"{self._folder} has no weights named {name}")
        shape, lead = self._shapes[name], len(index)
        inside = all(0 <= i < size for i, size in zip(index, shape, strict=False))
        if lead > len(shape) or not inside:
            place = ", ".join(map(str, index))
            raise ValueError(f"tensor {name} of shape {shape} has no entry {place}")
        entries, rest = [(i, i + 1) for i in index], [(0, size) for size in shape[lead:]]
        target: Box = (*entries, *rest)
        candidates = self._entries(name).get(index[0], []) if index else self._parts[name]
        parts = [(part, common(part.box, target)) for part in candidates]
        parts = [(part, box) for part, box in parts if volume(box)]
        self._check_cover(name, [box for _, box in parts], target)
        array = np.empty([end - begin for begin, end in target], DTYPES[self.dtypes[name]])
        for part, box in parts:
            array[slices(box, target)] = self._receive(name, part, box)
        return array[(0,) * lead] if lead else array

    def _entries(self, name: str) -> dict[int, list[Part]]:
        """Return the parts of every entry of dimension 0: experts of all layers have thousands."""
        if name not in self._by_entry:
            entries: dict[int, list[Part]] = {}
            for part in self._parts[name]:
                for entry in range(*part.box[0]):
                    entries.setdefault(entry, []).append(part)
            self._by_entry[name] = entries
        return self._by_entry[name]

    def close(self) -> None:
        """End the child process."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._out.close()
        self._child.wait()

    def __enter__(self) -> "TorchDistReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _part(self, name: str, chunk: Sequence[typing.Any]) -> Part:
        begins, sizes, *place = chunk
        shape = self._shapes[name]
        ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
        fits = len(ends) == len(shape) and all(
            0 <= begin <= end <= size for begin, end, size in zip(begins, ends, shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{name} of shape {shape} has a part {sizes} at {begins}, outside it")
        part = Part(tuple(zip(begins, ends, strict=True)), *self._place(name, place))
        dtype = DTYPES.get(self.dtypes[name])
        if dtype is not None and part.length < volume(part.box) * dtype.itemsize:
            raise ValueError(f"{name} has a part {sizes} of {dtype} in {part.length} bytes")
        return part

    def _place(self, name: str, place: Sequence[typing.Any]) -> tuple[str, int, int]:
        file, start, length = place
        if pathlib.PurePath(file).name != file or not (self._folder / file).is_file():
            raise ValueError(f"{name} lies in {file!r}, which {self._folder} does not have")
        size = (self._folder / file).stat().st_size
        if not 0 <= start <= start + length <= size:
            raise ValueError(
                f"{name} lies at bytes {start} to {start + length} of {file}, which has {size}: "
                "the file is truncated; copy it again"
            )
        return file, start, length

    def _check_cover(self, name: str, boxes: list[Box], target: Box) -> None:
        """ValueError unless the boxes partition `target`."""
        covered = sum(volume(box) for box in boxes)
        pairs = itertools.combinations(boxes, 2)
        if covered != volume(target) or any(volume(common(a, b)) for a, b in pairs):
            raise ValueError(
                f"the parts of {name} cover {covered} of {volume(target)} numbers, or overlap: "
                "the checkpoint is incomplete; copy it again"
            )

    def _request(self, ask: str, of: Sequence[typing.Any]) -> Mapping[str, typing.Any]:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"ask": ask, "of": of}).encode() + b"\n")
            self._child.stdin.flush()
            line = self._out.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            status = self._child.wait()
            raise ValueError(f"the process that reads {of[0]} ended with status {status}")
        reply = json.loads(line)
        if "unsafe" in reply:
            raise UnsafePickleError(reply["unsafe"])
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply

    def _ask(self, ask: str, *of: typing.Any) -> dict[str, typing.Any]:
        return self._request(ask, of)["found"]

    def _receive(self, name: str, part: Part, box: Box) -> np.ndarray:
        """Return the values of a box inside a part."""
        dtype = DTYPES[self.dtypes[name]]
        sizes = [end - begin for begin, end in part.box]
        inside = [[place.start, place.stop] for place in slices(box, part.box)]
        where = [str(self._folder / part.file), part.start, part.length]
        count = self._request("part", [*where, dtype.name, sizes, inside])["bytes"]
        data = np.empty(volume(box), dtype)
        received = self._out.readinto(data.view(np.uint8))
        if received != count or count != data.nbytes:
            raise ValueError(f"{where[0]} gave {received} of {count} bytes, expected {data.nbytes}")
        return data.reshape([end - begin for begin, end in box])


def common(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes; of volume 0 if they are disjoint."""
    bounds = zip(a, b, strict=True)
    return tuple((max(p, r), max(p, r, min(q, s))) for (p, q), (r, s) in bounds)


def volume(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


def slices(box: Box, within: Box) -> tuple[slice, ...]:
    """Return the slices of a box relative to the corner of another."""
    return tuple(
        slice(begin - corner, end - corner)
        for (begin, end), (corner, _) in zip(box, within, strict=True)
    )
