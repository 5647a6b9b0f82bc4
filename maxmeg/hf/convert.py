"""Import a Hugging Face folder as a run folder, and export a run, one tensor at a time.

An import writes a run folder: config.yaml, a checkpoint of step 0 that holds only the model (fp32
master weights), and huggingface/ with the tokenizer and the other small files of the source.
"""

import dataclasses
import json
import os
import shutil
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from maxmeg.checkpoint.names import VOCABULARY_TABLES
from maxmeg.checkpoint.stream import StreamWriter, TensorInfo
from maxmeg.config import files
from maxmeg.config.data import DataConfig, Objective
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.options import Quantize
from maxmeg.config.schema import Config
from maxmeg.data import run_folder
from maxmeg.data.tokenizers.load import load_tokenizer, parse_spec
from maxmeg.data.tokenizers.tokenizer import missing_rows
from maxmeg.hf.chats import GENERATION, replace_chat_template, write_ends
from maxmeg.hf.families import read as families
from maxmeg.hf.families.binding import Binding
from maxmeg.hf.families.classifier_tables import CLASSIFIERS, written_names
from maxmeg.hf.families.keys import TOKENS
from maxmeg.hf.families.rotary import longrope_notes
from maxmeg.hf.folder import array_path, array_paths, run_config
from maxmeg.hf.formats import gguf
from maxmeg.hf.formats.quantized import QUANTIZATION
from maxmeg.hf.formats.safetensors import SafetensorsWriter
from maxmeg.hf.formats.source import Source
from maxmeg.hf.matching import (
    TOKENIZER_FILES,
    Pairs,
    find_tokenizer,
    match,
    model_of,
    open_folder,
    small_files,
)
from maxmeg.hf.quantize import QuantizedWeights, notes_of
from maxmeg.hf.sentence import SentenceEncoder, encoders_of
from maxmeg.hf.trained import (
    CARRIED,
    WRITTEN,
    TrainedModel,
    carried_config,
    carried_folder,
    choose_family,
    newest,
)
from maxmeg.runtime.screen import tracked


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion read and wrote. loaded_by: call that loads an export."""

    family: str
    num_tensors: int
    num_parameters: int
    tokenizer: str
    notes: tuple[str, ...] = ()
    loaded_by: str = ""


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a Hugging Face folder, or a .gguf file."""
    return gguf.open_file(path) if Path(path).suffix == ".gguf" else open_folder(path)


def with_tokenizer(source: Source, path: str | os.PathLike[str]) -> Source:
    """Replace the source's tokenizer by the tokenizer.json at `path` and the files beside it."""
    path = Path(path)
    if path.name != "tokenizer.json" or not path.is_file():
        raise ValueError(f"--tokenizer={path}: give a tokenizer.json, or KIND:FILE")
    files_of_model = [file for file in source.files if not any(map(file.match, TOKENIZER_FILES))]
    patterns = TOKENIZER_FILES
    if not any(file.name == GENERATION for file in files_of_model):  # it names the end tokens
        patterns = [*patterns, GENERATION]
    new = [file for pattern in patterns for file in sorted(path.parent.glob(pattern))]
    files = (*files_of_model, *(file for file in new if file.is_file()))
    return dataclasses.replace(source, files=files, texts={})


