"""The only place inside the model that names mesh axes.

Layers see their own shard (one `shard_map`, manual over every axis). Each function here is the
identity if its axis is absent or has size 1, so the same layer runs under plain `jax.jit` on one
device. Autodiff's duality all_gather <-> psum_scatter gives Megatron-LM's f/g operators. Sums here
are never differentiated: losses have a vjp of their own.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import Offloadable, checkpoint_name

from maxmeg.config.recompute import NAMES
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.parameter import info, is_variable, replaced
from maxmeg.parallel.rules import fsdp_dim
from maxmeg.processes.host import HOST

PIPE_AXIS = "pipe"
ALWAYS = "always"  # name of the activations that every recompute policy keeps
VOCAB_AXES = ("pipe", *TENSOR_AXES)


def present(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The members of `axes` that shard_map maps and that have more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a for a in axes if a in mesh.manual_axes and mesh.shape[a] > 1)


def axis_index(axes: tuple[str, ...]) -> jax.Array | int:
    """Rank of this device within the product of `axes`, the first axis slowest."""
    index = 0
    for axis in present(axes):
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
    return index


def axis_size(axes: tuple[str, ...]) -> int:
    """Number of devices along the product of `axes`."""
    return math.prod(lax.axis_size(axis) for axis in present(axes))


def first_index(axes: tuple[str, ...], count: int) -> jax.Array | int:
    """Global index of this device's first element along a dimension that is sharded over `axes`,
    `count` elements on each device."""
    return axis_index(axes) * count


def local_part(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """This device's part along `dim` of an array that is replicated over `axes`."""
    count = x.shape[dim] // axis_size(axes)
    if count == x.shape[dim]:
        return x
    return lax.dynamic_slice_in_dim(x, first_index(axes, count), count, axis=dim)


def inside(axes: tuple[str, ...], nodes: int) -> list[list[int]] | None:
    """The devices along `axes` in `nodes` equal groups of neighbours; None: one group."""
    if nodes == 1:
        return None
    return np.arange(axis_size(axes)).reshape(nodes, -1).tolist()


def across(axes: tuple[str, ...], nodes: int) -> list[list[int]]:
    """The devices of equal places in the groups of `inside`."""
    return np.arange(axis_size(axes)).reshape(nodes, -1).T.tolist()


def gather(x: jax.Array, axes: tuple[str, ...], dim: int, groups=None) -> jax.Array:
    """All-gather along `axes`, or among each of `groups` of their devices."""
    axes = present(axes)
    if not axes:
        return x
    return lax.all_gather(x, axes, axis=dim, tiled=True, axis_index_groups=groups)


def scatter(x: jax.Array, axes: tuple[str, ...], dim: int, groups=None) -> jax.Array:
    """Reduce-scatter along `axes`, or among each of `groups` of their devices."""
    axes = present(axes)
    if not axes:
        return x
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True, axis_index_groups=groups)


def sum_over(x, axes: tuple[str, ...]):
    """Sum of a tree over mesh axes in one collective; do not differentiate it."""
    axes = present(axes)
    return lax.psum(x, axes) if axes else x


def max_over(x, axes: tuple[str, ...]):
    """Maximum of a tree over mesh axes in one collective; do not differentiate it."""
    axes = present(axes)
    return lax.pmax(x, axes) if axes else x


def permute(x, axis: str, pairs: list[tuple[int, int]]):
    """Send a tree between (source, target) ranks of one axis; ranks without a source get zeros."""
    return lax.ppermute(x, axis, pairs) if present((axis,)) else x


def exchange(
    x: jax.Array, axes: tuple[str, ...], cut: int = 0, joined: int = 0, groups=None
) -> jax.Array:
    """All-to-all: rank r receives block r of dimension `cut`; block s of the result's dimension
    `joined` comes from rank s. groups: of devices along `axes` that exchange; None: all of them."""
    axes = present(axes)
    if not axes:
        return x
    return lax.all_to_all(x, axes, cut, joined, tiled=True, axis_index_groups=groups)


