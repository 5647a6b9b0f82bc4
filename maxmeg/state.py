"""TrainState: what a step reads and replaces; how it is made, sharded and named on disk."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from maxmeg.config.schema import Config
from maxmeg.models.lm import LM
from maxmeg.parallel.rules import storage_specs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: how many were made. model: float32 masters. key: raw key of all later randomness."""

    step: jax.Array
    model: LM
    optimizer: optax.OptState
    key: jax.Array


def init_state(key: jax.Array, config: Config, optimizer, tensor: int) -> TrainState:
    """The state before the first step; depends on the key alone, not on any layout."""
    model_key, later = jax.random.split(key)
    model = LM(model_key, config.model, tensor)
    return TrainState(jnp.int32(0), model, optimizer.init(model), jax.random.key_data(later))


def abstract_state(config: Config, optimizer, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, nothing allocated."""
    shapes = jax.eval_shape(
        lambda key: init_state(key, config, optimizer, mesh.shape["tensor"]), jax.random.key(0)
    )
    specs = storage_specs(shapes, mesh, config.parallel.zero1)
    return jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )


def shardings_of(abstract):
    """The sharding of every leaf of an abstract tree."""
    return jax.tree.map(lambda a: a.sharding, abstract)


def create_state(config: Config, optimizer, abstract: TrainState, mesh: Mesh) -> TrainState:
    """init_state, made in place on the mesh."""

    def init(key):
        return init_state(key, config, optimizer, mesh.shape["tensor"])

    return jax.jit(init, out_shardings=shardings_of(abstract))(jax.random.key(config.seed))


def array_name(path) -> str:
    """Name of an array on disk: "model.stack.groups.0.sublayers.1.norm.weight"."""
    parts = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
    return ".".join(parts[:-1] if parts[-1] == "value" else parts)  # nnx.Param's own attribute


def to_arrays(tree) -> dict[str, jax.Array]:
    """Every array of a state (or abstract state) by its name."""
    return {array_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def from_arrays(arrays: dict[str, jax.Array], like):
    """The tree of `like` with its arrays taken by name."""
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[array_name(path)], like)


def vocabulary_dims(abstract: TrainState) -> dict[str, int]:
    """The arrays whose padded vocabulary may differ between layouts, and which dimension it is."""
    names = to_arrays(abstract)
    tables = ("embedding.table", "output.table")
    return {name: 0 for name in names if name.endswith(tables)}
