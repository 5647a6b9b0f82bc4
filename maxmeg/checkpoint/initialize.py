"""The state before the first step: random weights, or those of another run's checkpoint."""

import dataclasses
import functools
import logging
import typing

import jax
import jax.numpy as jnp

from maxmeg.checkpoint.disk import from_disk, on_disk
from maxmeg.checkpoint.integrity import CorruptCheckpointError, Manifest
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.names import VOCABULARY_TABLES, from_tree, nested, to_arrays
from maxmeg.checkpoint.regrouping import Regrouping
from maxmeg.checkpoint.storage import row_orders
from maxmeg.checkpoint.upcycling import Upcycling
from maxmeg.config import files
from maxmeg.config.hints import hub_command
from maxmeg.config.initial import begins_twice, changes
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config, Masters
from maxmeg.hf.folder import open_checkpoints
from maxmeg.models.lm import LM, language_model
from maxmeg.ops.random import split
from maxmeg.optim.storage import merged
from maxmeg.parallel.trainable import frozen, joined, trained, without
from maxmeg.processes.host import to_device
from maxmeg.state import TrainState, init_state, shardings_of

log = logging.getLogger("maxmeg")
Base = dict[str, typing.Any]  # identity of a frozen base: folder, step, digest; {}: no base
T = typing.TypeVar("T")
CLASSIFIER, POOLER = "model.classifier.", "model.bert.pooler."


def create_state(config: Config, optimizer, abstract: TrainState) -> TrainState:
    """Return the state before the first step, created in place on the mesh."""
    return initialize(config, optimizer, abstract, None)[0]


def initialize(
    config: Config, optimizer, abstract: TrainState, tokenizer: str | None
) -> tuple[TrainState, Base]:
    """Return the state before the first step, and the identity of its frozen base.

    Weights come from the newest intact checkpoint of checkpoint.init_from, if it is set. tokenizer:
    identity of the run's tokenizer (None: not checked); ValueError if init_from has another.
    """
    if config.optim.masters is not Masters.float32:
        wide = dataclasses.replace(config.optim, masters=Masters.float32)
        wide = dataclasses.replace(config, optim=wide)
        state, base = initialize(wide, optimizer, on_disk(abstract), tokenizer)
        return from_disk(state, config.optim.moments, config.optim, abstract), base
    if not config.checkpoint.init_from:
        base = random_base(config, abstract.model)
        state = random_state(config, optimizer, abstract, base)
        return with_average(state, abstract), base_of(config)

    def use(source: Checkpointer, step: int, manifest: Manifest) -> tuple[TrainState, Base]:
        part = frozen(abstract.model)
        part = part if jax.tree.leaves(part) else abstract.model
        model = initial_model(config, part, source, step, tokenizer)
        state = with_average(random_state(config, optimizer, abstract, model), abstract)
        return state, identity(config, step, manifest) if config.lora.rank else {}

    return from_initial(config, use)


def with_average(state: TrainState, abstract: TrainState) -> TrainState:
    """Add EMA weights if `abstract` has them and the state has not, as a copy of its weights; drop
    them if `abstract` has none."""
    if abstract.ema is None or state.ema is not None:
        return dataclasses.replace(state, ema=None if abstract.ema is None else state.ema)

    def begin(model, remainders):
        model, remainders = to_device((model, remainders))
        return jax.tree.map(jnp.copy, trained(merged(model, remainders)))

    places = shardings_of(abstract.ema)
    ema = jax.jit(begin, out_shardings=places)(state.model, state.remainders)
    return dataclasses.replace(state, ema=ema)


def random_state(config: Config, optimizer, abstract: TrainState, model: LM) -> TrainState:
    """Return a state with the arrays of `model`, all others initialized by the run's seed, and no
    EMA weights."""

    def rest(state: TrainState) -> TrainState:
        return dataclasses.replace(state, model=without(state.model, model), ema=None)

    def init(key):
        return rest(init_state(key, config, optimizer))

    state = jax.jit(init, out_shardings=shardings_of(rest(abstract)))(jax.random.key(config.seed))
    return dataclasses.replace(state, model=joined(state.model, model))


def random_base(config: Config, model: LM) -> LM:
    """Return the frozen part of a model, possibly empty, with random weights by the run's seed."""
    part = frozen(model)
    if not jax.tree.leaves(part):
        return part

    def init(key):
        return frozen(language_model(split(key, 2)[0], config))

    return jax.jit(init, out_shardings=shardings_of(part))(jax.random.key(config.seed))


