"""Read the model of a run one array or layer at a time, with adapters merged into their base."""

import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from maxmeg.checkpoint.initialize import check_base
from maxmeg.checkpoint.integrity import Manifest, some
from maxmeg.checkpoint.names import VOCABULARY_TABLES
from maxmeg.checkpoint.resume import check_averages
from maxmeg.checkpoint.stream import StreamReader
from maxmeg.config import files
from maxmeg.config.files import checkpoints_of
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.data import run_folder
from maxmeg.hf.families import read as families
from maxmeg.hf.families.binding import Place
from maxmeg.hf.families.classifier_tables import CLASSIFIERS
from maxmeg.hf.folder import (
    MASTER,
    FolderCheckpoint,
    Reader,
    array_path,
    array_paths,
    open_checkpoints,
)
from maxmeg.hf.formats.quantized import QUANTIZATION
from maxmeg.hf.formats.safetensors import DTYPES, read_json
from maxmeg.hf.mup import folded, plain_model

CARRIED = "huggingface"  # folder of a run with the small files that its model was imported with
WRITTEN = {
    DType.float32: DTYPES["F32"],
    DType.bfloat16: DTYPES["BF16"],
    DType.float16: DTYPES["F16"],
}
CLASSIFIER = "classifier."  # what the names of its arrays begin with
T = typing.TypeVar("T")


class TrainedModel:
    """The arrays of a run's checkpoint, the newest by default; `config` is the run's.

    In a LoRA run they are the frozen base's arrays, in the dtype of the run, with the adapters
    merged. `model` is the run's without muP, whose factors are within the arrays. average: the
    averages of optim.ema in place of trained weights. ValueError where checkpoint and config
    differ.
    """

    def __init__(self, run: str | Path, step: int | None = None, average: bool = False) -> None:
        self._reader, self._average = open_run(Path(run), step), average
        if average:
            check_averages(self._reader.tensors, str(run))
        self.config = run_folder.read(self._reader.metadata["config"], run)
        self.model = plain_model(self.config.model)
        self._base = self._reader
        if self.config.lora.rank:
            self._base = base_of_adapters(self.config, self._reader)
        saved = files.from_dict(self._base.metadata["config"]).model
        expected = with_fields(self.model, {"mtp.num_layers": saved.mtp.num_layers})
        has_own_head = self.config.lora.rank and self.model.head.width
        check_arrays(self._base, saved if has_own_head else expected)

    def read(self, place: Place) -> np.ndarray:
        """Return an array, one layer of it, or one expert of a layer."""
        return folded(place.name, self._merged(place), self.config.model)

    def _merged(self, place: Place) -> np.ndarray:
        if place.name.startswith(CLASSIFIER):  # trained beside adapters, too
            return self._reader.read(self._path(self._reader, place.name), place.index)
        array = self._base.read(self._path(self._base, place.name), place.index)
        array = array if families.is_exact(place.name) else self._frozen(array)
        module = place.name.removesuffix(".weight")
        pair = [self._path(self._reader, f"{module}.lora.{name}") for name in ("a", "b")]
        if pair[0] not in self._reader.tensors:
            return array
        a, b = (self._reader.read(path, place.index).astype("float32") for path in pair)
        scale = self.config.lora.alpha / self.config.lora.rank
        return array.astype("float32") + scale * (a @ b)

    def words(self, table: str) -> Iterator[np.ndarray]:
        """Yield the rows of a vocabulary table without its padding, in blocks of bounded size."""
        path, size, first = self._path(self._base, table), self.model.vocab_size, 0
        rows = self._base.tensors[path].shape[0]
        for block in self._base.blocks(path):
            count = min(max(size - first, 0), len(block))
            if rows < size or block[count:].any():
                raise ValueError(
                    f"{table} has {rows} rows for a vocabulary of {size}, and the rows beyond "
                    "it must be zero: the config belongs to another checkpoint"
                )
            yield self._frozen(block[:count])
            first += len(block)

    def _path(self, reader: Reader, name: str) -> str:
        """Return the path of an array, or of its average in the run's own checkpoint."""
        path = array_path(name)
        average = path.replace("model/", "ema/", 1)
        is_own = self._average and reader is self._reader
        return average if is_own and average in reader.tensors else path

    def _frozen(self, array: np.ndarray) -> np.ndarray:
        """Round to the dtype of the run if there are adapters, which were trained beside that."""
        if not self.config.lora.rank:
            return array
        return array.astype(WRITTEN[self.model.dtype]).astype(MASTER)


def open_run(run: Path, step: int | None = None) -> Reader:
    """Open a checkpoint of a run, by default the newest whose model is intact, or a Hugging Face
    folder."""
    source, folder = open_checkpoints(run), checkpoints_of(run)
    if isinstance(source, FolderCheckpoint):
        source.manifest(step or 0)
        return source.reader

    def use(step: int, _: Manifest) -> StreamReader:
        reader = StreamReader(folder, step)
        reader.verify_files(path for path in reader.tensors if path.startswith("model/"))
        return reader

    return StreamReader(folder, step) if step is not None else newest(run, use)


