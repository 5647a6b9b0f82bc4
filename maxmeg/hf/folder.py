"""Read a Hugging Face folder in place, as a checkpoint of step 0: nothing is written.

Each process reads the mapped files, and assembles the parts of arrays that its devices hold, in the
dtype of the files.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from maxmeg.checkpoint import integrity
from maxmeg.checkpoint.integrity import CorruptCheckpointError, Manifest, Tensor
from maxmeg.checkpoint.manager import Checkpointer, NoCheckpointError, Tree, in_structure
from maxmeg.checkpoint.names import VOCABULARY_TABLES
from maxmeg.checkpoint.restore import check_tree, target_of
from maxmeg.checkpoint.storage import Order
from maxmeg.checkpoint.stream import Index, StreamReader, TensorInfo, as_index, row_blocks
from maxmeg.config import files
from maxmeg.config.data import Objective, TooLong
from maxmeg.config.labelled import Scored
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import missing_rows
from maxmeg.hf.families import read as families
from maxmeg.hf.families.binding import Binding
from maxmeg.hf.families.classifier_tables import class_names, objective_of
from maxmeg.hf.families.keys import checked
from maxmeg.hf.families.rotary import longrope_notes
from maxmeg.hf.formats.safetensors import DTYPES
from maxmeg.hf.formats.torch_files import open_weights
from maxmeg.hf.matching import find_tokenizer, match, model_of, open_folder
from maxmeg.processes.host import HOST

MASTER = DTYPES["F32"]
SAMPLED = 512  # most tensors whose first and last rows are part of a digest
TILE = 128  # rows and columns of a matrix that are copied together
MOST_THREADS = 16
log = logging.getLogger("maxmeg")
Span = tuple[int, int]  # first entry along a dimension, and the entry after the last


def open_checkpoints(folder: str | os.PathLike[str], **settings: typing.Any) -> Checkpointer:
    """Return the checkpoints of a run folder, or the model of a Hugging Face folder as one.

    settings: as for `Checkpointer`. ValueError from its methods for a model that is not supported.
    """
    if files.is_model_folder(folder):
        return FolderCheckpoint(folder, **settings)
    return Checkpointer(files.checkpoints_of(folder), **settings)


def described_settings(folder: str) -> Config:
    """Return the settings of a run with the model of a Hugging Face folder."""
    source = open_folder(folder)
    return run_config(source.config, model_of(source)[1], Path(folder).absolute())


def run_config(
    described: Mapping[str, typing.Any], model: ModelConfig, folder: Path, tokenizer: str = ""
) -> Config:
    """Return the settings of a run in `folder`, which holds the files of the tokenizer.

    described: the config.json of the model. tokenizer: a value of data.tokenizer in place of that
    in the folder; without either the run has token ids.
    """
    config = Config(run_dir=str(folder), model=model)
    spec = tokenizer or find_tokenizer(folder)
    config.data.tokenizer = spec or f"null:{model.vocab_size}"
    config.data.sequence_length = min(config.data.sequence_length, model.max_position)
    if model.has_source and (first := described.get(families.START_TOKEN)) is not None:
        most = model.vocab_size - 1
        config.data.start_token = checked(families.START_TOKEN, first, int, zero=True, most=most)
    if model.head.num_classes:
        objective = objective_of(families.architecture(described))
        scored = Scored.last if model.attention.causal else Scored.first
        labels = tuple(class_names(described)) if objective is not Objective.choose else ()
        named = {"objective": objective, "labels": labels, "too_long": TooLong.truncate}
        named |= {"scored": scored} if objective is not Objective.tag else {}
        config.data = dataclasses.replace(config.data, **named)
    return config


def array_path(name: str) -> str:
    """Return the path in a checkpoint of an array of the model."""
    return "model/" + name.replace(".", "/")


def array_paths(model: ModelConfig) -> dict[str, TensorInfo]:
    """Return dtype and shape on disk of all arrays of a model: float32, the vocabulary padded."""
    infos = {}
    for name, shape in families.array_shapes(model).items():
        rows = (model.padded_vocab_size(1), *shape[1:]) if name in VOCABULARY_TABLES else shape
        infos[array_path(name)] = TensorInfo(MASTER, rows)
    return infos


class Part(typing.NamedTuple):
    """A tensor in the files, or one expert of it, and which array of its binding is meant."""

    tensor: str
    expert: int | None
    binding: Binding
    number: int


class FolderReader:
    """The arrays of a Hugging Face folder, as a StreamReader has those of a checkpoint.

    digest: SHA-256 of config.json, of all names, dtypes and shapes of tensors, and of the first and
    last rows of at most SAMPLED tensors: it identifies the model.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        place = Path(folder).absolute()
        source = open_folder(place)
        family, model = model_of(source)
        self._weights, self._parts = source.weights, dict[str, dict[Index, Part]]()
        for name, binding in match(source.weights, model, family):
            for expert, piece in binding.pieces():
                for number, at in enumerate(piece.ours):
                    parts = self._parts.setdefault(array_path(at.name), {})
                    parts[at.index] = Part(name, expert, piece, number)
        config = run_config(source.config, model, place)
        tokenizer = load_tokenizer(config.data.tokenizer)
        notes = *source.notes, *missing_rows(tokenizer, model.vocab_size), *longrope_notes(model)
        for note in notes:
            log.info("%s: %s", place, note)
        self.tensors = array_paths(model)
        self.digest = digest_of(place, source.config)
        self.metadata: dict[str, typing.Any] = {
            "config": files.to_dict(config),
            "tokenizer": tokenizer.identity,
            "consumed_samples": 0,
        }

    def read(self, path: str, index: Index | int | None = None) -> np.ndarray:
        """Return an array in float32, or entry `index` of its first dimensions."""
        lead, shape = as_index(index), self.tensors[path].shape
        spans = [*((i, i + 1) for i in lead), *((0, size) for size in shape[len(lead) :])]
        return self.part(path, spans).astype(MASTER)[(0,) * len(lead)]

    def blocks(self, path: str) -> Iterator[np.ndarray]:
        """Yield an array in float32 in blocks of rows, one in memory at a time."""
        info = self.tensors[path]
        for rows in row_blocks(info.shape, info.dtype.itemsize):
            spans = [(rows.start, rows.stop), *((0, size) for size in info.shape[1:])]
            yield self.part(path, spans[: len(info.shape)]).astype(MASTER)

    def part(self, path: str, spans: Sequence[Span], order: Order | None = None) -> np.ndarray:
        """Return a part of an array, in the dtype of its tensors in the files.

        Entries beyond a tensor are zero, and so are arrays that no file holds. order: the model's
        layer in each entry of dimension 0, -1 for zeros.
        """
        shape, parts = tuple(stop - start for start, stop in spans), self._parts.get(path, {})
        dtypes = {self._weights.tensors[part.tensor].dtype for part in parts.values()}
        result = np.zeros(shape, dtypes.pop() if len(dtypes) == 1 else MASTER)
        depth = len(next(iter(parts), ()))
        lead: list[Sequence[int]] = [range(*span) for span in spans[:depth]]
        if order is not None:
            lead[0] = order[slice(*spans[0])]
        inner = tuple(slice(*span) for span in spans[depth:])

        def fill(entries: tuple[tuple[int, int], ...]) -> None:
            index = tuple(source for _, source in entries)
            if -1 in index:
                return
            part = parts[index]
            tensor = self._weights.read(part.tensor, *as_index(part.expert))
            array = part.binding.split(tensor)[part.number][inner]
            target = result[(*(number for number, _ in entries), ...)]
            copy(target[(*map(slice, array.shape), ...)], array)

        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(fill, itertools.product(*map(enumerate, lead)) if parts else ()))
        return result