def gather_sequence(x_BLD: jax.Array, sharded: bool = True) -> jax.Array:
    """The whole sequence from its shards over tensor (sequence parallelism)."""
    return gather(x_BLD, TENSOR_AXES, 1) if sharded else x_BLD


def scatter_sequence(x_BLD: jax.Array, sharded: bool = True) -> jax.Array:
    """Sum partial sums over tensor; this device keeps its shard of the sequence.

    sharded=False (decoding, a sequence of one token): every device keeps the whole sequence.
    """
    return scatter(x_BLD, TENSOR_AXES, 1) if sharded else sum_over(x_BLD, TENSOR_AXES)


def unshard_parameter(parameter) -> jax.Array:
    """The parameter gathered over fsdp along its `fsdp_dim` (ZeRO-3), unless marked as gathered.

    Its gradient is summed and scattered in its `gradient_dtype`.
    """
    value, dim = parameter[...], gathered_dim(parameter)
    about = info(parameter)
    if dim is None or about.is_gathered:
        return value
    return _summed_back(about.fsdp_axes, dim, about.gradient_dtype, 1, value)


def gather_exact(x: jax.Array, axes: tuple[str, ...], dim: int, nodes: int = 1) -> jax.Array:
    """All-gather, inside each of `nodes` groups as from `inside`, whose gradient is summed in
    float32."""
    if not present(axes):
        return x
    return _summed_back(axes, dim, jnp.dtype(jnp.float32), nodes, x)


def gathered_dim(parameter) -> int | None:
    """The dimension along which fsdp gathers a parameter; None: fsdp does not shard it."""
    mesh = jax.sharding.get_abstract_mesh()
    return fsdp_dim(parameter, mesh) if present(info(parameter).fsdp_axes) else None


def has_sharded(tree) -> bool:
    """Whether fsdp shards a variable of `tree`."""
    dims: list[int] = []
    _map_sharded(lambda node, dim: dims.append(dim), tree)
    return bool(dims)


def gather_parameters(tree):
    """`tree` with every variable gathered over fsdp. Layers need it marked by `mark_gathered`."""
    return _map_sharded(lambda node, dim: gather(node.get_value(), info(node).fsdp_axes, dim), tree)


def scatter_gradients(tree):
    """`tree` with the gradients of gathered variables summed over fsdp, each device keeping its
    shard, in their `gradient_dtype`. Other gradients stay as they are."""

    def scattered(node, dim: int) -> jax.Array:
        about = info(node)
        return scatter(node.get_value().astype(about.gradient_dtype), about.fsdp_axes, dim)

    return _map_sharded(scattered, tree)


def _map_sharded(function: Callable, tree):
    """`tree` with function(variable, sharded dimension) as the value of each variable that is
    sharded over fsdp."""

    def one(node):
        if not is_variable(node) or node.get_value() is None:
            return node
        dim = gathered_dim(node)
        if dim is None:
            return node
        return node.replace(function(node, dim))

    return jax.tree.map(one, tree, is_leaf=is_variable)


def mark_gathered(tree):
    """`tree` with its variables marked as gathered: `unshard_parameter` returns them as they
    are."""

    def one(node):
        return replaced(node, node.get_value(), is_gathered=True) if is_variable(node) else node

    return jax.tree.map(one, tree, is_leaf=is_variable)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _summed_back(
    axes: tuple[str, ...], dim: int, dtype: jnp.dtype, nodes: int, value: jax.Array
) -> jax.Array:
    """All-gather inside each of `nodes` groups; the gradient is summed and scattered in `dtype`."""
    return gather(value, axes, dim, inside(axes, nodes))


def _summed_back_forward(axes, dim, dtype, nodes, value: jax.Array):
    return gather(value, axes, dim, inside(axes, nodes)), None


def _summed_back_backward(axes, dim, dtype, nodes, _, gradient: jax.Array):
    total = scatter(gradient.astype(dtype), axes, dim, inside(axes, nodes))
    return (total.astype(gradient.dtype),)  # JAX wants that of the value


