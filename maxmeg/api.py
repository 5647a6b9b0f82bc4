"""maxmeg in Python: load, train, plan. `import maxmeg` has these names (maxmeg/__init__.py)."""

import copy
import dataclasses
import functools
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from maxmeg.checkpoint.places import place_of, steps_in
from maxmeg.checkpoint.processes import Processes
from maxmeg.config import files, values
from maxmeg.config.files import checkpoint_folder
from maxmeg.config.model import DType
from maxmeg.config.named import load_config
from maxmeg.config.options import LongRope
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.config.validate import axis_sizes, resolve
from maxmeg.data.corpus.indexed import IndexedWriter
from maxmeg.data.corpus.stored import digest
from maxmeg.data.corpus.vocabulary import write_vocabulary
from maxmeg.data.source import Source
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.activations import capture
from maxmeg.inference.adapters import with_adapters
from maxmeg.inference.engine import Engine, with_former_names
from maxmeg.inference.language_model import LanguageModel
from maxmeg.inference.load import load_run, with_longrope, without_pipeline
from maxmeg.inference.mesh import local_mesh
from maxmeg.objectives.objective import Objective, TargetLoss, objective_of
from maxmeg.parallel.mesh import make_mesh
from maxmeg.plan import Options, check_options, plan_for
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.show.text import Plan
from maxmeg.runtime.gpu_environment import set_gpu_environment
from maxmeg.runtime.platform import choose_platform
from maxmeg.train import main as run_training

__all__ = ["LanguageModel", "capture", "config", "engine", "load", "plan", "train"]
DOCUMENTS = "data"  # folder in the run folder for the documents that `train` was given


def load(
    folder: str | os.PathLike,
    step: int | None = None,
    tensor: int = 1,
    dtype: str = "",
    master_weights: bool = False,
    mtp: bool = False,
    average: bool = False,
    longrope: str = "longest",
) -> LanguageModel:
    """Load a run, or the model of a Hugging Face folder.

    step: of the checkpoint; default the newest intact one. tensor: number of tensor-parallel
    devices. dtype: of the computation, float32, bfloat16 or float16; default the run's. The weights
    are held in it, or with `master_weights` in float32 as in the checkpoint: to train them further
    or to save them. mtp: load MTP layers too. average: load the averages of
    optim.ema in place of the weights. longrope: for a model with LongRoPE, "current" chooses its
    factors as transformers does (docs/serving.md). ValueError for a folder without a checkpoint, or
    for a model without the MTP layers, averages or LongRoPE that are asked for.
    """
    set_gpu_environment()
    chosen = values.convert("dtype", dtype, DType) if dtype else None
    path, mesh = os.fspath(folder), local_mesh(tensor)
    trained = load_run(path, step, mesh, chosen, master_weights, mtp, average)
    return LanguageModel.of(with_longrope(trained, values.convert("longrope", longrope, LongRope)))


@with_former_names
def engine(
    folder: str | os.PathLike,
    step: int | None = None,
    tensor: int = 1,
    dtype: str = "",
    mtp: bool = False,
    adapters: Mapping[str, str | os.PathLike] | None = None,
    longrope: str = "longest",
    **sizes: typing.Any,
) -> Engine:
    """Load a run, as `load`, into an engine that generates text for many requests at once.

    mtp: let the model's MTP layers propose tokens, one each. adapters: folders of LoRA adapters by
    the names that requests choose (`Request.adapter`). sizes: settings of Engine, such as
    max_num_seqs=64. ValueError as `load`, and for adapters of another base.
    """
    loaded = load(folder, step, tensor, dtype, mtp=mtp, longrope=longrope)
    trained = with_adapters(loaded.trained, adapters or {})
    sizes = {"num_speculative_tokens": trained.config.model.mtp.num_layers, **sizes}
    return Engine(trained, **sizes)


def config(name: str, **overrides: typing.Any) -> Config:
    """Return the settings that --config=NAME of the commands names: "configs/gpt.py" or another
    Python file, "gpt", an architecture ("llama3-8b"), "finetune:FOLDER", a run folder, a YAML file.

    overrides: values by dotted name, config("gpt", **{"train.num_steps": 10}). ValueError for an
    unknown name or value.
    """
    loaded, kinds = load_config(name), files.leaves(Config)
    for path in overrides:
        if path not in kinds:
            raise ValueError(values.unknown_field(path, kinds))
    typed = {path: values.convert(path, value, kinds[path]) for path, value in overrides.items()}
    return with_fields(loaded, typed)