def import_model(source: Source, target: str | os.PathLike[str], tokenizer: str = "") -> Report:
    """Write a run folder of a model; ValueError, and no folder, if the import would not be exact.

    tokenizer: a value of data.tokenizer, to replace the tokenizer among the source's files.
    """
    family, model = model_of(source)
    described, passed = families.read_config(source.config)
    matched = match(source.weights, model, family)
    target = Path(target).absolute()
    check_empty(target)
    new = not target.exists()
    try:
        config, identity, notes = _prepare(source, model, target, tokenizer)
        pieces = (
            (piece, source.weights.read(name, *(() if expert is None else (expert,))))
            for name, binding in tracked(matched, "converting")
            for expert, piece in binding.pieces()
        )
        write_run(config, identity, pieces)
        notes = (*source.notes, *notes)
        if passed:
            names = ", ".join(passed)
            notes += (f"keys of config.json that {family} does not read are passed over: {names}",)
        if described.mtp.num_layers > model.mtp.num_layers:
            notes += ("the files have no MTP layers: mtp.num_layers=0",)
    except BaseException:
        for path in [target] if new else list(target.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise
    return _report(family, matched, run_folder.stored(config).data.tokenizer, notes)


def check_empty(target: Path) -> None:
    """ValueError if a folder to be written holds anything."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty: choose another --output")


def write_run(
    config: Config, tokenizer: str, tensors: Iterable[tuple[Binding, np.ndarray]]
) -> None:
    """Write config.yaml, and a checkpoint of step 0 that holds only the model, to config.run_dir.

    tokenizer: the identity of the tokenizer. tensors: each with the arrays that it becomes.
    """
    config.checkpoint.dir = ""
    metadata = {
        "config": files.to_dict(run_folder.stored(config)),
        "tokenizer": tokenizer,
        "consumed_samples": 0,
    }
    with StreamWriter(
        files.checkpoint_folder(config), 0, array_paths(config.model), metadata
    ) as writer:
        for binding, tensor in tensors:
            for place, array in zip(binding.ours, binding.split(tensor), strict=True):
                padded = place.name in VOCABULARY_TABLES
                writer.write(array_path(place.name), array, place.index, pad_rows=padded)
        for name, shape in families.unused_arrays(config.model).items():
            writer.write(array_path(name), np.zeros(shape, np.float32))
    run_folder.write(config)


def export_model(
    run: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: DType = DType.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
    step: int | None = None,
    family: str = "",
    average: bool = False,
    quantize: Quantize = Quantize.none,
) -> Report:
    """Write a run's model as a folder that transformers' from_pretrained loads; merge adapters.

    step: default the newest. family: default that of the folder the model was imported from, else
    the first that can express the model. average: write the averages of optim.ema. quantize: write
    the layers' matrices in this format (hf/quantize.py). ValueError where no family fits, where the
    format does not, or where the checkpoint does not fit its config or has no averages.
    """
    run, target = Path(run), Path(target)
    check_empty(target)
    trained = TrainedModel(run, step, average)
    folder = carried_folder(run, trained.config)
    form = dtype, max_shard_bytes, quantize
    encoders = encoders_of(trained)
    if not encoders:
        return _write_folder(trained, folder, target, form, family)
    if family:
        raise ValueError(f"--family={family}: cannot be chosen for a biencoder: leave it out")
    if quantize is not Quantize.none:
        raise ValueError(f"--quantize={quantize.name} is not for biencoders: leave it out")
    reports = []
    for name, encoder in encoders.items():
        reports.append(_write_folder(encoder, folder, target / name, form, encoder.family))
        encoder.write_modules(target / name)
    tensors, parameters = (
        sum(getattr(report, name) for report in reports)
        for name in ("num_tensors", "num_parameters")
    )
    calls = " and ".join(f"SentenceTransformer('{target / name}')" for name in encoders)
    changed: dict[str, typing.Any] = {"num_tensors": tensors, "num_parameters": parameters}
    changed |= {"loaded_by": f"sentence_transformers.{calls}"}
    if any(encoder.adds_pooler for encoder in encoders.values()):
        name = reports[0].family
        zero = f"the biencoder has no pooler: that of {name} is written as zeros and not used"
        changed["notes"] = (*reports[0].notes, zero)
    return dataclasses.replace(reports[0], **changed)


def _write_folder(
    trained: TrainedModel | SentenceEncoder,
    folder: Path,
    target: Path,
    form: tuple[DType, int, Quantize],
    family: str,
) -> Report:
    """Write a model, and copy the small files in `folder`. form: dtype of the tensors, largest
    size of a shard in bytes, and format of the layers' matrices."""
    config, model, (dtype, max_shard_bytes, quantize) = trained.config, trained.model, form
    carried = carried_config(folder)
    family = choose_family(model, carried, family)
    model = families.with_writable_mtp(model, family)
    described = _merged(carried, model, family, config.data)
    if config.data.labels and family in CLASSIFIERS and "id2label" in described:
        described |= written_names([*config.data.labels])
    described["dtype"] = dtype.value
    described.pop("torch_dtype", None)
    bindings = families.bindings(model, family)
    quantized = None
    if quantize is not Quantize.none:
        quantized = QuantizedWeights(quantize, model, bindings, family, trained.read)
        described[QUANTIZATION] = quantized.settings()
    tensors = {}
    for b in bindings:
        if quantized and quantized.has(b):
            tensors |= quantized.infos(b)
        else:
            tensors[b.theirs] = TensorInfo(WRITTEN[DType.float32 if b.exact else dtype], b.shape)
    with SafetensorsWriter(target, tensors, max_shard_bytes) as writer:
        for binding in tracked(bindings, "converting"):
            if binding.ours[0].name in VOCABULARY_TABLES:
                writer.write_rows(binding.theirs, trained.words(binding.ours[0].name))
                continue
            joined = (piece.join([*map(trained.read, piece.ours)]) for _, piece in binding.pieces())
            if quantized and quantized.has(binding):
                for name, array in quantized.arrays(binding, next(joined)).items():
                    writer.write(name, array)
            elif binding.stacked:
                writer.write_rows(binding.theirs, (expert[None] for expert in joined))
            else:
                writer.write(binding.theirs, next(joined))
    small, notes = _tokenizer_files(folder, config)
    for path, name in small.items():
        shutil.copyfile(path, target / name)
    if config.data.chat_template:
        replace_chat_template(target, Path(config.data.chat_template).read_text("utf-8"))
    if config.data.objective is Objective.sft:
        write_ends(target, described, config)
    if model.mtp.num_layers < trained.model.mtp.num_layers:
        left_out = f"model.mtp.num_layers={trained.model.mtp.num_layers}"
        notes += (f"{family} has no MTP layers: they are left out ({left_out})",)
    text = json.dumps(described, indent=2, sort_keys=True) + "\n"
    (target / "config.json").write_text(text, "utf-8")
    matched = [(binding.theirs, binding) for binding in bindings]
    notes += notes_of(config.train.quantization.recipe, quantize)
    report = _report(family, matched, config.data.tokenizer, notes)
    loaded_by = f"transformers.{family}.from_pretrained('{target}')"
    return dataclasses.replace(report, loaded_by=f"vllm serve {target}" if quantized else loaded_by)


def imported(source: Source) -> Pairs:
    """Return the tensors that import_model would read."""
    family, model = model_of(source)
    return match(source.weights, model, family)


def exported(run: str | os.PathLike[str], family: str = "") -> Pairs:
    """Return the tensors that export_model would write for a run's newest checkpoint."""
    step = newest(Path(run), lambda step, _: step)  # the values are not read
    trained = TrainedModel(Path(run), step)
    if encoders := encoders_of(trained):
        return [
            (str(Path(name, binding.theirs)), binding)
            for name, encoder in encoders.items()
            for binding in encoder.bindings()
        ]
    carried = carried_config(carried_folder(Path(run), trained.config))
    chosen = choose_family(trained.model, carried, family)
    model = families.with_writable_mtp(trained.model, chosen)
    return [(binding.theirs, binding) for binding in families.bindings(model, chosen)]


def _prepare(
    source: Source, model: ModelConfig, target: Path, tokenizer: str
) -> tuple[Config, str, tuple[str, ...]]:
    """Copy the small files. Returns the run's config, its tokenizer's identity, and notes."""
    folder = target / CARRIED
    folder.mkdir(parents=True)
    for path in source.files:
        shutil.copyfile(path, folder / path.name)
    for name, text in source.texts.items():
        (folder / name).write_text(text, "utf-8")
    if not (folder / "config.json").exists():
        text = json.dumps(source.config, indent=2) + "\n"
        (folder / "config.json").write_text(text, "utf-8")
    config, notes = run_config(source.config, model, folder, tokenizer), ()
    config.run_dir = str(target)
    if not (tokenizer or find_tokenizer(folder)):
        notes = (
            f"there is no tokenizer: {source.no_tokenizer}; data.tokenizer is "
            f"{config.data.tokenizer}, which reads token ids: give one with --tokenizer=FILE",
        )
    loaded = load_tokenizer(config.data.tokenizer)
    notes += missing_rows(loaded, model.vocab_size)
    notes += longrope_notes(model)
    return config, loaded.identity, notes


def _tokenizer_files(folder: Path, config: Config) -> tuple[dict[Path, str], tuple[str, ...]]:
    """Return the small files of an exported model with their names in its folder, and notes."""
    spec = parse_spec(config.data.tokenizer)
    kind, source = spec.kind, Path(spec.argument)
    source = source / "tokenizer.json" if kind == "huggingface" and source.is_dir() else source
    small = {path: path.name for path in small_files(folder) if path.name != "config.json"}
    if kind == "huggingface" and source.parent.absolute() != folder.absolute():
        settings = source.parent / "tokenizer_config.json"
        template = source.parent / "chat_template.jinja"
        others = ("tokenizer", "chat_template")
        small = {path: name for path, name in small.items() if not name.startswith(others)}
        small |= {source: "tokenizer.json"}
        small |= {path: path.name for path in (settings, template) if path.exists()}
    elif kind == "sentencepiece":
        small = {path: name for path, name in small.items() if name != "tokenizer.model"}
        small |= {source: "tokenizer.model"}
    elif kind == "gpt2":
        names = ("vocab.json", "merges.txt")
        small |= {source / name: name for name in names if (source / name).exists()}
    if any(name in ("tokenizer.json", "tokenizer.model", "vocab.json") for name in small.values()):
        lost = "&".join(f"{name}={value}" for name, value in spec.options.items())
        note = f"the tokenizer's files lack the options of data.tokenizer: {lost}"
        return small, (note,) * bool(lost)
    return small, (f"no tokenizer was written: {config.data.tokenizer} has no file",)


def _merged(
    carried: Mapping[str, typing.Any], model: ModelConfig, family: str, data: DataConfig
) -> dict[str, typing.Any]:
    """Return config.json: the keys of the model, over the imported ones if they do not conflict."""
    if not carried:
        loaded = load_tokenizer(data.tokenizer)
        carried = {"bos_token_id": loaded.bos, "eos_token_id": loaded.eod}
        carried |= {"pad_token_id": loaded.pad}
        carried |= {families.START_TOKEN: data.start_token} if data.start_token >= 0 else {}
        return families.hf_config(model, family, carried)
    entries = families.hf_config(model, family, carried)
    both = {**{name: carried[name] for name in carried if name not in TOKENS}, **entries}
    try:
        changed = families.differences(model, families.model_config(both))
    except ValueError:
        changed = ["a key that no longer fits"]
    return entries if changed else both


def _report(family: str, matched: Pairs, tokenizer: str, notes: tuple[str, ...]) -> Report:
    count = sum(int(np.prod(binding.shape)) for _, binding in matched)
    return Report(family, len(matched), count, tokenizer, notes)
