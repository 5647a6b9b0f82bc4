"""TrainState: what a step reads and replaces; how it is made, sharded and named on disk."""

import dataclasses
import functools
import hashlib
import logging
import math
import os
import typing

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from maxmeg.checkpoint import layout
from maxmeg.checkpoint.integrity import MANIFEST
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.config import files
from maxmeg.config.initial import changes
from maxmeg.config.lazy import Lazy
from maxmeg.config.schema import Config
from maxmeg.models.lm import LM, language_model
from maxmeg.parallel.parts import frozen, joined, trained, without
from maxmeg.parallel.rules import is_variable, logical_axes, storage_specs
from maxmeg.pipeline.layout import Layout
from maxmeg.runtime.summary import ParameterRow

log = logging.getLogger("maxmeg")
upcycling = Lazy("maxmeg.checkpoint.upcycling")
CHECKPOINTS = "checkpoints"  # the folder of a run that holds them
VOCABULARY_TABLES = ("embedding.table", "output.table")  # padded along dimension 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: how many were made. model: float32 masters, what is frozen in the compute dtype.
    optimizer: of the trained part. key: raw key of all later randomness."""

    step: jax.Array
    model: LM
    optimizer: optax.OptState
    key: jax.Array


def init_state(key: jax.Array, config: Config, optimizer) -> TrainState:
    """The state before the first step; depends on the key alone, not on any layout."""
    model_key, later = jax.random.split(key)
    model = language_model(model_key, config)
    moments = optimizer.init(trained(model))
    return TrainState(jnp.int32(0), model, moments, jax.random.key_data(later))


def abstract_state(config: Config, optimizer, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, nothing allocated."""
    shapes = jax.eval_shape(lambda key: init_state(key, config, optimizer), jax.random.key(0))
    specs = storage_specs(shapes, mesh, config.parallel.zero1)
    return jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )


def shardings_of(abstract):
    """The sharding of every leaf of an abstract tree."""
    return jax.tree.map(lambda a: a.sharding, abstract)


def create_state(config: Config, optimizer, abstract: TrainState) -> TrainState:
    """The state before the first step, made in place on the mesh."""

    base = base_model(config, abstract.model)
    if config.checkpoint.init_from and not jax.tree.leaves(base):
        base = initial_model(config, abstract.model)

    def own(state: TrainState) -> TrainState:
        return dataclasses.replace(state, model=without(state.model, base))

    def init(key):
        return own(init_state(key, config, optimizer))

    made = jax.jit(init, out_shardings=shardings_of(own(abstract)))(jax.random.key(config.seed))
    return with_base(made, base)


def base_model(config: Config, model: LM) -> LM:
    """The frozen part of a model that is abstract with shardings; empty if all of it is trained."""
    part = frozen(model)
    if not jax.tree.leaves(part):
        return part
    if config.checkpoint.init_from:
        return initial_model(config, part)

    def init(key):
        return frozen(language_model(jax.random.split(key)[0], config))

    return jax.jit(init, out_shardings=shardings_of(part))(jax.random.key(config.seed))