Reader: typing.TypeAlias = StreamReader | FolderReader


class FolderCheckpoint(Checkpointer):
    """A Hugging Face folder as a folder with one checkpoint, of step 0, for reading alone."""

    @functools.cached_property
    def reader(self) -> FolderReader:
        return FolderReader(self.folder)

    def steps(self) -> list[int]:
        return [0]

    def find(self, step: int) -> tuple[Path, Manifest]:
        """Return the folder and the manifest of step 0, whose digest is the same on all processes.

        ValueError for another step, and for a model that is not supported.
        """
        if step:
            raise NoCheckpointError(f"no checkpoint of step {step} in {self.folder}: has [0]")
        digest = self.processes.broadcast("newest", lambda: self.reader.digest)

        def read() -> Manifest:
            reader = self.reader
            if reader.digest != digest:
                raise CorruptCheckpointError(f"{self.folder} is not the one that process 0 reads")
            tensors = {p: Tensor(i.shape, str(i.dtype), "") for p, i in reader.tensors.items()}
            return Manifest(step, reader.metadata, tensors, {}, digest)

        return self.folder, self.processes.together("manifest", read)

    def restore(
        self,
        step: int,
        abstract_tree: Tree,
        *,
        resizable: Mapping[str, int] | None = None,
        orders: Mapping[str, Order] | None = None,
        partial: bool = False,
    ) -> tuple[dict[str, typing.Any], dict[str, typing.Any]]:
        """Return tree and metadata as `Checkpointer.restore`. The files have no digests to verify.

        Arrays may be resized along dimension 0 alone, by zeros.
        """
        _, manifest = self.find(step)
        targets, orders = integrity.flatten(abstract_tree), orders or {}
        check_tree(manifest, targets, resizable or {}, orders, partial)

        def read() -> dict[str, jax.Array]:
            return {path: self._array(path, like, orders) for path, like in targets.items()}

        leaves = self.processes.together("read", read)
        return in_structure(abstract_tree, leaves), manifest.metadata

    def _array(
        self, path: str, like: jax.ShapeDtypeStruct, orders: Mapping[str, Order]
    ) -> jax.Array:
        """Return an array with the sharding of `like`; the host holds one device's part at a time.

        The parts are cast on the devices, unless they stay in host memory.
        """
        sharding, devices = target_of(like), dict[tuple[Span, ...], list[jax.Device]]()
        for device, index in sharding.addressable_devices_indices_map(like.shape).items():
            assert index is not None
            ends = [each.indices(size) for each, size in zip(index, like.shape, strict=True)]
            devices.setdefault(tuple((start, stop) for start, stop, _ in ends), []).append(device)
        on_host, parts = sharding.memory_kind == HOST, []
        for spans, holders in devices.items():
            part = self.reader.part(path, spans, orders.get(path))
            part = part.astype(like.dtype) if on_host else part
            places = [SingleDeviceSharding(d, memory_kind=sharding.memory_kind) for d in holders]
            parts += [jax.block_until_ready(jax.device_put(part, place)) for place in places]
        array = jax.make_array_from_single_device_arrays(like.shape, sharding, parts)
        return array if on_host else array.astype(like.dtype)


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy an array; a transposed matrix in tiles, because numpy leaves the cache at every number.

    Numbers of 16 bits are copied as integers, which numpy copies faster.
    """
    if target.dtype == source.dtype and target.dtype.itemsize == 2:
        target, source = target.view(np.uint16), source.view(np.uint16)
    if source.ndim != 2 or source.flags.c_contiguous:
        target[...] = source
        return
    rows, columns = (range(0, size, TILE) for size in source.shape)
    for i, j in itertools.product(rows, columns):
        target[i : i + TILE, j : j + TILE] = source[i : i + TILE, j : j + TILE]


def digest_of(folder: Path, described: Mapping[str, typing.Any]) -> str:
    """Return the digest of a folder's model, as FolderReader has it."""
    weights = open_weights(folder)
    names = sorted(weights.tensors)
    sums = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in names:
        info = weights.tensors[name]
        sums.update(f"{name} {info.dtype}{info.shape}\n".encode())
    for name in names[:: -(-len(names) // SAMPLED)]:
        tensor = weights.read(name)
        for end in (0, -1) if tensor.size else ():
            sums.update(np.ascontiguousarray(tensor[(end,) * (tensor.ndim - 1)]).tobytes())
    return sums.hexdigest()
