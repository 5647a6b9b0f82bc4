"""Names of the arrays of a state, and trees by name."""

import functools
import typing

import jax

# Ends of the names of arrays that are padded along dimension 0.
VOCABULARY_TABLES = ("embedding.table", "output.table", "bert.output.bias")


def array_name(path) -> str:
    """Name of an array on disk: "model.stack.groups.0.sublayers.1.norm.weight"."""
    parts = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
    inside = len(path) > 1 and parts[-1] == "value"  # nnx.Param's own attribute
    return ".".join(parts[:-1] if inside else parts)


def to_arrays(tree) -> dict[str, typing.Any]:
    """Every array of a state (or abstract state) by its name."""
    return {array_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def nested(arrays: dict) -> dict:
    """{"a.b": x} as {"a": {"b": x}}."""
    tree: dict = {}
    for name, array in arrays.items():
        *folders, last = name.split(".")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = array
    return tree


def from_tree(tree: typing.Any, like):
    """The tree of `like` with its arrays taken by name from nested dicts."""

    def take(path, _) -> jax.Array:
        names = array_name(path).split(".")
        return functools.reduce(lambda inner, part: inner[part], names, tree)

    return jax.tree_util.tree_map_with_path(take, like)
