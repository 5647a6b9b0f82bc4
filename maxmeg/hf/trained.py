"""The model of a run, one array or layer at a time: adapters merged into their base on the way."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.stream import StreamReader, TensorInfo
from maxmeg.config import files
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.schema import Config
from maxmeg.hf import families
from maxmeg.hf.binding import Place
from maxmeg.hf.safetensors import DTYPES, read_json
from maxmeg.layers.lora import merged_weight
from maxmeg.state import CHECKPOINTS, VOCABULARY_TABLES, check_base

CARRIED = "huggingface"  # the folder of a run with the files that came with its model
MASTER = DTYPES["F32"]
WRITTEN = {DType.float32: DTYPES["F32"], DType.bfloat16: DTYPES["BF16"]}
_SHOWN = 8


class TrainedModel:
    """The arrays of a run's checkpoint, the newest by default; `config` is the run's.

    Of a LoRA run they are the base's, in the dtype it was frozen in, with the adapters merged.
    ValueError where checkpoint and config differ.
    """

    def __init__(self, run: str | Path, step: int | None = None) -> None:
        self._own = open_run(Path(run), step)
        self.config = files.from_dict(self._own.metadata["config"])
        self.model = self.config.model
        self._base = self._own
        if self.config.lora.rank:
            self._base = base_of_adapters(self.config, self._own)
        saved = files.from_dict(self._base.metadata["config"]).model  # adapters leave depths out
        check_arrays(self._base, dataclasses.replace(self.model, mtp_depths=saved.mtp_depths))

    def read(self, place: Place) -> np.ndarray:
        """An array, one layer of it, or an expert of that."""
        array = self._base.read(array_path(place.name), place.index)
        array = array if families.is_count(place.name) else self._frozen(array)
        module = array_path(place.name).removesuffix("/weight")
        pair = [f"{module}/lora/{name}" for name in ("a", "b")]
        if pair[0] not in self._own.tensors:
            return array
        a_IR, b_RO = (self._own.read(path, place.index) for path in pair)
        return merged_weight(array, a_IR, b_RO, self.config.lora.alpha / self.config.lora.rank)

    def words(self, table: str) -> Iterator[np.ndarray]:
        """The rows of a vocabulary's table that are words, in blocks: no array is larger."""
        path, size, first = array_path(table), self.model.vocab_size, 0
        rows = self._base.tensors[path].shape[0]
        for block in self._base.blocks(path):
            count = min(max(size - first, 0), len(block))
            if rows < size or block[count:].any():
                raise ValueError(
                    f"{table} has {rows} rows for a vocabulary of {size}, and those beyond it "
                    "must be zero: the checkpoint's config is not its own"
                )
            yield self._frozen(block[:count])
            first += len(block)

    def _frozen(self, array: np.ndarray) -> np.ndarray:
        """As adapters saw it: in the dtype of the run, where there are any."""
        if not self.config.lora.rank:
            return array
        return array.astype(WRITTEN[self.model.dtype]).astype(MASTER)


def open_run(run: Path, step: int | None = None) -> StreamReader:
    """A checkpoint of a run, the newest by default."""
    checkpointer = Checkpointer(run / CHECKPOINTS)
    steps = checkpointer.steps()
    if not steps:
        raise ValueError(f"{checkpointer.folder} holds no checkpoint: give the folder of a run")
    return StreamReader(checkpointer.folder, steps[-1] if step is None else step)


def base_of_adapters(config: Config, own: StreamReader) -> StreamReader:
    """The frozen base of a LoRA run; every adapter must belong to an array of it."""
    if not config.checkpoint.init_from:
        raise ValueError(
            "the adapters were trained beside random weights (checkpoint.init_from is empty): "
            "there is no model to export"
        )
    check_base(config, own.metadata.get("base", {}))
    base = open_run(Path(config.checkpoint.init_from))
    size = files.from_dict(base.metadata["config"]).model.vocab_size
    if size < config.model.vocab_size:
        raise ValueError(
            f"the frozen base has {size} words, the run {config.model.vocab_size}: rows that are "
            "random and were never trained are not exported; train without lora, or those words"
        )
    weights = {path.removesuffix("/weight") for path in array_paths(config.model)}
    ends = ("/lora/a", "/lora/b")
    saved = [path for path in own.tensors if path.startswith("model/")]
    others = [p for p in saved if not p.endswith(ends) or p.rpartition("/lora/")[0] not in weights]
    if others:
        raise ValueError(f"{len(others)} arrays are no adapters of the model: {some(others)}")
    return base


def array_infos(model: ModelConfig) -> dict[str, TensorInfo]:
    """All arrays of a model as a checkpoint holds them: float32, the vocabulary padded."""
    infos = {}
    for name, shape in families.array_shapes(model).items():
        if name in VOCABULARY_TABLES:
            shape = (model.padded_vocab_size(1), *shape[1:])
        infos[name] = TensorInfo(MASTER, shape)
    return infos


def array_path(name: str) -> str:
    """Where a checkpoint holds an array of the model."""
    return "model/" + name.replace(".", "/")


def array_paths(model: ModelConfig) -> dict[str, TensorInfo]:
    return {array_path(name): info for name, info in array_infos(model).items()}


def check_arrays(reader: StreamReader, model: ModelConfig) -> None:
    """ValueError where a checkpoint's model is not the one that its config describes."""
    saved = {path for path in reader.tensors if path.startswith("model/")}
    infos = array_paths(model)
    if missing := sorted(infos.keys() - saved):
        raise ValueError(f"the checkpoint lacks {len(missing)} arrays: {some(missing)}")
    if extra := sorted(saved - infos.keys()):
        raise ValueError(f"the checkpoint has {len(extra)} arrays too many: {some(extra)}")
    tables = [array_path(name) for name in VOCABULARY_TABLES]
    for path, info in infos.items():
        found = reader.tensors[path]
        first = int(path in tables)  # the vocabulary's padding depends on the mesh
        if found.shape[first:] != info.shape[first:] or found.dtype != info.dtype:
            raise ValueError(f"{path} is {found} in the checkpoint, expected {info}")


def carried_folder(run: str | Path, config: Config) -> Path:
    """The folder with what came along with a run's model, or with the one it began from."""
    folder, seen = Path(run), set()
    while not (folder / CARRIED / "config.json").is_file():
        seen.add(folder)
        if not config.checkpoint.init_from or Path(config.checkpoint.init_from) in seen:
            return Path(run) / CARRIED
        folder = Path(config.checkpoint.init_from)
        config = files.from_dict(open_run(folder).metadata["config"])
    return folder / CARRIED


def carried_config(folder: Path) -> dict[str, typing.Any]:
    """The config.json in such a folder; empty where there is none."""
    path = folder / "config.json"
    return dict(families.text_part(read_json(path))) if path.is_file() else {}


def choose_family(model: ModelConfig, carried: Mapping[str, typing.Any], family: str) -> str:
    """The family asked for, or the one it came from, or the first that has such models."""
    family = family or (families.architecture(carried) if carried else "")
    if not family:
        fitting = families.families_of(model) or families.families_of(model.without_mtp())
        if not fitting:
            names = ", ".join(families.FAMILIES)
            raise ValueError(f"no family of transformers has such models; compared with {names}")
        return fitting[0]
    if family not in families.FAMILIES:
        raise ValueError(f"--family={family}: choose one of {', '.join(families.FAMILIES)}")
    return family


def some(texts: Sequence[str], between: str = ", ") -> str:
    """The first few, and how many more there are."""
    more = f"{between}and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return between.join(texts[:_SHOWN]) + more