def initial_model(config: Config, part: LM) -> LM:
    """`part` of an abstract model with the weights of checkpoint.init_from, in its own dtypes.

    Words that it does not know keep the random rows of the run's seed, layers of further tokens
    that it lacks the weights. ValueError where the folder holds another model (config/initial.py).
    """
    source, step, metadata = initial_source(config.checkpoint.init_from)
    saved = files.from_dict(metadata["config"]).model
    if config.lora.rank and config.model.vocab_size > saved.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} adds words to the {saved.vocab_size} of "
            f"checkpoint.init_from, and lora.rank={config.lora.rank} would freeze them at random: "
            "train all weights (lora.rank=0), or keep the vocabulary"
        )
    if adapted := changes(saved, config.model, config.checkpoint.init_from):
        log.info("checkpoint.init_from=%s: %s", source.folder.parent, ", ".join(adapted))
    abstract = to_arrays({"model": part})
    wanted = layout.on_disk(abstract, part.stack.layout)

    def take(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        """One array at a time: of a frozen base float32 is never whole in memory."""
        if name.endswith(".moe.load") and not saved.router_global_aux_loss:
            zeros = functools.partial(jnp.zeros, like.shape)
            return jax.jit(zeros, out_shardings=like.sharding)()
        depth = name.removeprefix("model.mtp.depths.").partition(".")[0]
        if depth.isdecimal() and int(depth) >= saved.mtp_depths:
            return random_array(name, like.sharding, config)
        stored = jax.ShapeDtypeStruct(like.shape, jnp.float32, sharding=like.sharding)
        resizable = {name.replace(".", "/"): 0} if name.endswith(VOCABULARY_TABLES) else {}
        tree, _ = source.restore(step, nested({name: stored}), resizable=resizable, partial=True)
        (array,) = jax.tree.leaves(tree)
        if resizable and config.model.vocab_size > saved.vocab_size:
            array = with_new_words(array, name, saved.vocab_size, config)
        return array.astype(like.dtype)

    read, noise = take, config.checkpoint.upcycle_noise
    if config.model.num_experts and not saved.num_experts:
        if config.lora.rank:
            raise ValueError(
                f"lora.rank={config.lora.rank} would freeze experts that begin as copies of an MLP "
                "(checkpoint.init_from is dense): train all weights first (lora.rank=0)"
            )
        read = upcycling.Upcycling(saved, config.model, noise, config.seed, take).take
    elif noise:
        raise ValueError(
            f"checkpoint.upcycle_noise={noise} is for a dense model in checkpoint.init_from, and "
            f"{config.checkpoint.init_from} has experts already: set it to 0"
        )
    arrays = {name: read(name, like) for name, like in wanted.items()}
    return from_tree(nested(arrays), {"model": part})["model"]


def initial_source(folder: str) -> tuple[Checkpointer, int, dict[str, typing.Any]]:
    """(checkpoints, newest step, its metadata) of checkpoint.init_from."""
    source = Checkpointer(os.path.join(folder, CHECKPOINTS))
    step = source.latest_step()
    if step is None:
        raise ValueError(
            f"checkpoint.init_from={folder}: {source.folder} holds no checkpoint; give the run_dir "
            "of a run, or a folder that python -m maxmeg.convert has written"
        )
    return source, step, source.metadata(step)


def random_array(name: str, sharding, config: Config) -> jax.Array:
    """An array as a new model of the run's seed has it."""

    def made(key):
        return to_arrays({"model": LM(key, config.model, config.parallel)})[name]

    key = jax.random.split(jax.random.key(config.seed))[0]
    return jax.jit(made, out_shardings=sharding)(key)


def with_new_words(table_VD: jax.Array, name: str, known: int, config: Config) -> jax.Array:
    """The table with rows from `known` on as a new model of the run's seed has them."""

    def grown(table_VD, key):
        fresh_VD = to_arrays({"model": LM(key, config.model, config.parallel)})[name]
        rows_V1 = jnp.arange(fresh_VD.shape[0])[:, None]
        return jnp.where(rows_V1 < known, table_VD, fresh_VD)

    key = jax.random.split(jax.random.key(config.seed))[0]
    return jax.jit(grown, out_shardings=table_VD.sharding)(table_VD, key)


def base_of(config: Config) -> dict[str, typing.Any]:
    """What tells a run's frozen base from others: the digest of its checkpoint's manifest, which
    has one of every array, or the seed of random weights; empty where nothing is frozen."""
    folder = config.checkpoint.init_from
    if not config.lora.rank or not folder:
        return {"digest": f"random, seed {config.seed}"} if config.lora.rank else {}
    source, step, _ = initial_source(folder)
    manifest = (source.existing(step) / MANIFEST).read_bytes()
    return {"folder": folder, "step": step, "digest": hashlib.sha256(manifest).hexdigest()}


def check_base(config: Config, saved: dict[str, typing.Any]) -> None:
    """ValueError where adapters were trained beside another base than the config's."""
    found = base_of(config)
    if found.get("digest") != saved.get("digest"):
        raise ValueError(
            f"the checkpoint was trained beside the frozen base {saved or 'none'}, and the config "
            f"has {found or 'none'}: give checkpoint.init_from the very same base, or begin "
            "another run_dir"
        )


def with_base(state: TrainState, base: LM) -> TrainState:
    """The state whose model had its trained part alone."""
    return dataclasses.replace(state, model=joined(state.model, base))


def parameter_rows(model) -> list[ParameterRow]:
    """One row a parameter of an abstract model, places that a pipeline skips left out."""
    rows = []
    shapes = layout.on_disk(to_arrays({"model": model}), model.stack.layout)
    paths = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_variable)
    for path, variable in paths:
        array = variable.get_value()
        local = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        name = array_name(path)
        axes = logical_axes(variable)
        spec = tuple(larger_axes(names, array.sharding.mesh) for names in array.sharding.spec)
        shape = shapes[f"model.{name}"].shape
        rows.append(ParameterRow(name, shape, axes, spec, local))
    return rows