def restored_base(config: Config, model: LM, base: Base) -> LM:
    """Return the frozen part of a model, possibly empty, with the weights that `base` identifies.

    `base` is from a checkpoint's metadata and has passed `check_base`.
    """
    part = frozen(model)
    if not config.checkpoint.init_from or not jax.tree.leaves(part):
        return random_base(config, model)
    try:
        return initial_model(config, part, initial_source(config), base["step"])
    except CorruptCheckpointError as error:
        raise ValueError(f"the frozen base {base} is damaged: {error}") from error


def initial_source(config: Config) -> Checkpointer:
    """Return the checkpoints of checkpoint.init_from."""
    seconds = config.checkpoint.timeout_seconds
    return open_checkpoints(config.checkpoint.init_from, timeout_seconds=seconds)


def from_initial(config: Config, use: typing.Callable[[Checkpointer, int, Manifest], T]) -> T:
    """Return use(checkpoints, step, manifest) for the newest checkpoint of checkpoint.init_from."""
    source = initial_source(config)
    result = source.latest(lambda step, manifest: (use(source, step, manifest),))
    if result is None:
        raise ValueError(
            f"checkpoint.init_from={config.checkpoint.init_from}: {source.folder} holds no "
            "checkpoint; give the run_dir of a run, or a Hugging Face folder"
            f"{hub_command(config.checkpoint.init_from)}"
        )
    return result[0]


def initial_model(
    config: Config, part: LM, source: Checkpointer, step: int, tokenizer: str | None = None
) -> LM:
    """Return `part` of an abstract model with the weights of a checkpoint, in the dtypes of `part`.

    Rows of new vocabulary and MTP layers that the checkpoint lacks are random, by the run's seed.
    tokenizer: as for `check_initial`, which raises a ValueError for another model.
    """
    saved = check_initial(config, source.manifest(step), tokenizer)
    targets, layout = to_arrays({"model": part}), part.stack.layout
    is_twice = begins_twice(saved, config.model)

    def take(name: str, like: jax.ShapeDtypeStruct, orders=None) -> jax.Array:
        """Restore one array, so that a frozen base is never in memory in float32 as a whole."""
        if name.endswith(".moe.load") and not saved.moe.global_aux_loss:
            zeros = functools.partial(jnp.zeros, like.shape)
            return jax.jit(zeros, out_shardings=like.sharding)()
        mtp_layer = name.removeprefix("model.mtp.depths.").partition(".")[0]
        is_new = mtp_layer.isdecimal() and int(mtp_layer) >= saved.mtp.num_layers
        of_one = name.replace("model.query.", "model.") if is_twice else name
        is_new |= of_one.startswith(CLASSIFIER) and saved.head != config.model.head
        if is_new or (of_one.startswith(POOLER) and not saved.bert.pooler):
            return random_array(name, like.sharding, config)
        stored = jax.ShapeDtypeStruct(like.shape, jnp.float32, sharding=like.sharding)
        name, orders = of_one, {of_one.replace(".", "/"): x for x in (orders or {}).values()}
        resizable = {name.replace(".", "/"): 0} if name.endswith(VOCABULARY_TABLES) else {}
        tree, _ = source.restore(
            step, nested({name: stored}), resizable=resizable, orders=orders, partial=True
        )
        (array,) = jax.tree.leaves(tree)
        if resizable and config.model.vocab_size > saved.vocab_size:
            array = with_new_rows(array, name, saved.vocab_size, config)
        return array.astype(like.dtype)

    def take_reordered(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        return take(name, like, row_orders([name], layout))

    read, noise = take_reordered, config.checkpoint.upcycle_noise
    if config.model.has("moe") and not saved.has("moe"):
        read = Upcycling(saved, config.model, layout, take, noise, config.seed).take
    elif config.model.groups != saved.groups:
        read = Regrouping(saved, config.model, layout, take).take
    arrays = {name: read(name, like) for name, like in targets.items()}
    return from_tree(nested(arrays), {"model": part})["model"]


def check_initial(config: Config, manifest: Manifest, tokenizer: str | None) -> ModelConfig:
    """Return a checkpoint's model, and log how the run's differs. No array is read.

    ValueError if a run cannot begin with its weights. tokenizer: identity of the run's tokenizer;
    None: not checked.
    """
    saved, lora = files.from_dict(manifest.metadata["config"]).model, config.lora
    if tokenizer is not None and config.model.vocab_size == saved.vocab_size:
        check_tokenizer(tokenizer, manifest.metadata["tokenizer"])
    if lora.rank and config.model.vocab_size > saved.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} adds tokens to the {saved.vocab_size} of "
            f"checkpoint.init_from, and lora.rank={lora.rank} would freeze them at random: "
            "train all weights (lora.rank=0), or keep the vocabulary"
        )
    adapted = changes(saved, config.model, config.checkpoint.init_from)
    upcycles = config.model.has("moe") and not saved.has("moe")
    if upcycles and lora.rank:
        raise ValueError(
            f"lora.rank={lora.rank} would freeze experts that are copies of an MLP "
            "(checkpoint.init_from is dense): train all weights first (lora.rank=0)"
        )
    if lora.rank and (saved.head.width or config.model.bert.pooler > saved.bert.pooler):
        raise ValueError(
            f"lora.rank={lora.rank} trains a new classifier beside a frozen model, which must have "
            "the pooler that model.bert.pooler=true asks for, and no classifier of its own: set "
            "model.bert.pooler as in checkpoint.init_from, or train all weights (lora.rank=0)"
        )
    if config.checkpoint.upcycle_noise and not upcycles:
        raise ValueError(
            f"checkpoint.upcycle_noise={config.checkpoint.upcycle_noise} is for a dense model in "
            f"checkpoint.init_from, and {config.checkpoint.init_from} has experts already: set it "
            "to 0"
        )
    step = f"step {manifest.step}"
    log.info(
        "checkpoint.init_from=%s: %s", config.checkpoint.init_from, ", ".join([step, *adapted])
    )
    return saved


