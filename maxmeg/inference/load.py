"""From a run's folder to its model."""

import dataclasses
import os
import typing

from jax.sharding import Mesh

from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.config import files
from maxmeg.config.schema import Config, ParallelConfig
from maxmeg.data.tokenizers import Tokenizer, load_tokenizer
from maxmeg.models.lm import LM
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.mesh import local_mesh, make_mesh, sizes_of
from maxmeg.parallel.parts import joined
from maxmeg.state import (
    CHECKPOINTS,
    abstract_state,
    base_model,
    check_base,
    check_tokenizer,
    restore,
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A restored model (float32 masters on `mesh`) and what it was trained with."""

    model: LM
    config: Config
    tokenizer: Tokenizer
    step: int
    mesh: Mesh


def load_run(run_dir: str, step: int | None = None, mesh: Mesh | None = None) -> Trained:
    """The model of a run at `step` (default: its newest intact checkpoint) on any mesh.

    Nothing but the model's arrays is read. Default mesh: one device. ValueError where the folder
    holds no checkpoint.
    """
    mesh = mesh or local_mesh()
    folder = os.path.join(run_dir, CHECKPOINTS)
    checkpointer = Checkpointer(folder)
    steps = checkpointer.steps()
    if not steps:
        raise ValueError(f"{folder} holds no checkpoint: give the run_dir of a training run")
    saved = checkpointer.metadata(steps[-1] if step is None else step)
    config = files.from_dict(saved["config"])
    check_base(config, saved.get("base", {}))
    sizes: dict[str, typing.Any] = {**sizes_of(mesh)}
    config.parallel = ParallelConfig(**sizes, zero1=False)
    config.model = config.model.without_mtp()  # whose layers are of no use here
    abstract = abstract_state(config, make_optimizer(config.optim), mesh)
    found = restore(checkpointer, {"model": abstract.model}, step)
    assert found is not None  # there are checkpoints
    model = joined(found[1]["model"], base_model(config, abstract.model))
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_tokenizer(tokenizer.identity, saved["tokenizer"])
    return Trained(model, config, tokenizer, found[0], mesh)


def without_pipeline(mesh: Mesh, hidden_size: int) -> Mesh:
    """A mesh of the same devices for generation: those along pipe go to fsdp, or else to data."""
    sizes, devices = sizes_of(mesh), list(mesh.devices.flat)
    stages = sizes["pipe"]
    other = "data" if hidden_size % (sizes["fsdp"] * stages) else "fsdp"
    sizes |= {"pipe": 1, other: sizes[other] * stages}
    return make_mesh(sizes, devices, mesh.shape["fold"])