def train(
    config: Config,
    data: Source | Sequence[str] | Sequence[np.ndarray] | None = None,
    loss: Objective | TargetLoss | None = None,
) -> LanguageModel:
    """Train, or resume, the run in config.run_dir; return the model of its newest checkpoint.

    data: documents, each a text or an array of token ids without the end-of-document token, which
    are written to RUN_DIR/data and split by data.split; or a Source (maxmeg/data/source.py); None:
    the corpora of config.data. loss: a function (logits_BLV, batch) -> losses_BL that returns a
    float32 loss for each target; training minimizes their mean, weighted by batch.loss_mask. Or an
    Objective (maxmeg/objectives/objective.py); None: that of data.objective.
    """
    config = copy.deepcopy(config)
    if loss is not None and not isinstance(loss, Objective):
        if config.model.mtp.num_layers:
            raise ValueError(
                f"model.mtp.num_layers={config.model.mtp.num_layers}: a loss of the next token's "
                "logits does not train MTP layers; set it to 0, or give an Objective"
            )
        loss = objective_of(loss)
    source = data if hasattr(data, "open") else None
    prepared = {}
    if data is not None and source is None:
        prepared["prepare"] = functools.partial(with_documents, typing.cast(Sequence, data))
    run_training(config, typing.cast(Source | None, source), loss, **prepared)
    mesh = local_mesh()
    if jax.process_count() == 1:
        sizes = axis_sizes(config.parallel, jax.device_count())
        mesh = make_mesh(sizes, fold=config.parallel.fold)
        mesh = without_pipeline(mesh, config.model.hidden_size)
    return LanguageModel.of(load_run(config.run_dir, None, mesh))


def with_documents(documents: Sequence[str] | Sequence[np.ndarray], config: Config) -> Config:
    """Return the config that names a corpus of these documents, which process 0 writes."""

    def write() -> str:
        return write_documents(config, documents)

    prefix = Processes("documents").broadcast("write", write, ValueError)
    named = {"paths": (prefix,), "train_paths": (), "validation_paths": (), "test_paths": ()}
    config = copy.deepcopy(config)
    config.data = dataclasses.replace(config.data, blend="", mock=False, **named)
    return config


def write_documents(config: Config, documents: Sequence[str] | Sequence[np.ndarray]) -> str:
    """Write documents as a corpus RUN_DIR/data/documents-HASH, and return its prefix. ValueError if
    the run has been trained on others."""
    if not len(documents):
        raise ValueError("data=[] holds no document: give texts or arrays of token ids")
    tokenizer, folder = load_tokenizer(config.data.tokenizer), Path(config.run_dir, DOCUMENTS)
    rows = [checked_ids(tokenizer, number, text) for number, text in enumerate(documents)]
    prefix = folder / f"documents-{digest(tokenizer.identity, *rows)}"
    if prefix.with_suffix(".idx").exists():
        return str(prefix)
    steps = steps_in(place_of(checkpoint_folder(config)))
    if steps and [*folder.glob("documents*.idx")]:
        raise ValueError(
            f"the run in {config.run_dir} was trained on other documents than data: set another "
            "run_dir, or give the same documents to resume it"
        )
    with IndexedWriter(prefix, tokenizer.vocab_size) as writer:
        for ids in rows:
            writer.add_document(np.append(ids, tokenizer.eod))
    write_vocabulary(str(prefix), tokenizer.identity)
    return str(prefix)


def checked_ids(tokenizer: Tokenizer, number: int, document: str | np.ndarray) -> np.ndarray:
    """Return the token ids of data[number]; ValueError for what is no document."""
    ids = tokenizer.encode(document) if isinstance(document, str) else np.asarray(document)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"data[{number}] has shape {ids.shape} and dtype {ids.dtype}: a document is a text or "
            "a one-dimensional array of token ids"
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise ValueError(
            f"data[{number}] has ids from {ids.min()} to {ids.max()}: those of the tokenizer "
            f"{tokenizer.spec} lie in [0, {tokenizer.vocab_size})"
        )
    return ids


def plan(config: Config, hardware: str, search: bool = False, compile: bool = False) -> Plan:
    """Plan memory, communication and time of a run on GPUs that need not be there; print it.

    hardware: NAMExCOUNT, as h100x64. search: rank all layouts and report on the best. compile: also
    compile the training step for these GPUs (pip install 'maxmeg[plan]').
    """
    options = Options(hardware=hardware, search=search, compile=compile)
    check_options(options)
    config = copy.deepcopy(config)
    choose_platform()
    size = config.model.vocab_size
    resolve(config, size or load_tokenizer(config.data.tokenizer).vocab_size)
    return plan_for(config, parse_cluster(hardware), options)
