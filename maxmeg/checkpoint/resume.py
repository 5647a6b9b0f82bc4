"""The state that a run starts from: its newest checkpoint, another run's, or a new state."""

import dataclasses
import typing
from collections.abc import Iterable

import jax
from jax.sharding import Mesh, NamedSharding

from maxmeg.checkpoint.disk import from_disk, on_disk, orders_of
from maxmeg.checkpoint.initialize import (
    check_base,
    check_initial,
    check_tokenizer,
    from_initial,
    initialize,
    restored_base,
    with_average,
)
from maxmeg.checkpoint.integrity import Manifest, flatten
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.names import VOCABULARY_TABLES, from_tree, nested, to_arrays
from maxmeg.checkpoint.restore import check_tree
from maxmeg.config import files
from maxmeg.config.initial import first_difference
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config, Moments
from maxmeg.optim.build import make_optimizer
from maxmeg.optim.scaling import Scaler, first_scaler
from maxmeg.parallel.trainable import joined, saved, trained
from maxmeg.state import TrainState, abstract_state, shardings_of


@dataclasses.dataclass(frozen=True)
class Start:
    """The state that a run starts from.

    metadata: that of the restored checkpoint; empty for a new run. base: identity of the frozen
    base.
    """

    step: int
    state: TrainState
    metadata: dict[str, typing.Any]
    base: dict[str, typing.Any]


def start(
    config: Config, checkpointer: Checkpointer, optimizer, abstract: TrainState, tokenizer: str
) -> Start:
    """Return the state of the newest checkpoint, or else the state before the first step."""
    if resumed := resume(config, checkpointer, abstract, tokenizer):
        return resumed
    state, base = initialize(config, optimizer, abstract, tokenizer)
    return Start(0, state, {}, base)


def resume(
    config: Config, checkpointer: Checkpointer, abstract: TrainState, tokenizer: str
) -> Start | None:
    """Restore the newest intact checkpoint of the run folder, else of checkpoint.load, else None.

    `tokenizer` is the identity of the run's tokenizer; ValueError if the checkpoint was trained
    with another tokenizer or another frozen base.
    """
    source = resumed_source(config, checkpointer)
    if source is None:
        return None

    def use(step: int, manifest: Manifest) -> tuple[int, TrainState, dict[str, typing.Any]]:
        check(config, manifest, abstract, tokenizer)
        state = restore(source, step, as_saved(config, abstract, manifest))
        state = from_disk(state, saved_moments(manifest), config.optim, abstract)
        state = with_scaler_of(state, config, abstract)
        state = with_average(state, abstract)
        return step, state, manifest.metadata

    restored = source.latest(use)
    assert restored is not None  # process 0 has found a checkpoint
    step, state, metadata = restored
    base = metadata.get("base", {})
    model = joined(state.model, restored_base(config, abstract.model, base))
    state = dataclasses.replace(state, model=model)
    return Start(step, state, metadata, base)


def check_start(
    config: Config, checkpointer: Checkpointer, abstract: TrainState, tokenizer: str
) -> Manifest | None:
    """Check what `start` would restore, from manifests alone. ValueError as from `start`.

    Returns the manifest of the checkpoint that the run would resume; None for a new run.
    """
    if source := resumed_source(config, checkpointer):

        def use(_: int, manifest: Manifest) -> Manifest:
            check(config, manifest, abstract, tokenizer)
            return manifest

        return source.latest(use)
    if config.checkpoint.init_from:
        from_initial(config, lambda _, __, manifest: check_initial(config, manifest, tokenizer))
    return None


def resumed_source(config: Config, checkpointer: Checkpointer) -> Checkpointer | None:
    """Return the checkpoints that a run resumes, as process 0 chooses: its own, else those of
    checkpoint.load; None for a new run."""
    load = Checkpointer(
        files.checkpoints_of(config.checkpoint.load),
        timeout_seconds=config.checkpoint.timeout_seconds,
    )

    def choose() -> str:
        return choose_source(config.checkpoint.load, checkpointer, load)

    chosen = checkpointer.processes.broadcast("source", choose, ValueError)
    return {"run": checkpointer, "load": load}.get(chosen)


def check(config: Config, manifest: Manifest, abstract: TrainState, tokenizer: str) -> None:
    """ValueError if a run cannot resume a checkpoint; its arrays are not read."""
    check_tokenizer(tokenizer, manifest.metadata["tokenizer"])
    check_base(config, manifest.metadata.get("base", {}))
    check_layers(config.model, manifest)
    check_optimizer(config, manifest)
    tree, options = _request(as_saved(config, abstract, manifest))
    check_tree(manifest, flatten(tree), **options)


def saved_moments(manifest: Manifest) -> Moments:
    """How the moments of a checkpoint are stored; older ones have float32."""
    before = manifest.metadata["config"]["optim"]
    return Moments(before.get("moments", Moments.float32.value))