_summed_back.defvjp(_summed_back_forward, _summed_back_backward)


def local_kv_head(x: jax.Array, dim: int, num_heads: int) -> jax.Array:
    """The one key/value head of `num_heads` along `dim` that this device's query heads attend to.

    tensor is a multiple of num_heads: that many consecutive devices share a head.
    """
    size = x.shape[dim] // num_heads
    return lax.dynamic_slice_in_dim(x, kv_head_index(num_heads) * size, size, dim)


def at_kv_head(x: jax.Array, dim: int, num_heads: int) -> jax.Array:
    """The transpose of `local_kv_head`: x at its head along `dim`, zeros for the other heads."""
    size = x.shape[dim]
    shape = (*x.shape[:dim], num_heads * size, *x.shape[dim + 1 :])
    zeros = jnp.zeros(shape, x.dtype)
    return lax.dynamic_update_slice_in_dim(zeros, x, kv_head_index(num_heads) * size, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def of_shared_head(x: jax.Array, num_heads: int) -> jax.Array:
    """x [rows, ..] of a key/value head, which devices along tensor share (`local_kv_head`).

    Backward sums its gradients over these devices. Each gets the sum of some rows, and zeros for
    the others: what rounds the gradient then rounds sums, as on one device, not their terms.
    """
    return x


def _sums_of_rows(num_heads: int, _: None, slope: jax.Array) -> tuple[jax.Array]:
    part = scatter(slope, TENSOR_AXES, 0, inside(TENSOR_AXES, num_heads))
    place = axis_index(TENSOR_AXES) % (axis_size(TENSOR_AXES) // num_heads) * len(part)
    return (lax.dynamic_update_slice_in_dim(jnp.zeros_like(slope), part, place, 0),)


of_shared_head.defvjp(lambda x, num_heads: (x, None), _sums_of_rows)


def kv_head_index(num_heads: int) -> jax.Array | int:
    return axis_index(TENSOR_AXES) * num_heads // axis_size(TENSOR_AXES)


def counted_once(x: jax.Array, axes: tuple[str, ...] = TENSOR_AXES) -> jax.Array:
    """`x` on rank 0 of `axes`, zero on the others: for adding x once to partial sums."""
    rank = axis_index(axes)
    return x if isinstance(rank, int) else jnp.where(rank == 0, x, 0)


def stored(x: jax.Array, name: str) -> jax.Array:
    """x under a name of config/recompute.py: if `model.recompute` keeps that name, backward reads x
    from memory instead of recomputing it."""
    assert name in NAMES, name
    return checkpoint_name(x, name)


def stored_always(x: jax.Array) -> jax.Array:
    """x, small and of a collective or a router: backward always reads it from memory, so that the
    collective runs once, or others can run before the recomputation of what x depends on."""
    return checkpoint_name(x, ALWAYS)


def activation_name(primitive, params) -> str:
    """The name under which an equation's outputs are `stored`; empty without one."""
    if primitive.name == "dot_product_attention_fwd_wrapper":
        return "attention_output"
    return params["name"] if primitive.name == "name" else ""


def activation_names(jaxpr) -> set[str]:
    """`activation_name` of all equations, nested ones included."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(activation_name(equation.primitive, equation.params))
        for value in jax.tree.leaves([*equation.params.values()]):
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                names |= activation_names(inner)
    return names


@functools.cache
def keeps(names: frozenset[str], offloaded: frozenset[str] = frozenset()) -> Callable:
    """jax.checkpoint policy that keeps the activations `stored` under these names, those also in
    `offloaded` in pinned host memory.

    cuDNN's attention is one primitive that cannot name its outputs: it is "attention_output".
    The policy also applies inside a nested jax.checkpoint, so it must name what to keep.
    """
    to_host = Offloadable("device", HOST)

    def policy(primitive, *_, **params):
        name = activation_name(primitive, params)
        if name in offloaded:
            return to_host
        return name == ALWAYS or name in names

    return policy
