"""The optimizer's update of a state.

With `optim.offload`, float32 masters or their remainders, moments and averages are stored in pinned
host memory. A loop over the layers of each stack copies the arrays of one layer to the device,
updates them, and writes them back in place; with Muon and SOAP those of as many layers as give each
device a matrix. Parameters outside of stacks are updated together. The update of SOAP, of which all
layers' whole matrices would take as much memory as its state, is always in this loop.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from maxmeg.config.schema import OptimConfig, Optimizer
from maxmeg.layers.auxiliary import choose
from maxmeg.optim.storage import STACKED, divided, merged, orders
from maxmeg.parallel.ordering import never
from maxmeg.parallel.parameter import is_variable
from maxmeg.parallel.trainable import fixed, joined, part, trained
from maxmeg.processes.host import is_on_host, to_device, to_memory_of

IN_LOOP = (Optimizer.soap,)


class Parts(typing.NamedTuple):
    """What an update reads and replaces. model: the model without the frozen base of adapters; its
    trained part is float32 masters, or bfloat16 weights with remainders. remainders: None, or as in
    optim/storage.py. moments: the state of the optimizer. ema: None, or averages."""

    model: typing.Any
    remainders: typing.Any
    moments: typing.Any
    ema: typing.Any


def update(
    optimize: Callable,
    optim: OptimConfig,
    gradients,
    old: Parts,
    aux: list,
    finite: jax.Array,
    mesh: Mesh,
    step: jax.Array,
) -> Parts:
    """Run the optimizer on the trained part of the model, update the state of its layers, and
    average its weights. Returns `old` if the step is not `finite`.

    optimize(gradients, moments, masters) -> (updates, moments): the optimizer's update. aux:
    auxiliary values of the layers as LM.update takes them. step: number of steps before this one.
    """
    # An average that began with the first weights forgets them soon.
    decay = jnp.minimum(optim.ema.decay, (1 + step) / (10 + step))
    run = functools.partial(apply, optimize, decay)
    run = functools.partial(store, finite, run)
    if not optim.offload and optim.optimizer not in IN_LOOP:
        return run(gradients, old, aux)
    stages, layouts, new = mesh.shape["pipe"], orders(old.model), old
    has_whole = optim.optimizer in (Optimizer.muon, Optimizer.soap)  # distributed/whole_matrices.py
    most = mesh.size // stages if has_whole else 1
    for group in groups_of(old.model):
        layers, slices, place = {}, Slices(0), len(aux) - 1
        if group is not None:
            layers, place = {group: jnp.array(layouts[group])}, group
            number = len(layouts[group]) // stages
            sizes = [n for n in range(1, number + 1) if number % n == 0 and n <= most]
            slices = Slices(stages, sizes[-1])
        values = [one if i == place else None for i, one in enumerate(aux)]
        parts = Parts(*[select(group, tree) for tree in old])
        result = in_loop(run, slices, select(group, gradients), parts, values, layers)
        new = joined(result, new)
    return new


def on_device(model, dtype, mesh: Mesh):
    """The model with the masters that are in host memory copied to the device in `dtype`, one layer
    of each pipeline stage at a time."""
    masters = part(model, lambda v: v.get_value() is not None and is_on_host(v[...]), others=False)
    for group in groups_of(masters):
        slices = Slices(0 if group is None else mesh.shape["pipe"])
        arrays = slices.split(select(group, masters))
        copies = jax.tree.map(lambda a: jnp.zeros(a.shape, dtype), arrays)

        def body(i, copies, slices=slices, arrays=arrays):
            layer = jax.tree.map(lambda a: a.astype(dtype), to_device(slices.take(arrays, i)))
            return slices.put(copies, layer, i)

        copies = lax.fori_loop(0, slices.count(arrays), body, copies)
        model = joined(slices.merge(copies), model)
    return model


def apply(optimize: Callable, decay: jax.Array, gradients, old: Parts, aux: list, **rows) -> Parts:
    """Update arrays in device memory; returns float32 masters without remainders."""
    masters = merged(trained(old.model), old.remainders)
    updates, moments = optimize(gradients, old.moments, masters, **rows)
    model = joined(jax.tree.map(jnp.add, masters, updates), fixed(old.model))
    model.update(aux)
    return Parts(model, None, moments, averaged(old.ema, trained(model), decay))


@jax.named_scope("average")
def averaged(ema, weights, decay: jax.Array):
    """Return the EMA weights after a step, or None without EMA."""
    return ema and jax.tree.map(lambda a, w: decay * a + (1 - decay) * w, ema, weights)


def store(finite: jax.Array, run: Callable, gradients, old: Parts, aux: list, **rows) -> Parts:
    """Call `run` and return its result in the form of `old`, or `old` if the step is not finite."""
    new = run(gradients, old, aux, **rows)
    if old.remainders is not None:
        model, remainders = divided(new.model)
        new = new._replace(model=model, remainders=remainders)
    # Selecting a group drops block_size from the scales of the others: restore the structure.
    moments = jax.tree.unflatten(jax.tree.structure(old.moments), jax.tree.leaves(new.moments))
    return choose(finite, new._replace(moments=moments), old)


@dataclasses.dataclass(frozen=True)
class Slices:
    """Slices of arrays that stack layers: `size` layers of each of `stages` pipeline stages.
    stages 0: of arrays that are not stacked, all."""

    stages: int
    size: int = 1

    def split(self, tree):
        """Arrays [stages, layers of a stage, ...] for the other methods."""
        shape = (self.stages, -1)
        return jax.tree.map(
            lambda a: a.reshape(*shape, *a.shape[1:]) if self.stages else a[None, None], tree
        )

    def merge(self, tree):
        """The inverse of `split`."""
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]) if self.stages else a[0, 0], tree)

    def count(self, tree) -> int:
        return jax.tree.leaves(tree)[0].shape[1] // self.size

    def take(self, tree, i):
        start = i * self.size
        return self.merge(
            jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, self.size, 1), tree)
        )

    def put(self, tree, slices, i):
        def one(a, new):
            return lax.dynamic_update_slice_in_dim(a, new, i * self.size, 1)

        return jax.tree.map(one, tree, self.split(slices))


def in_loop(
    run: Callable, slices: Slices, gradients, old: Parts, aux: list, layers: dict[int, jax.Array]
) -> Parts:
    """Apply `run` to slices of one group's arrays. layers: {group number: layer number of each
    row}; empty outside of stacks."""
    arrays, scalars = variables_of(old), without_variables(old)
    arrays, gradients, aux, layers = slices.split((arrays, gradients, aux, layers))

    def body(i, state):
        arrays, _ = state
        parts = joined(to_device(slices.take(arrays, i)), scalars)
        slopes, values, places = slices.take((gradients, aux, layers), i)
        new = run(slopes, parts, values, layers=places)
        rows = to_memory_of(variables_of(new), arrays)
        return slices.put(arrays, rows, i), without_variables(new)

    # Hide the number of iterations from XLA: it would inline a loop of one iteration, and copy its
    # arrays from the host before other loops run.
    length = slices.count(arrays) + never(jax.tree.leaves(gradients)[0])
    arrays, scalars = lax.fori_loop(0, length, body, (arrays, scalars))
    return joined(slices.merge(arrays), scalars)


def groups_of(weights) -> list[int | None]:
    """The groups of stacked layers, and None if there are other parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_variable)
    groups = [group_of(path) for path, variable in leaves if variable.get_value() is not None]
    return [*dict.fromkeys(groups)]


def group_of(path) -> int | None:
    """The group of stacked layers that a parameter, or its part of an optimizer's state, belongs
    to."""
    group = STACKED.search(jax.tree_util.keystr(path, simple=True, separator="."))
    return int(group[1]) if group else None


def select(group: int | None, tree):
    """Keep the variables of one group and all arrays outside of variables."""

    def one(path, node):
        is_other = is_variable(node) and group_of(path) != group
        return node.replace(None) if is_other else node

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_variable)


def variables_of(tree):
    return part(tree, lambda _: True, others=False)


def without_variables(tree):
    return part(tree, lambda _: False, others=True)
