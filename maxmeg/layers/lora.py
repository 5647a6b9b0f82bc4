"""LoRA: low-rank adapters beside frozen projections (Hu et al., 2021)."""

import dataclasses
import difflib
import fnmatch
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.ops.dropout import kept
from maxmeg.parallel.collectives import first_index, unshard_parameter
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.rules import is_state, is_variable, set_kv_heads

FIRST_PLACE = 1024  # of adapters among the uses of dropout in a layer


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """targets: patterns (fnmatch) of the paths of Linear layers, or of what they end in: "query",
    "mixers.attention.*", "mlp.up". rank 0: no adapters, and nothing frozen."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Lora(nnx.Module):
    """alpha / rank * dropout(x) A B, partial sums over tensor where the projection returns them.

    Its two matrices are sharded as the projection's input and output. A starts as in peft, B zero.
    """

    def __init__(self, a: jax.Array, b: jax.Array, axes: tuple[str, str], spec: LoraSpec, at: int):
        self.a = nnx.Param(a, axes=(axes[0], "lora"))
        self.b = nnx.Param(b, axes=("lora", axes[1]))
        self.row_parallel = axes[1] == "embed"
        self.scale, self.rate = spec.scale, spec.dropout
        self.place = FIRST_PLACE + at

    def __call__(
        self, x_BLI: Float[Array, "B L I"], ctx: Context | None
    ) -> Float[Array, "tokens O"]:
        scale = self.scale
        if self.rate and ctx is not None and ctx.training:
            x_BLI = jnp.where(self.kept(x_BLI, ctx), x_BLI, 0)
            scale /= 1 - self.rate
        low_TR = x_BLI.reshape(-1, x_BLI.shape[-1]) @ unshard_parameter(self.a)
        return (scale * low_TR) @ unshard_parameter(self.b)

    def kept(self, x_BLI: jax.Array, ctx: Context) -> jax.Array:
        """Which elements dropout keeps: by the global row, position and feature alone."""
        first = first_index(TENSOR_AXES, x_BLI.shape[-1]) if self.row_parallel else 0
        place = ctx.rows()[:, None], ctx.places(x_BLI.shape[1])
        return kept(x_BLI.shape, self.rate, ctx.key(self.place), *place, first=first)


def is_linear(node) -> bool:
    return isinstance(node, Linear)


def linears(model) -> dict[str, Linear]:
    """The projections of a model by path: "stack.groups.0.sublayers.0.mixers.attention.query"."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_linear)
    named = ((jax.tree_util.keystr(path, simple=True, separator="."), node) for path, node in nodes)
    return {name: node for name, node in named if is_linear(node)}


def adapted(key: jax.Array, model, spec: LoraSpec, dtype, orders: Sequence[Sequence[int]]):
    """The model frozen in `dtype`, with float32 adapters at the targets; itself if rank is 0.

    orders: of the layers in each group of its stack, -1 for a place without a layer. What an
    adapter starts with depends on its layer's number alone. ValueError for a target without match.
    """
    if not spec.rank:
        return model

    def freeze(node):
        value = node.get_value()
        return node.replace(value if is_state(node) else value.astype(dtype), frozen=True)

    model = jax.tree.map(freeze, model, is_leaf=is_variable)
    found = linears(model)
    chosen = targeted(list(found), spec.targets)
    for at, (path, linear) in enumerate(found.items()):
        if path not in chosen:
            continue
        axes = linear.weight.get_metadata()["axes"]
        order = np.array(orders[int(path.split(".")[2])])
        *_, width_in, width_out = linear.weight.shape
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        a = initial(own, order, (width_in, spec.rank))
        linear.lora = Lora(a, jnp.zeros((len(order), spec.rank, width_out)), axes, spec, at)
        set_kv_heads(linear.lora, linear.weight.get_metadata().get("num_kv_heads", 0))
    return model


def initial(key: jax.Array, order: np.ndarray, sizes: tuple[int, int]) -> jax.Array:
    """A of every layer: uniform, of the deviation that keeps a third of its input's."""
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(np.maximum(order, 0))
    bound = sizes[0] ** -0.5
    a = jax.vmap(lambda k: jax.random.uniform(k, sizes, minval=-bound, maxval=bound))(keys)
    return jnp.where((order >= 0)[:, None, None], a, 0)


def targeted(paths: list[str], targets: Sequence[str]) -> set[str]:
    """The paths that any target matches; ValueError where one matches none."""
    found: set[str] = set()
    for target in targets:
        matches = {
            path
            for path in paths
            if fnmatch.fnmatchcase(path, target) or fnmatch.fnmatchcase(path, f"*.{target}")
        }
        if not matches:
            endings = {".".join(path.split(".")[-n:]) for path in paths for n in (1, 2, 3)}
            near = difflib.get_close_matches(target, sorted(endings), 3, 0.5)
            raise ValueError(
                f"lora.targets: {target!r} matches no projection; near are "
                f"{', '.join(near or sorted({path.split('.')[-1] for path in paths}))}"
            )
        found |= matches
    return found


def merged_weight(weight_IO, a_IR, b_RO, scale: float):
    """W + alpha / rank A B in float32, of one layer or of stacked ones."""
    return weight_IO.astype("float32") + scale * (a_IR.astype("float32") @ b_RO.astype("float32"))


def merged(model):
    """The float32 model without adapters that computes what this one does, nothing frozen."""

    def thaw(node):
        return node.replace(node.get_value().astype(jnp.float32), frozen=False)

    model = jax.tree.map(thaw, model, is_leaf=is_variable)
    for linear in linears(model).values():
        if linear.lora is not None:
            a, b = linear.lora.a.get_value(), linear.lora.b.get_value()
            weight = merged_weight(linear.weight.get_value(), a, b, linear.lora.scale)
            linear.weight.set_value(weight)
            linear.lora = nnx.data(None)
    return model
