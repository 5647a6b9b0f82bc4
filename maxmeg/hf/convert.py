"""A Hugging Face folder to a run's folder and back, one tensor at a time.

What is made by an import is a folder like a run's: config.yaml, a checkpoint of step 0 that holds
the model alone (float32 masters), and huggingface/ with the tokenizer and what else came along.
"""

import dataclasses
import json
import os
import shutil
import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from maxmeg.checkpoint.stream import StreamWriter, TensorInfo, row_blocks
from maxmeg.config import files
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.schema import Config
from maxmeg.data.tokenizers import load_tokenizer, parse_spec
from maxmeg.hf import families
from maxmeg.hf.binding import Binding, Place
from maxmeg.hf.quantized import in_full
from maxmeg.hf.safetensors import DTYPES, SafetensorsFolder, SafetensorsWriter, read_json
from maxmeg.hf.trained import (
    CARRIED,
    WRITTEN,
    TrainedModel,
    array_path,
    array_paths,
    carried_config,
    carried_folder,
    choose_family,
    some,
)
from maxmeg.state import CHECKPOINTS, VOCABULARY_TABLES

TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "*.jinja", "chat_template.json"),
)
GENERATION = "generation_config.json"
SMALL_FILES = ("config.json", GENERATION, *TOKENIZER_FILES, "LICENSE*", "NOTICE*")  # never code
EXACT = [DTYPES[name] for name in ("F32", "BF16", "F16")]  # dtypes that float32 holds
Pairs: typing.TypeAlias = list[tuple[str, Binding]]


class Weights(typing.Protocol):
    """Tensors by name, read one at a time."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, *index: int) -> np.ndarray:
        """A tensor, or an entry of its first dimensions."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """A model elsewhere: its config.json, weights by their names there, and small files."""

    config: Mapping[str, typing.Any]
    weights: Weights
    files: tuple[Path, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion made."""

    family: str
    num_tensors: int
    num_parameters: int
    tokenizer: str
    notes: tuple[str, ...] = ()


