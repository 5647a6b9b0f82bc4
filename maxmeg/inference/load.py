"""Load the model of a run for inference."""

import dataclasses
import os
import typing

from jax.sharding import Mesh

from maxmeg.checkpoint.initialize import check_base, check_tokenizer, restored_base
from maxmeg.checkpoint.integrity import Manifest
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.resume import restore
from maxmeg.config.hints import hub_command
from maxmeg.config.schema import Config, ParallelConfig
from maxmeg.config.validate import head_problems
from maxmeg.data import run_folder
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.models.lm import LM
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.mesh import local_mesh, make_mesh, sizes_of
from maxmeg.parallel.trainable import joined
from maxmeg.state import CHECKPOINTS, abstract_state


@dataclasses.dataclass(frozen=True)
class Trained:
    """A restored model (fp32 master weights on `mesh`) with its config and tokenizer."""

    model: LM
    config: Config
    tokenizer: Tokenizer
    step: int
    mesh: Mesh
    metadata: dict[str, typing.Any] = dataclasses.field(default_factory=dict)  # the checkpoint's


def load_run(run_dir: str, step: int | None = None, mesh: Mesh | None = None) -> Trained:
    """Load the model of a run at `step` (default: its newest intact checkpoint) on any mesh.

    Only the model's arrays are read. mesh: default one device. ValueError if the folder holds no
    checkpoint, or if the numbers of heads are not divisible by the tensor axis.
    """
    mesh = mesh or local_mesh()
    checkpointer = Checkpointer(os.path.join(run_dir, CHECKPOINTS))

    def use(step: int, manifest: Manifest) -> Trained:
        config = run_folder.read(manifest.metadata["config"], run_dir)
        tokenizer = load_tokenizer(config.data.tokenizer)
        check_tokenizer(tokenizer.identity, manifest.metadata["tokenizer"])
        base = manifest.metadata.get("base", {})
        check_base(config, base)
        sizes: dict[str, typing.Any] = {**sizes_of(mesh)}
        config.parallel = ParallelConfig(**sizes, zero1=False)
        config.model = config.model.without_mtp()  # MTP layers do not serve inference
        if problems := list(head_problems(config.model, sizes["tensor"])):
            raise ValueError("\n".join(problems))
        model = abstract_state(config, make_optimizer(config.optim), mesh).model
        restored = restore(checkpointer, step, {"model": model})["model"]
        restored = joined(restored, restored_base(config, model, base))
        return Trained(restored, config, tokenizer, step, mesh, manifest.metadata)

    if step is not None:
        return use(step, checkpointer.manifest(step))
    trained = checkpointer.latest(use)
    if trained is None:
        folder = checkpointer.folder
        raise ValueError(
            f"{folder} holds no checkpoint: give the run_dir of a training run"
            f"{hub_command(run_dir)}"
        )
    return trained


def without_pipeline(mesh: Mesh, hidden_size: int) -> Mesh:
    """Return a mesh of the same devices without pipe, which is merged into fsdp, or else data."""
    sizes, devices = sizes_of(mesh), list(mesh.devices.flat)
    stages = sizes["pipe"]
    other = "data" if hidden_size % (sizes["fsdp"] * stages) else "fsdp"
    sizes |= {"pipe": 1, other: sizes[other] * stages}
    return make_mesh(sizes, devices, mesh.shape["fold"])