def larger_axes(names, mesh: Mesh) -> tuple[str, ...] | None:
    """Those mesh axes of one dimension that have more than one device."""
    named = (names,) if isinstance(names, str) else names or ()
    return tuple(name for name in named if mesh.shape[name] > 1) or None


def array_name(path) -> str:
    """Name of an array on disk: "model.stack.groups.0.sublayers.1.norm.weight"."""
    parts = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
    inside = len(path) > 1 and parts[-1] == "value"  # nnx.Param's own attribute
    return ".".join(parts[:-1] if inside else parts)


def to_arrays(tree) -> dict[str, typing.Any]:
    """Every array of a state (or abstract state) by its name."""
    return {array_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def to_tree(tree) -> dict:
    """The arrays of a state that training changes, layers in model order, as nested dicts: what
    checkpoints take."""
    return nested(layout.to_disk(to_arrays(trained(tree)), layout_of(tree)))


def nested(arrays: dict) -> dict:
    """{"a.b": x} as {"a": {"b": x}}."""
    made: dict = {}
    for name, array in arrays.items():
        *folders, last = name.split(".")
        inner = made
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = array
    return made


def from_tree(found: typing.Any, like):
    """The tree of `like` with its arrays taken by name from nested dicts in model order."""
    abstract = to_arrays(like)

    def take(name: str) -> jax.Array:
        return functools.reduce(lambda inner, part: inner[part], name.split("."), found)

    arrays = layout.from_disk({name: take(name) for name in abstract}, abstract, layout_of(like))
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[array_name(path)], like)


def layout_of(tree) -> Layout:
    """How the layers of a state, or of {"model": its model}, lie in memory."""
    model = tree.model if isinstance(tree, TrainState) else tree["model"]
    return model.stack.layout


def restore(checkpointer: Checkpointer, abstract, step: int | None = None):
    """(step, tree like `abstract`, metadata) of a checkpoint, the newest intact one by default.

    `abstract` is a whole state, or {"model": its model} to read nothing else; of it only the
    trained part is read, and returned. The padding of the vocabulary and the pipeline may differ.
    None where there is no checkpoint.
    """
    abstract = trained(abstract)
    wanted = layout.on_disk(to_arrays(abstract), layout_of(abstract))
    tables = [name for name in wanted if name.endswith(VOCABULARY_TABLES)]
    options = {
        "resizable": {name.replace(".", "/"): 0 for name in tables},
        "partial": not isinstance(abstract, TrainState),
    }
    if step is None:
        found = checkpointer.restore_latest(nested(wanted), **options)
    else:
        found = (step, *checkpointer.restore(step, nested(wanted), **options))
    return found and (found[0], from_tree(found[1], abstract), found[2])


def resume(config: Config, checkpointer: Checkpointer, abstract: TrainState, tokenizer: str):
    """(step, state) to go on from: the run folder's own, else checkpoint.load's; None: neither.

    `tokenizer` is the identity of the run's; ValueError where the checkpoint's is another.
    """
    own, load = checkpointer.steps(), config.checkpoint.load
    if load == "none" and own:
        raise ValueError(
            f"{checkpointer.folder} already holds checkpoints of steps {own} and "
            "checkpoint.load=none: set another run_dir, delete them, or use checkpoint.load=auto"
        )
    if not own and load not in ("none", "auto"):
        checkpointer = Checkpointer(os.path.join(load, CHECKPOINTS))
        if not checkpointer.steps():
            raise ValueError(f"checkpoint.load={load}: {checkpointer.folder} holds no checkpoint")
    steps = checkpointer.steps()
    if not steps:
        check_initial_tokenizer(config, tokenizer)
        return None
    metadata = checkpointer.metadata(steps[-1])
    check_tokenizer(tokenizer, metadata["tokenizer"])
    check_base(config, metadata.get("base", {}))
    found = restore(checkpointer, abstract)
    return found and (found[0], with_base(found[1], base_model(config, abstract.model)))


def check_initial_tokenizer(config: Config, identity: str) -> None:
    """ValueError where the weights to begin with know other words; more words may be added."""
    folder = config.checkpoint.init_from
    if not folder:
        return
    metadata = initial_source(folder)[2]
    if config.model.vocab_size == files.from_dict(metadata["config"]).model.vocab_size:
        check_tokenizer(identity, metadata["tokenizer"])


def check_tokenizer(identity: str, saved: str) -> None:
    """ValueError where a checkpoint was trained with another vocabulary."""
    if identity != saved:
        raise ValueError(
            f"the tokenizer's vocabulary ({identity}) is not the checkpoint's ({saved}): set "
            "data.tokenizer to the one it was trained with"
        )
