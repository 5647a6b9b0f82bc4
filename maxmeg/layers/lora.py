"""LoRA: low-rank adapters beside frozen projections (Hu et al., 2021)."""

import difflib
import fnmatch
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.config.schema import LoraConfig
from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.ops.dropout import dropout_mask
from maxmeg.ops.random import fold, uniform
from maxmeg.parallel.collectives import first_index, unshard_parameter
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.parameter import annotate, info, is_variable, parameter, replaced

FIRST_PLACE = 1024  # of adapters among the uses of randomness in a layer


class Lora(nnx.Module):
    """alpha / rank * dropout(x) A B; partial sums over tensor if the projection's output is.

    A and B are sharded like the projection's input and output. A is initialized as in peft, B zero.
    owners: of each column of A and row of B, the number of the adapter that it belongs to, if there
    are several; a row of the batch then uses those of its own (`Context.adapters_B`).
    """

    def __init__(
        self,
        a: jax.Array | np.ndarray,
        b: jax.Array | np.ndarray,
        axes: Sequence[str | None],
        config: LoraConfig,
        number: int,
        owners: tuple[int, ...] = (),
    ):
        self.a = parameter(a, axes[0], "lora")
        self.b = parameter(b, "lora", axes[1])
        self.row_parallel = axes[1] == "embed"
        self.scale, self.rate = config.alpha / config.rank, config.dropout
        self.place = FIRST_PLACE + number
        self.owners = owners

    def __call__(
        self, x_BLI: Float[Array, "B L I"], ctx: Context | None
    ) -> Float[Array, "tokens O"]:
        scale = self.scale
        if self.rate and ctx is not None and ctx.training:
            x_BLI = jnp.where(self.dropout_mask(x_BLI, ctx), x_BLI, 0)
            scale /= 1 - self.rate
        low_TR = x_BLI.reshape(-1, x_BLI.shape[-1]) @ unshard_parameter(self.a)
        low_BLR = self.chosen(low_TR.reshape(*x_BLI.shape[:-1], -1), ctx)
        return (scale * low_BLR.reshape(low_TR.shape)) @ unshard_parameter(self.b)

    def chosen(
        self, low_BLR: Float[Array, "B L *H R"], ctx: Context | None
    ) -> Float[Array, "B L *H R"]:
        """x A with zeros in place of adapters that are not the row's."""
        if not self.owners:
            return low_BLR
        assert ctx is not None and ctx.adapters_B is not None
        is_own_BR = ctx.adapters_B[:, None] == np.array(self.owners)
        is_own_BR = jnp.expand_dims(is_own_BR, range(1, low_BLR.ndim - 1))
        return jnp.where(is_own_BR, low_BLR, 0)

    def dropout_mask(self, x_BLI: jax.Array, ctx: Context) -> jax.Array:
        """Mask of the elements that dropout keeps; it does not depend on the layout."""
        first = first_index(TENSOR_AXES, x_BLI.shape[-1]) if self.row_parallel else 0
        place = ctx.rows()[:, None], ctx.places(x_BLI.shape[1])
        return dropout_mask(x_BLI.shape, self.rate, ctx.key(self.place), *place, first=first)


def is_linear(node) -> bool:
    return isinstance(node, Linear)


def linears(model, prefix: str = "") -> dict[str, Linear]:
    """The projections of a model by path, such as stack.groups.0.sublayers.0.mixers.mlp.up."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_linear)
    named = ((jax.tree_util.keystr(path, simple=True, separator="."), node) for path, node in nodes)
    return {prefix + name: node for name, node in named if is_linear(node)}


def adapted(key: jax.Array, model, config: LoraConfig, dtype, orders: Sequence[Sequence[int]]):
    """The model frozen in `dtype` but for its classifier, with float32 adapters at the targets.

    orders: layer numbers of each group of the stack, -1 for a place without a layer. Initial
    weights depend on the layer's number only. ValueError for a target that matches nothing.
    """

    def freeze(node):
        value = node.get_value()
        return replaced(node, value if info(node).is_exact else value.astype(dtype), frozen=True)

    classifier, model.classifier = model.classifier, None
    model = jax.tree.map(freeze, model, is_leaf=is_variable)
    projections = linears(model.stack, "stack.")
    model.classifier = classifier
    chosen = targeted(list(projections), config.targets)
    for number, (path, linear) in enumerate(projections.items()):
        if path not in chosen:
            continue
        about = info(linear.weight)
        order = np.array(orders[int(path.split(".")[2])])
        *_, width_in, width_out = linear.weight.shape
        path_key = fold(key, zlib.crc32(path.encode()))
        a = initial(path_key, order, (width_in, config.rank))
        b = jnp.zeros((len(order), config.rank, width_out))
        linear.lora = Lora(a, b, about.axes, config, number)
        annotate(linear.lora, num_kv_heads=about.num_kv_heads)
    return model


def initial(key: jax.Array, order: np.ndarray, sizes: tuple[int, int]) -> jax.Array:
    """A of every layer, uniform with variance 1 / (3 * input size)."""
    bound = sizes[0] ** -0.5
    draw = jax.vmap(lambda layer: bound * uniform(fold(key, layer), sizes))
    a = draw(np.maximum(order, 0))
    return jnp.where((order >= 0)[:, None, None], a, 0)


def targeted(paths: list[str], targets: Sequence[str]) -> set[str]:
    """The paths that match any target, or whose suffixes do, by fnmatch: "query", "mlp.up",
    "mixers.attention.*". ValueError for a target that matches none."""
    chosen: set[str] = set()
    for target in targets:
        matches = {
            path
            for path in paths
            if fnmatch.fnmatchcase(path, target) or fnmatch.fnmatchcase(path, f"*.{target}")
        }
        if not matches:
            endings = {".".join(path.split(".")[-n:]) for path in paths for n in (1, 2, 3)}
            suggestions = difflib.get_close_matches(target, sorted(endings), 3, 0.5)
            raise ValueError(
                f"lora.targets: {target!r} matches no projection; did you mean "
                f"{', '.join(suggestions or sorted({path.split('.')[-1] for path in paths}))}?"
            )
        chosen |= matches
    return chosen
