"""TrainState: what a step reads and replaces; how it is initialized, sharded and named on disk."""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from maxmeg.checkpoint import storage
from maxmeg.checkpoint.names import array_name, nested, to_arrays
from maxmeg.config import files
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, Masters, Moments, OptimConfig
from maxmeg.models.lm import LM, language_model
from maxmeg.ops.random import fold, split
from maxmeg.optim.scaling import Scaler, first_scaler
from maxmeg.optim.storage import decode, divided, encode, has_remainder, orders, whole
from maxmeg.parallel.parameter import is_variable, logical_axes
from maxmeg.parallel.rules import storage_specs
from maxmeg.parallel.trainable import joined, saved, trained
from maxmeg.processes.host import host_sharding, is_on_host, to_device
from maxmeg.runtime.metrics.parameter_table import ParameterRow

CHECKPOINTS = files.CHECKPOINTS
VOCABULARY_TABLES = (
    "embedding.table",
    "output.table",
    "bert.output.bias",
)  # padded along dimension 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: how many were made. model: float32 masters, what is frozen in the compute dtype.
    optimizer: of the trained part. key: raw key of all later randomness. scaler: of the loss, with
    float16 alone. remainders: with optim.masters=remainders alone, the model then holds bfloat16
    weights (optim/storage.py). ema: with optim.ema alone, float32 averages of the trained part."""

    step: jax.Array
    model: LM
    optimizer: optax.OptState
    key: jax.Array
    scaler: Scaler | None
    remainders: LM | None = None
    ema: LM | None = None


def init_state(key: jax.Array, config: Config, optimizer) -> TrainState:
    """The state before the first step, with float32 masters; depends on the key alone, not on any
    layout."""
    model_key, later = split(key, 2)
    model = language_model(model_key, config)
    moments = optimizer.init(trained(model))
    scaler, raw = first_scaler(config), jax.random.key_data(later)
    return TrainState(jnp.int32(0), model, moments, raw, scaler)


def with_masters(state: TrainState, masters: Masters) -> TrainState:
    """A state of float32 masters, with its masters stored like this."""
    if masters is Masters.float32:
        return state
    model, remainders = divided(state.model)
    return dataclasses.replace(state, model=model, remainders=remainders)


def evaluated_model(state: TrainState, is_average: bool) -> LM:
    """Return the state's model in device memory; with is_average, with EMA weights in place of
    trained ones."""

    def placed(a: jax.Array, like: jax.Array) -> jax.Array:
        if is_on_host(a):
            place = typing.cast(NamedSharding, a.sharding)
            a = jax.device_put(a, NamedSharding(place.mesh, place.spec))
        return a.astype(like.dtype)

    model = joined(state.ema, state.model) if is_average else state.model
    return jax.tree.map(placed, model, state.model)


def on_disk(state):
    """A state, or an abstract one, as checkpoints hold it: with float32 masters. Other trees are
    as they are."""
    if not isinstance(state, TrainState) or state.remainders is None:
        return state
    model = state.model

    def widen(model, remainders):
        return whole(model, to_device(remainders))

    if isinstance(state.step, jax.ShapeDtypeStruct):
        wide = jax.eval_shape(widen, model, state.remainders)
        model = jax.tree.map(lambda w, a: w.update(sharding=a.sharding), wide, model)
    else:
        model = jax.jit(widen, out_shardings=shardings_of(model))(model, state.remainders)
    return dataclasses.replace(state, model=model, remainders=None)


def from_disk(
    state: TrainState, moments: Moments, optim: OptimConfig, abstract: TrainState
) -> TrainState:
    """Convert a restored state (float32 masters, moments stored like `moments`) to the run's
    storage formats. abstract: the run's abstract state."""
    if moments is optim.moments and optim.masters is Masters.float32:
        return state

    def convert(state: TrainState) -> TrainState:
        optimizer = to_device(state.optimizer)
        if moments is not optim.moments:
            key = fold(jax.random.wrap_key_data(state.key), state.step)
            optimizer = encode(decode(optimizer, moments), optim.moments, key, orders(state.model))
        return with_masters(dataclasses.replace(state, optimizer=optimizer), optim.masters)

    # Only the model and the moments: a checkpoint may lack any of the others, or have more.
    rest: dict[str, typing.Any] = {"scaler": None, "ema": None}
    places = dataclasses.replace(shardings_of(abstract), **rest)
    converted = jax.jit(convert, out_shardings=places)(dataclasses.replace(state, **rest))
    return dataclasses.replace(converted, **{name: getattr(state, name) for name in rest})


def abstract_state(config: Config, optimizer, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, nothing allocated."""

    def init(key: jax.Array) -> TrainState:
        state = init_state(key, config, optimizer)
        ema = trained(state.model) if config.optim.ema.decay else None
        return dataclasses.replace(with_masters(state, config.optim.masters), ema=ema)

    shapes = jax.eval_shape(init, jax.random.key(0))
    specs = storage_specs(shapes, mesh, config.parallel.zero1)

    def one(a, spec, on_host: bool):
        sharding = host_sharding(mesh, spec) if on_host else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    return jax.tree.map(one, shapes, specs, offloaded(shapes, config))


def offloaded(shapes: TrainState, config: Config):
    """Boolean tree: which arrays optim.offload keeps in host memory (the optimizer's state, and
    float32 master weights when the compute dtype has 16 bits)."""
    optim, dtype = config.optim, config.model.dtype
    has_copies = optim.masters is Masters.float32 and dtype is not DType.float32

    def one(path, node) -> bool:
        if path[0].name == "model":
            return is_variable(node) and has_copies and has_remainder(node)
        return path[0].name in ("optimizer", "remainders", "ema") and node.ndim > 0

    def each(path, node):
        return jax.tree.map(lambda _: optim.offload and one(path, node), node)

    return jax.tree_util.tree_map_with_path(each, shapes, is_leaf=is_variable)


def shardings_of(abstract):
    """The sharding of every leaf of an abstract tree."""
    return jax.tree.map(lambda a: a.sharding, abstract)


def parameter_rows(model) -> list[ParameterRow]:
    """One row per parameter of an abstract model, without the padding of a pipeline."""
    rows, orders = [], orders_of({"model": model})
    paths = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_variable)
    for path, variable in paths:
        array = variable.get_value()
        local = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        name = array_name(path)
        axes = logical_axes(variable)
        spec = tuple(larger_axes(names, array.sharding.mesh) for names in array.sharding.spec)
        shape = storage.disk_shape(array.shape, orders.get(f"model.{name}".replace(".", "/")))
        rows.append(ParameterRow(name, shape, axes, spec, local))
    return rows


def larger_axes(names, mesh: Mesh) -> tuple[str, ...] | None:
    """Those mesh axes of one dimension that have more than one device."""
    named = (names,) if isinstance(names, str) else names or ()
    return tuple(name for name in named if mesh.shape[name] > 1) or None


def to_tree(tree) -> dict:
    """The arrays of a state without its frozen base, as nested dicts: what checkpoints hold."""
    return nested(to_arrays(saved(on_disk(tree))))


def orders_of(tree) -> dict[str, tuple[int, ...]]:
    """The model's layer in each row of the arrays that a pipeline reorders, by checkpoint path.

    `tree` is a state, or a part of it by its name: {"model": its model}.
    """
    (model,) = (tree.model,) if isinstance(tree, TrainState) else tree.values()
    return storage.row_orders(to_arrays(tree), model.stack.layout)
