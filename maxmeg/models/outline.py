"""What print(model) shows: one line for each array, with its shape and its logical axes."""

import math
import typing

import jax
from flax import nnx

from maxmeg.parallel.parameter import info, is_variable

LAST = ("final_norm", "output", "mtp", "classifier")  # parts that read the stack's output


def outline(model: nnx.Module, vocab_size: int) -> str:
    """Lines of (name, shape, dtype, logical axes); layers that repeat are shown once.

    The first line counts parameters, without rows that pad the vocabulary.
    """
    lines, group, count = [], "", 0
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_variable)
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves
    ]
    for name, leaf in sorted(named, key=lambda pair: pair[0].startswith(LAST)):
        shape, axes = leaf.shape, axes_of(leaf)
        if axes[0] == "vocab":
            shape = (min(vocab_size, shape[0]), *shape[1:])
        count += math.prod(shape)
        prefix, _, inner = name.partition(".sublayers.")
        if inner and prefix != group:
            lines.append(f"  {prefix}: {shape[0]} x")
        group = prefix if inner else ""
        if inner:
            name, shape = f"  {inner.replace('.mixers', '')}", shape[len(shape) - len(axes) :]
        size = " x ".join(map(str, shape))
        lines.append(f"  {name:<44} {size:<22} {leaf.dtype!s:<9} {', '.join(axes)}".rstrip())
    return "\n".join([f"{type(model).__name__}: {count:,} parameters", *lines])


def axes_of(leaf: typing.Any) -> tuple[str, ...]:
    """The logical axes of an array of one layer; "-": an axis that is never sharded."""
    axes = info(leaf).axes if is_variable(leaf) else ("-",) * leaf.ndim
    return tuple(axis or "-" for axis in axes)