def as_saved(config: Config, abstract: TrainState, manifest: Manifest) -> TrainState:
    """The abstract state with the arrays of a checkpoint; `from_disk`, `with_scaler_of`
    and `with_average` convert the restored arrays to the run's state."""
    moments, place = saved_moments(manifest), abstract.step.sharding
    if moments is not config.optim.moments:
        assert isinstance(place, NamedSharding)
        mesh = typing.cast(Mesh, place.mesh)
        optim = dataclasses.replace(config.optim, moments=moments)
        optimizer = make_optimizer(optim, mesh, config.parallel.zero1)
        abstract = abstract_state(dataclasses.replace(config, optim=optim), optimizer, mesh)
    state = on_disk(abstract)
    ema = (state.ema or trained(state.model)) if has_averages(manifest.tensors) else None
    return with_saved_scaler(dataclasses.replace(state, ema=ema), manifest)


def has_averages(tensors: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors has EMA weights."""
    return any(name.startswith("ema/") for name in tensors)


def check_averages(tensors: Iterable[str], run_dir: str) -> None:
    """ValueError for a checkpoint without EMA weights."""
    if not has_averages(tensors):
        raise ValueError(
            f"average=true: the checkpoint of {run_dir} has no EMA weights: train with "
            "optim.ema.decay, or leave average out"
        )


def with_saved_scaler(abstract: TrainState, manifest: Manifest) -> TrainState:
    """The abstract state with a loss scale if the checkpoint has one: both ways between float16 and
    other dtypes are open."""
    names = [f"scaler/{field.name}" for field in dataclasses.fields(Scaler)]
    if not all(name in manifest.tensors for name in names):
        return dataclasses.replace(abstract, scaler=None)
    dtypes = (manifest.tensors[name].dtype for name in names)
    where = abstract.step.sharding
    scalars: list[typing.Any] = [jax.ShapeDtypeStruct((), t, sharding=where) for t in dtypes]
    return dataclasses.replace(abstract, scaler=Scaler(*scalars))


def with_scaler_of(state: TrainState, config: Config, abstract: TrainState) -> TrainState:
    """The state with a loss scale if the run needs one: the fixed one, else the checkpoint's, else
    the first."""
    before, fixed = state.scaler, config.optim.loss_scale.fixed
    if abstract.scaler is None or (before is not None and not fixed):
        return dataclasses.replace(state, scaler=abstract.scaler and before)

    def first():
        scaler = first_scaler(config)
        return dataclasses.replace(before, scale=scaler.scale) if before and scaler else scaler

    scaler = jax.jit(first, out_shardings=shardings_of(abstract.scaler))()
    return dataclasses.replace(state, scaler=scaler)


def check_layers(model: ModelConfig, manifest: Manifest) -> None:
    """ValueError if a checkpoint's layers have other mixers than the model's."""
    saved = manifest.metadata["config"]["model"]
    before = ModelConfig(num_layers=saved["num_layers"], layers=saved["layers"])
    if text := first_difference(before, model):
        raise ValueError(
            f"the checkpoint of step {manifest.step} is of another model: {text}; resume with "
            "its layers, or train anew in another run_dir"
        )
    for name in ("first_layers_bf16", "last_layers_bf16"):
        if (number := saved.get(name, 0)) != (now := getattr(model, name)):
            raise ValueError(
                f"model.{name}={now}, but the checkpoint of step {manifest.step} has {number}, "
                "which divides its layers into other groups: resume with the same number; or start "
                "anew from the weights, with checkpoint.init_from=FOLDER of that run, in another "
                "run_dir"
            )


def check_optimizer(config: Config, manifest: Manifest) -> None:
    """ValueError if the checkpoint is of a run with another optimizer."""
    before = manifest.metadata["config"]["optim"]["optimizer"]
    if before != (now := config.optim.optimizer.value):
        raise ValueError(
            f"the checkpoint of step {manifest.step} has the state of optim.optimizer={before}, "
            f"not of {now}: set it back; or start {now} anew from the weights, with "
            "checkpoint.init_from=FOLDER of that run, in another run_dir"
        )


def choose_source(load: str, run: Checkpointer, other: Checkpointer) -> str:
    """Return "run", "load" or "" for neither; ValueError if the folders contradict `load`."""
    steps = run.steps()
    if load == "none" and steps:
        raise ValueError(
            f"{run.folder} already holds checkpoints of steps {steps} and "
            "checkpoint.load=none: set another run_dir, delete them, or use checkpoint.load=auto"
        )
    if steps or load in ("none", "auto"):
        return "run" if steps else ""
    if not other.steps():
        raise ValueError(
            f"checkpoint.load={load}: {other.folder} holds no checkpoint; to begin with weights "
            "alone, as those of a Hugging Face folder, set checkpoint.init_from"
        )
    return "load"


def restore(checkpointer: Checkpointer, step: int, abstract):
    """Restore the arrays of `abstract`: a whole state, or {"model": its model}.

    No other arrays are read, and no frozen base. The padding of the vocabulary and the pipeline may
    differ from those at save.
    """
    request, options = _request(abstract)
    tree, _ = checkpointer.restore(step, request, **options)
    return from_tree(tree, saved(abstract))


def _request(abstract) -> tuple[dict[str, typing.Any], dict[str, typing.Any]]:
    """Return the abstract tree and the options of `Checkpointer.restore`."""
    abstract = saved(abstract)
    names = to_arrays(abstract)
    tables = [name for name in names if name.endswith(VOCABULARY_TABLES)]
    return nested(names), {
        "resizable": {name.replace(".", "/"): 0 for name in tables},
        "orders": orders_of(abstract),
        "partial": not isinstance(abstract, TrainState),
    }