def random_array(name: str, sharding, config: Config) -> jax.Array:
    """Return an array with random values by the run's seed."""

    def init(key):
        return to_arrays({"model": LM(key, config.model, config.parallel)})[name]

    key = split(jax.random.key(config.seed), 2)[0]
    return jax.jit(init, out_shardings=sharding)(key)


def with_new_rows(table_VD: jax.Array, name: str, old_rows: int, config: Config) -> jax.Array:
    """Return the vocabulary table with random rows, by the run's seed, from row `old_rows`."""

    def grow(table_VD, key):
        fresh_VD = to_arrays({"model": LM(key, config.model, config.parallel)})[name]
        rows_V1 = jnp.arange(fresh_VD.shape[0])[:, None]
        return jnp.where(rows_V1 < old_rows, table_VD, fresh_VD)

    key = split(jax.random.key(config.seed), 2)[0]
    return jax.jit(grow, out_shardings=table_VD.sharding)(table_VD, key)


def identity(config: Config, step: int, manifest: Manifest) -> Base:
    """Return what identifies a frozen base; the manifest's digest covers those of all arrays."""
    folder = config.checkpoint.init_from
    return {"folder": folder, "step": step, "digest": manifest.digest}


def base_of(config: Config) -> Base:
    """Return the identity of the frozen base of a new run with this config.

    It is that of the newest checkpoint in checkpoint.init_from, or the seed of random weights;
    empty if nothing is frozen.
    """
    if not config.lora.rank:
        return {}
    if not config.checkpoint.init_from:
        return {"digest": f"random, seed {config.seed}"}
    return from_initial(config, lambda _, step, manifest: identity(config, step, manifest))


def check_base(config: Config, saved: Base) -> None:
    """ValueError if adapters were trained with another frozen base than the config names."""
    if config.lora.rank and config.checkpoint.init_from and "step" in saved:
        try:
            manifest = initial_source(config).manifest(saved["step"])
        except ValueError as error:
            raise ValueError(f"the frozen base {saved} cannot be read: {error}") from error
        configured = identity(config, saved["step"], manifest)
    else:
        configured = base_of(config)
    if configured.get("digest") != saved.get("digest"):
        raise ValueError(
            f"the checkpoint was trained with the frozen base {saved or 'none'}, and the config "
            f"has {configured or 'none'}: set checkpoint.init_from to the base of the checkpoint, "
            "or start another run_dir"
        )


def check_tokenizer(identity: str, saved: str) -> None:
    """ValueError if a checkpoint was trained with another vocabulary."""
    if identity != saved:
        raise ValueError(
            f"the tokenizer's vocabulary ({identity}) is not the checkpoint's ({saved}): set "
            "data.tokenizer to the one it was trained with"
        )
