"""Load the model of a run for inference."""

import dataclasses
import itertools
import math
import typing
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from maxmeg.checkpoint.disk import on_disk
from maxmeg.checkpoint.initialize import check_base, check_tokenizer, restored_base
from maxmeg.checkpoint.integrity import Manifest
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.resume import check_averages, restore
from maxmeg.config import values
from maxmeg.config.hints import hub_command
from maxmeg.config.model import DType
from maxmeg.config.model_rules import expert_layout_problems
from maxmeg.config.options import GenerationOptions, LongRope, ModelOptions
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.schema import Config
from maxmeg.config.validate import head_problems
from maxmeg.data import run_folder
from maxmeg.data.chat.template import ChatTemplate
from maxmeg.data.samples.aligned import start_token
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.hf.folder import open_checkpoints
from maxmeg.inference.mesh import local_mesh
from maxmeg.models.lm import LM
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.mesh import make_mesh, sizes_of
from maxmeg.parallel.parameter import info, is_variable
from maxmeg.parallel.trainable import fixed, joined, part, saved, trained
from maxmeg.state import abstract_state

READ_BYTES = 2**30  # of a checkpoint's arrays that are read together, on each device


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model on `mesh` with its config and tokenizer.

    Weights that are in float32 although the compute dtype is another one are cast by every call
    that computes. adapters: names of those beside the model, whose numbers are 1, 2, ...
    (`inference.adapters`). ends: tokens that end the replies of these adapters. templates: chat
    templates of adapters that have their own. longrope: which length chooses the factors of
    LongRoPE for generated text.
    """

    model: LM
    config: Config
    tokenizer: Tokenizer
    step: int
    mesh: Mesh
    metadata: dict[str, typing.Any] = dataclasses.field(default_factory=dict)  # the checkpoint's
    adapters: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    templates: Mapping[str, ChatTemplate] = dataclasses.field(default_factory=dict)
    longrope: LongRope = LongRope.longest

    @property
    def start_token(self) -> int:
        """The token that an encoder-decoder's targets begin with."""
        return start_token(self.tokenizer, self.config.data.start_token)


def load_run(
    run_dir: str,
    step: int | None = None,
    mesh: Mesh | None = None,
    dtype: DType | None = None,
    master_weights: bool = False,
    mtp: bool = False,
    average: bool = False,
) -> Trained:
    """Load the model of a run at `step` (default: its newest intact checkpoint), or that of a
    Hugging Face folder, on any mesh.

    Only the model's arrays are read. mesh: default one device. dtype: compute dtype, default the
    run's. Weights are held in it, or with `master_weights` in float32 as in the checkpoint. mtp:
    load MTP layers too, which propose tokens in an Engine. average: load the averages of
    optim.ema in place of the trained weights. ValueError if the folder holds no checkpoint, if
    there are no MTP layers or averages, or if the numbers of heads are not divisible by the tensor
    axis, or that of experts by the expert axis.
    """
    mesh = mesh or local_mesh()
    checkpointer = open_checkpoints(run_dir)

    def use(step: int, manifest: Manifest) -> Trained:
        config = run_folder.read(manifest.metadata["config"], run_dir)
        if average:
            check_averages(manifest.tensors, run_dir)
        tokenizer = load_tokenizer(config.data.tokenizer)
        check_tokenizer(tokenizer.identity, manifest.metadata["tokenizer"])
        base = manifest.metadata.get("base", {})
        check_base(config, base)
        sizes: dict[str, typing.Any] = {**sizes_of(mesh)}
        config.parallel, config.optim.offload = ParallelConfig(**sizes, zero1=False), False
        if not mtp:
            config.model = config.model.without_mtp()
        elif not config.model.mtp.num_layers:
            raise ValueError(f"mtp=true: the model of {run_dir} has no MTP layers; set mtp=false")
        config.model.dtype = dtype or config.model.dtype
        rules = head_problems(config.model, sizes["tensor"]), expert_layout_problems(config)
        if problems := list(itertools.chain(*rules)):
            raise ValueError("\n".join(problems))
        model = on_disk(abstract_state(config, make_optimizer(config.optim), mesh)).model
        dtype_of_weights = DType.float32 if master_weights else config.model.dtype
        restored = restored_in(dtype_of_weights, checkpointer, step, model, average)
        restored = joined(restored, restored_base(config, model, base))
        return Trained(restored, config, tokenizer, step, mesh, manifest.metadata)

    if step is not None:
        return use(step, checkpointer.manifest(step))
    trained = checkpointer.latest(use)
    if trained is None:
        folder = checkpointer.folder
        raise ValueError(
            f"{folder} holds no checkpoint: give the run_dir of a training run, or a Hugging Face "
            f"folder with config.json"
            f"{hub_command(run_dir)}"
        )
    return trained


