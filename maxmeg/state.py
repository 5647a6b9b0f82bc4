"""TrainState: what a step reads and replaces; how it is initialized and sharded."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from maxmeg.config.model import DType
from maxmeg.config.schema import Config, Masters
from maxmeg.models.lm import LM, language_model
from maxmeg.ops.random import split
from maxmeg.optim.scaling import Scaler, first_scaler
from maxmeg.optim.storage import divided, has_remainder
from maxmeg.parallel.parameter import is_variable
from maxmeg.parallel.rules import storage_specs
from maxmeg.parallel.trainable import joined, trained
from maxmeg.processes.host import host_sharding, is_on_host


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