def open_folder(folder: str | os.PathLike[str]) -> Source:
    """A folder as transformers' save_pretrained writes it; ValueError for any other."""
    folder = Path(folder)
    weights = SafetensorsFolder(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json, which describes the model: add it")
    found = (path for pattern in SMALL_FILES for path in sorted(folder.glob(pattern)))
    small = tuple(path for path in found if path.is_file())
    said = read_json(path)
    config, full = in_full(said, weights)
    if config is not said:  # of a model that is quantized, which the run is not
        small = tuple(path for path in small if path.name != "config.json")
    return Source(config, full, small)


def with_tokenizer(source: Source, path: str | os.PathLike[str]) -> Source:
    """The source with the tokenizer.json at `path`, and what lies beside it, for its own."""
    path = Path(path)
    if path.name != "tokenizer.json" or not path.is_file():
        raise ValueError(f"--tokenizer={path}: give a tokenizer.json, or KIND:FILE")
    beside = [found for pattern in TOKENIZER_FILES for found in sorted(path.parent.glob(pattern))]
    others = [
        own for own in source.files if not any(own.match(pattern) for pattern in TOKENIZER_FILES)
    ]
    if not any(own.name == GENERATION for own in others):  # it names the end tokens
        beside += path.parent.glob(GENERATION)
    beside = [found for found in beside if found.is_file()]
    return dataclasses.replace(source, files=(*others, *beside))


def match(weights: Weights, model: ModelConfig, family: str) -> Pairs:
    """(name in the files, binding) of every tensor of a model, in the bindings' order.

    ValueError naming tensors that are missing, unknown, given twice, or of another shape or dtype.
    A tied tensor that is given once more must be equal.
    """
    names: dict[str, str] = {}
    for name, known in families.canonical_names(weights.tensors, family).items():
        if known in names:
            raise ValueError(f"{names[known]} and {name} are both {known}: remove one of them")
        names[known] = name
    for again, first in families.aliases(model, family).items():
        if again in names and first in names:
            _check_equal(weights, names.pop(again), names[first])
    bindings = {binding.theirs: binding for binding in families.bindings(model, family)}
    _check_experts(weights, names, bindings, model, family)
    problems = []
    if missing := [name for name in bindings if name not in names]:
        problems.append(f"{len(missing)} tensors are missing: {some(missing)}")
    if extra := [name for known, name in names.items() if known not in bindings]:
        problems.append(f"{len(extra)} tensors are no part of a {family}: {some(extra)}")
    for known, binding in bindings.items():
        info = weights.tensors[names[known]] if known in names else None
        if info and (info.shape != binding.shape or info.dtype not in EXACT):
            problems.append(
                f"{names[known]} is {info.dtype}{list(info.shape)}, by config.json it has shape "
                f"{list(binding.shape)}; dtypes that are read are float32, bfloat16 and float16"
            )
    if problems:
        raise ValueError("the tensors are not those of config.json:\n" + some(problems, "\n"))
    return [(names[known], binding) for known, binding in bindings.items()]


def describe_match(matched: Pairs) -> list[str]:
    """One line a tensor: its name and shape, and our arrays."""
    return [
        f"{name} {list(binding.shape)} <-> {', '.join(_shown(place) for place in binding.ours)}"
        for name, binding in matched
    ]


def import_model(source: Source, target: str | os.PathLike[str], tokenizer: str = "") -> Report:
    """Makes a run's folder of a model; ValueError, and no folder, where it cannot be exact.

    tokenizer: as data.tokenizer, in place of the one among the source's files.
    """
    family, model = families.architecture(source.config), families.model_config(source.config)
    said, model = model, families.as_saved(model, source.weights.tensors, family)
    matched = match(source.weights, model, family)
    target = Path(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty: choose another --output")
    new = not target.exists()
    try:
        config, identity, notes = _prepare(source, model, target, tokenizer)
        metadata = {
            "config": files.to_dict(config),
            "tokenizer": identity,
            "consumed_samples": 0,
        }
        with StreamWriter(target / CHECKPOINTS, 0, array_paths(model), metadata) as writer:
            for name, binding in matched:
                for expert, piece in binding.pieces():
                    tensor = source.weights.read(name, *(() if expert is None else (expert,)))
                    for place, part in zip(piece.ours, piece.split(tensor), strict=True):
                        padded = place.name in VOCABULARY_TABLES
                        writer.write(array_path(place.name), part, place.index, pad_rows=padded)
            for name, shape in families.unused_arrays(model).items():
                writer.write(array_path(name), np.zeros(shape, np.float32))
        files.save(config, target / "config.yaml")
        if said.mtp_depths > model.mtp_depths:
            notes += ("the files lack the layers that predict further tokens: mtp_depths=0",)
    except BaseException:
        for path in [target] if new else list(target.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise
    return _report(family, matched, config.data.tokenizer, notes)


def export_model(
    run: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: DType = DType.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
    step: int | None = None,
    family: str = "",
) -> Report:
    """Writes a run's model as a folder that transformers' from_pretrained loads.

    step: default the newest. family: default that of the folder the model came from, or the first
    that has such models. Adapters are merged. ValueError where no family fits, or the checkpoint is
    not what its config says.
    """
    run, target = Path(run), Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty: choose another --output")
    trained = TrainedModel(run, step)
    config, model = trained.config, trained.model
    folder = carried_folder(run, config)
    carried = carried_config(folder)
    family = choose_family(model, carried, family)
    model = families.as_written(model, family)
    described = _merged(carried, model, family, config.data.tokenizer)
    described["dtype"] = dtype.value
    described.pop("torch_dtype", None)
    bindings = families.bindings(model, family)
    tensors = {
        b.theirs: TensorInfo(WRITTEN[DType.float32 if b.exact else dtype], b.shape)
        for b in bindings
    }
    with SafetensorsWriter(target, tensors, max_shard_bytes) as writer:
        for binding in bindings:
            if binding.ours[0].name in VOCABULARY_TABLES:
                writer.write_rows(binding.theirs, trained.words(binding.ours[0].name))
                continue
            joined = (piece.join([*map(trained.read, piece.ours)]) for _, piece in binding.pieces())
            if binding.stacked:
                writer.write_rows(binding.theirs, (expert[None] for expert in joined))
            else:
                writer.write(binding.theirs, next(joined))
    small, notes = _tokenizer_files(folder, config)
    for path, name in small.items():
        shutil.copyfile(path, target / name)
    if model.mtp_depths < trained.model.mtp_depths:
        depths = f"model.mtp_depths={trained.model.mtp_depths}"
        notes += (f"no {family} predicts further tokens: their layers ({depths}) are left out",)
    text = json.dumps(described, indent=2, sort_keys=True) + "\n"
    (target / "config.json").write_text(text, "utf-8")
    matched = [(binding.theirs, binding) for binding in bindings]
    return _report(family, matched, config.data.tokenizer, notes)


def imported(source: Source) -> Pairs:
    """What import_model would read."""
    family, model = families.architecture(source.config), families.model_config(source.config)
    model = families.as_saved(model, source.weights.tensors, family)
    return match(source.weights, model, family)


def exported(run: str | os.PathLike[str], family: str = "") -> Pairs:
    """What export_model would write of a run's newest checkpoint."""
    config = TrainedModel(Path(run)).config
    carried = carried_config(carried_folder(Path(run), config))
    chosen = choose_family(config.model, carried, family)
    model = families.as_written(config.model, chosen)
    return [(binding.theirs, binding) for binding in families.bindings(model, chosen)]


def _prepare(
    source: Source, model: ModelConfig, target: Path, tokenizer: str
) -> tuple[Config, str, tuple[str, ...]]:
    """Copies the small files; the run's config, its tokenizer's identity, and notes."""
    folder = target / CARRIED
    folder.mkdir(parents=True)
    for path in source.files:
        shutil.copyfile(path, folder / path.name)
    if not (folder / "config.json").exists():
        text = json.dumps(source.config, indent=2) + "\n"
        (folder / "config.json").write_text(text, "utf-8")
    config, notes = Config(run_dir=str(target), model=model), ()
    config.data.tokenizer = tokenizer or _find_tokenizer(folder)
    if not config.data.tokenizer:
        config.data.tokenizer = f"null:{model.vocab_size}"
        notes = ("there is no tokenizer: neither tokenizer.json nor tokenizer.model was found; "
                 f"data.tokenizer is {config.data.tokenizer}, which reads numbers",)  # fmt: skip
    loaded = load_tokenizer(config.data.tokenizer)
    if loaded.vocab_size > model.vocab_size:
        raise ValueError(
            f"tokenizer {config.data.tokenizer} has {loaded.vocab_size} ids with its end of a "
            f"document, the model {model.vocab_size}: name its eos_token in tokenizer_config.json, "
            "or choose a tokenizer with --tokenizer"
        )
    config.data.sequence_length = min(config.data.sequence_length, model.max_position)
    return config, loaded.identity, notes


def _find_tokenizer(folder: Path) -> str:
    """data.tokenizer for the files in a folder; empty where there is none."""
    if (folder / "tokenizer.json").exists():
        return f"huggingface:{folder / 'tokenizer.json'}"
    if (folder / "tokenizer.model").exists():
        return f"sentencepiece:{folder / 'tokenizer.model'}"
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return f"gpt2:{folder}"
    return ""


def _tokenizer_files(folder: Path, config: Config) -> tuple[dict[Path, str], tuple[str, ...]]:
    """Files that go with an exported model and their names there, and notes."""
    spec = parse_spec(config.data.tokenizer)
    kind, place = spec.kind, Path(spec.argument)
    place = place / "tokenizer.json" if kind == "huggingface" and place.is_dir() else place
    small = {path: path.name for path in sorted(folder.glob("*")) if path.name != "config.json"}
    if kind == "huggingface" and place.parent.absolute() != folder.absolute():
        beside = place.parent / "tokenizer_config.json"
        small = {path: name for path, name in small.items() if not name.startswith("tokenizer")}
        small |= {place: "tokenizer.json"} | ({beside: beside.name} if beside.exists() else {})
    elif kind == "sentencepiece":
        small = {path: name for path, name in small.items() if name != "tokenizer.model"}
        small |= {place: "tokenizer.model"}
    elif kind == "gpt2":
        names = ("vocab.json", "merges.txt")
        small |= {place / name: name for name in names if (place / name).exists()}
    if any(name in ("tokenizer.json", "tokenizer.model", "vocab.json") for name in small.values()):
        lost = "&".join(f"{name}={value}" for name, value in spec.options.items())
        note = f"the tokenizer's files do not say what data.tokenizer adds to them: {lost}"
        return small, (note,) * bool(lost)
    return small, (f"no tokenizer was written: {config.data.tokenizer} has no file of its own",)


def _merged(
    carried: Mapping[str, typing.Any], model: ModelConfig, family: str, tokenizer: str
) -> dict[str, typing.Any]:
    """config.json: what the model decides, over what came along and says nothing else."""
    if not carried:
        loaded = load_tokenizer(tokenizer)
        carried = {"bos_token_id": loaded.bos, "eos_token_id": loaded.eod}
        carried |= {"pad_token_id": loaded.pad}
        return families.hf_config(model, family, carried)
    written = families.hf_config(model, family, carried)
    both = {**carried, **written}
    try:
        changed = families.differences(model, families.model_config(both))
    except ValueError:
        changed = ["a key that no longer fits"]
    return written if changed else both


def _check_experts(
    weights: Weights,
    names: Mapping[str, str],
    bindings: Mapping[str, Binding],
    model: ModelConfig,
    family: str,
) -> None:
    """The files have as many experts as config.json says; one error for all of their tensors."""
    counts = {families.num_experts_in(names, family)}
    for known, binding in bindings.items():
        if binding.stacked and known in names:
            counts |= {(*weights.tensors[names[known]].shape, 0)[0]}
    if others := counts - {0, model.num_experts}:
        raise ValueError(
            f"the files hold {', '.join(map(str, sorted(others)))} experts a layer, config.json "
            f"says {model.num_experts}: one of them is of another model"
        )


def _check_equal(weights: Weights, name: str, other: str) -> None:
    """Tied weights that are given twice are equal, bit for bit."""
    a, b = weights.tensors[name], weights.tensors[other]
    equal = a == b
    if equal:
        x, y = weights.read(name), weights.read(other)
        blocks = row_blocks(a.shape, a.dtype.itemsize)
        equal = all(x[rows].tobytes() == y[rows].tobytes() for rows in blocks)
    if not equal:
        raise ValueError(
            f"{name} and {other} are tied by config.json but differ: set tie_word_embeddings to "
            "false if both are meant"
        )


def _report(family: str, matched: Pairs, tokenizer: str, notes: tuple[str, ...]) -> Report:
    count = sum(int(np.prod(binding.shape)) for _, binding in matched)
    return Report(family, len(matched), count, tokenizer, notes)


def _shown(place: Place) -> str:
    return f"{place.name}[{', '.join(map(str, place.index))}]" if place.index else place.name