def load_chosen(options: ModelOptions, mesh: Mesh | None = None, mtp: bool = False) -> Trained:
    """Load the model that a command's options name. mesh: default the devices along tensor.

    ValueError as from `load_run`.
    """
    dtype = values.convert("dtype", options.dtype, DType) if options.dtype else None
    step = None if options.step < 0 else options.step
    mesh = mesh or local_mesh(options.tensor)
    trained = load_run(options.run_dir, step, mesh, dtype, mtp=mtp, average=options.average)
    if not isinstance(options, GenerationOptions):
        return trained
    return with_longrope(trained, values.convert("longrope", options.longrope, LongRope))


def with_longrope(trained: Trained, longrope: LongRope) -> Trained:
    """Return the model with another choice of LongRoPE's factors; ValueError if it has none."""
    scaling = trained.config.model.rotary.scaling
    if longrope is LongRope.current and scaling is not RotaryScaling.longrope:
        raise ValueError(
            f"longrope=current: the model of {trained.config.run_dir} has no LongRoPE "
            f"(model.rotary.scaling={scaling.name}): leave it out"
        )
    return dataclasses.replace(trained, longrope=longrope)


def restored_in(
    dtype: DType, checkpointer: Checkpointer, step: int, model: LM, average: bool = False
) -> LM:
    """Restore the saved part of an abstract model, its weights in `dtype`; average: the averages
    of its trained weights.

    Arrays are verified in float32, as they were saved, and then cast. At most READ_BYTES of them a
    device, or one array, are in memory in float32 at a time.
    """
    parts, restored = {"model": saved(model)}, None
    if average:
        parts = {"ema": trained(parts["model"]), "model": fixed(parts["model"])}
    groups = ((name, tree, ids) for name, tree in parts.items() for ids in read_groups(tree))
    for name, tree, group in groups:
        chosen = part(tree, lambda variable, ids=group: id(variable) in ids, others=False)
        read = restore(checkpointer, step, {name: chosen})[name]
        read = jax.block_until_ready(cast(read, dtype))
        restored = read if restored is None else joined(restored, read)
    assert restored is not None  # a model has arrays
    return restored


def read_groups(model: LM) -> list[set[int]]:
    """Return the ids of an abstract model's variables in groups of at most READ_BYTES a device."""
    groups, size = [], READ_BYTES
    for variable in jax.tree.leaves(model, is_leaf=is_variable):
        if (array := variable.get_value()) is None:
            continue
        local = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        if size + local > READ_BYTES:
            groups, size = [*groups, set()], 0
        groups[-1].add(id(variable))
        size += local
    return groups


def cast(model: LM, dtype: DType) -> LM:
    """Return the model with its weights in `dtype`; states and exact parameters keep their own."""

    def one(variable):
        array = variable.get_value()
        if array is None or info(variable).is_exact:
            return variable
        return variable.replace(array.astype(dtype.value))

    return jax.tree.map(one, model, is_leaf=is_variable)


def without_pipeline(mesh: Mesh, hidden_size: int) -> Mesh:
    """Return a mesh of the same devices without pipe, which is merged into fsdp, or else data."""
    sizes, devices = sizes_of(mesh), list(mesh.devices.flat)
    stages = sizes["pipe"]
    other = "data" if hidden_size % (sizes["fsdp"] * stages) else "fsdp"
    sizes |= {"pipe": 1, other: sizes[other] * stages}
    return make_mesh(sizes, devices, mesh.shape["fold"])