def newest(run: Path, use: Callable[[int, Manifest], T]) -> T:
    """Return use(step, manifest) for a run's newest intact checkpoint."""
    checkpointer = open_checkpoints(run)
    checkpoint = checkpointer.latest(use)
    if checkpoint is None:
        raise ValueError(
            f"{checkpointer.folder} holds no checkpoint: give the folder of a run, or a Hugging "
            "Face folder with config.json"
        )
    return checkpoint


def base_of_adapters(config: Config, reader: Reader) -> Reader:
    """Open the frozen base of a LoRA run; ValueError for adapters that do not belong to it."""
    if not config.checkpoint.init_from:
        raise ValueError(
            "the adapters were trained beside random weights (checkpoint.init_from is empty): "
            "there is no model to export"
        )
    saved = reader.metadata.get("base", {})
    check_base(config, saved)
    base = open_run(Path(config.checkpoint.init_from), saved["step"])
    size = files.from_dict(base.metadata["config"]).model.vocab_size
    if size < config.model.vocab_size:
        raise ValueError(
            f"the frozen base has {size} tokens, the run {config.model.vocab_size}: the new rows "
            "are random and were never trained; train without lora, or keep the vocabulary"
        )
    weights = {path.removesuffix("/weight") for path in array_paths(config.model)}
    ends = ("/lora/a", "/lora/b")
    saved = [path for path in reader.tensors if path.startswith("model/")]
    saved = [path for path in saved if not path.startswith(array_path(CLASSIFIER))]
    others = [p for p in saved if not p.endswith(ends) or p.rpartition("/lora/")[0] not in weights]
    if others:
        raise ValueError(f"{len(others)} arrays are not adapters of the model: {some(others)}")
    return base


def check_arrays(reader: Reader, model: ModelConfig) -> None:
    """ValueError where a checkpoint's arrays differ from the model that its config describes."""
    saved = {path for path in reader.tensors if path.startswith("model/")}
    infos = array_paths(model)
    if missing := sorted(infos.keys() - saved):
        raise ValueError(f"the checkpoint lacks {len(missing)} arrays: {some(missing)}")
    if extra := sorted(saved - infos.keys()):
        raise ValueError(f"the checkpoint has {len(extra)} unexpected arrays: {some(extra)}")
    tables = [array_path(name) for name in VOCABULARY_TABLES]
    for path, info in infos.items():
        stored = reader.tensors[path]
        first = int(path in tables)  # the vocabulary's padding depends on the mesh
        if stored.shape[first:] != info.shape[first:] or stored.dtype != info.dtype:
            raise ValueError(f"{path} is {stored} in the checkpoint, expected {info}")


def carried_folder(run: str | Path, config: Config) -> Path:
    """Return the folder of imported small files of a run, or of the run it was initialized from; a
    Hugging Face folder itself."""
    folder, names = Path(run), set()
    while not files.is_model_folder(folder):
        if (folder / CARRIED / "config.json").is_file():
            return folder / CARRIED
        names.add(folder)
        if not config.checkpoint.init_from or Path(config.checkpoint.init_from) in names:
            return Path(run) / CARRIED
        folder = Path(config.checkpoint.init_from)
        if not files.is_model_folder(folder):
            config = run_folder.read(newest(folder, lambda _, m: m.metadata)["config"], folder)
    return folder


def carried_config(folder: Path) -> dict[str, typing.Any]:
    """Return the config.json in a folder of imported files, without quantization, which the model
    has not; empty if there is none."""
    path = folder / "config.json"
    keys = families.text_part(read_json(path)) if path.is_file() else {}
    return {name: value for name, value in keys.items() if name != QUANTIZATION}


def choose_family(model: ModelConfig, carried: Mapping[str, typing.Any], family: str) -> str:
    """Return `family`, else that of the imported config.json, unless the run has put a classifier
    on its layers, else the first that fits, if possible of the same model_type."""
    carried_family = families.architecture(carried) if carried else ""
    is_same = (carried_family in CLASSIFIERS) == (model.head.num_classes > 0)
    family = family or (carried_family if is_same else "")
    if not family:
        fitting = families.families_of(model) or families.families_of(model.without_mtp())
        kind = carried.get("model_type")
        fitting.sort(key=lambda name: families.FAMILIES[name].model_type != kind)
        if not fitting:
            names = ", ".join(families.FAMILIES)
            raise ValueError(f"no supported family of transformers can express this model: {names}")
        return fitting[0]
    if family not in families.FAMILIES:
        raise ValueError(f"--family={family}: choose one of {', '.join(families.FAMILIES)}")
    return family
