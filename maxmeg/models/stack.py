"""The residual stack: a pattern ((unit, repeats), ...) of sublayers, run by lax.scan."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from maxmeg.config.recompute import kept_names, offloaded_names
from maxmeg.layers.context import Context
from maxmeg.layers.mixer import MixerSpec
from maxmeg.layers.residual import Residual, ResidualSpec
from maxmeg.layers.stream import Stream
from maxmeg.ops.cache import CacheSize
from maxmeg.ops.random import fold, split
from maxmeg.parallel.collectives import keeps
from maxmeg.parallel.ordering import together
from maxmeg.parallel.trainable import fixed, joined, trained
from maxmeg.pipeline.layout import Layout, arrange

UnitSpec = tuple[ResidualSpec, ...]
Pattern = tuple[tuple[UnitSpec, int], ...]


class Unit(nnx.Module):
    """A sequence of sublayers, which the pattern repeats."""

    def __init__(self, key: jax.Array, spec: UnitSpec):
        keys = split(key, len(spec))
        self.sublayers = nnx.List([Residual(k, s) for k, s in zip(keys, spec, strict=True)])

    def __call__(
        self, x: Stream, ctx: Context, cache: list | None = None
    ) -> tuple[Stream, list | None, list]:
        """(output, new caches per sublayer, auxiliary values per sublayer)."""
        caches, auxes, sublayers = [], [], list(self.sublayers)
        for i, number in enumerate([s.spec.after_gradients for s in sublayers]):
            layer = slice(i, i + number)
            sublayers[layer], x = gradients_first(sublayers[layer], x)
            sublayer, sublayer_ctx = sublayers[i], dataclasses.replace(ctx, sublayer=i)
            sublayer_cache = None if cache is None else cache[i]
            x, new_cache, values = sublayer(x, sublayer_ctx, sublayer_cache)
            caches.append(new_cache)
            auxes.append(values)
        return x, None if cache is None else caches, auxes

    def init_cache(self, size: CacheSize) -> list:
        """An empty cache of each sublayer."""
        return [sublayer.init_cache(size) for sublayer in self.sublayers]

    def update(self, aux: list) -> None:
        """Set the state of the sublayers from the auxiliary values of a whole step."""
        for sublayer, mixers in zip(self.sublayers, aux, strict=True):
            for name, values in mixers.items():
                sublayer.mixers[name].update(values)


def gradients_first(sublayers: list[Residual], x: Stream) -> tuple[list[Residual], Stream]:
    """Return `sublayers` and their input x. Backward computes the gradients of their weights before
    it uses the gradient of x. XLA would compute them last, and keep what they read until then."""
    if not sublayers:
        return sublayers, x
    weights, x = _gradients_first(trained(sublayers), x)
    return joined(weights, fixed(sublayers)), x


@jax.custom_vjp
def _gradients_first(weights, x):
    return weights, x


_gradients_first.defvjp(lambda *values: (values, None), lambda _, gradients: together(gradients))


def first_sublayer(unit: Unit) -> tuple[Unit, Unit]:
    """(the unit with the arrays of its first sublayer alone, with the others alone)."""

    def keep(first: bool):
        def one(path, array):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return array if name.startswith("sublayers/0/") == first else None

        return jax.tree_util.tree_map_with_path(one, unit)

    return keep(True), keep(False)


def make_group(key: jax.Array, spec: UnitSpec, repeats: int, order: np.ndarray) -> Unit:
    """Units stacked in `order`, -1: zeros. Weights depend on the layer's number only."""
    units = jax.vmap(lambda layer: Unit(fold(key, layer), spec))(np.maximum(order, 0))
    if (order >= 0).all():
        return units

    def clear(stacked):
        exists = (order >= 0).reshape(-1, *(1,) * (stacked.ndim - 1))
        return jnp.where(exists, stacked, 0)

    return jax.tree.map(clear, units)


class Stack(nnx.Module):
    """`groups[i]` holds the parameters of all repeats of a unit, stacked on dimension 0.

    They are in model order or, with a `layout`, in the order of the pipeline's places; places
    without a layer are zero. recompute: as in ModelConfig. unroll: repeats of a unit per iteration
    of the loop over them; 0: no loop. unquantized: groups that train.quantization leaves in the
    compute dtype.
    """

    unquantized: frozenset[int] = frozenset()

    def __init__(
        self,
        key: jax.Array,
        pattern: Pattern,
        recompute: str = "minimal",
        layout: Layout | None = None,
        unroll: int = 1,
    ):
        self.unroll = unroll
        self.repeats = tuple(repeats for _, repeats in pattern)
        self.saved_names, self.offloaded = kept_names(recompute), offloaded_names(recompute)
        self.layout = layout or arrange(self.repeats, 1, (sum(self.repeats),))
        rows = zip(split(key, len(pattern)), pattern, self.layout.orders, strict=True)
        self.groups = nnx.List([make_group(k, *unit, np.array(order)) for k, unit, order in rows])

    def __call__(
        self, x: Stream, ctx: Context, cache: list | None = None
    ) -> tuple[Stream, list | None, list]:
        """(output, new caches of the groups, auxiliary values stacked over each group's repeats).

        Only without a pipeline.
        """
        assert self.layout.trivial and self.layout.stages == 1
        ctx = self.with_tables(ctx, x["target"].dtype)

        def body(looped, carry, layer):
            (x, group_cache), (unit, index, repeat) = carry, layer
            if group_cache is None:
                x, aux = self.run_unit(unit, x, ctx, index, prevent_cse=not looped)
                return (x, None), aux
            assert ctx.cache_places is not None
            places = dataclasses.replace(ctx.cache_places, layer=repeat)
            unit_ctx = dataclasses.replace(ctx, layer=index, cache_places=places)
            x, group_cache, aux = unit(x, unit_ctx, group_cache)
            return (x, group_cache), aux

        first, caches, auxes = 0, [], []
        for i, (group, repeats) in enumerate(zip(self.groups, self.repeats, strict=True)):
            numbers = jnp.arange(repeats)
            carry = x, None if cache is None else cache[i]
            layers = (group, first + numbers, numbers)
            (x, new_cache), aux = scan_layers(body, carry, layers, self.unroll or repeats)
            caches.append(new_cache)
            auxes.append(aux)
            first += repeats
        return x, None if cache is None else caches, auxes

    @property
    def mixers(self) -> list[MixerSpec]:
        sublayers = [sublayer for group in self.groups for sublayer in group.sublayers]
        return [mixer for sublayer in sublayers for mixer in sublayer.spec.mixers]

    def stream(self, x_BLD: jax.Array, ctx: Context) -> Stream:
        """Arrays that layers read and write beside x; partial sums over pipe, as x."""
        arrays = [mixer.stream(x_BLD, ctx) for mixer in self.mixers]
        return {name: array for one in arrays for name, array in one.items()}

    def with_tables(self, ctx: Context, dtype: jax.typing.DTypeLike) -> Context:
        """`ctx` with the tables that any layer reads: loops over layers compute none. dtype: of
        activations."""
        makers = [mixer.tables(dtype) for mixer in self.mixers]
        return ctx.with_tables({key: make for one in makers for key, make in one.items()})

    def run_unit(self, unit: Unit, x: Stream, ctx: Context, layer, *, prevent_cse: bool):
        """(output, auxiliary values) of one unit as layer `layer` of the model. Backward reads the
        activations of `saved_names` and recomputes the others.

        prevent_cse: True if forward and backward of the unit are in the same computation, as
        without a loop: else XLA merges the recomputation with forward, and stores everything.
        False if loops or a pipeline's ring buffer separate them: the barrier would prevent fusion.
        """

        def run(unit, x, layer):
            x, _, aux = unit(x, dataclasses.replace(ctx, layer=layer))
            return x, lax.stop_gradient(aux)

        policy = keeps(self.saved_names, self.offloaded)
        return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(unit, x, layer)

    def aux_of(self, aux: list) -> list:
        """Put the auxiliary values of a whole step, stacked in model order for each group, in the
        order of the group's rows. Places without a layer get zeros."""

        def placed(order: tuple[int, ...], values):
            rows = np.array([n if n >= 0 else len(order) for n in order])
            take = functools.partial(jnp.take, indices=rows, axis=0, mode="fill", fill_value=0)
            return jax.tree.map(take, values)

        return [placed(*pair) for pair in zip(self.layout.orders, aux, strict=True)]

    def init_cache(self, size: CacheSize) -> list:
        """An empty cache of each group, for all its repeats (ops/cache.py)."""
        return [jax.vmap(lambda unit: unit.init_cache(size))(group) for group in self.groups]


def scan_layers(body, carry, layers, unroll: int):
    """lax.scan of body(looped, carry, layer) over stacked layers, `unroll` layers per iteration.

    Layers that do not fill an iteration run after the loop. There is no loop if it would have one
    iteration: XLA inlines it.
    """
    length = jax.tree.leaves(layers)[0].shape[0]
    looped = length - length % unroll if length >= 2 * unroll else 0
    outputs = []
    if looped:
        part = jax.tree.map(lambda leaf: leaf[:looped], layers)
        carry, out = lax.scan(functools.partial(body, True), carry, part, unroll=unroll)
        outputs.append(out)
    for i in range(looped, length):
        carry, out = body(False, carry, jax.tree.map(lambda leaf, i=i: leaf[i], layers))
        outputs.append(jax.tree.map(lambda leaf: leaf[None], out))
    return carry, jax.tree.map(lambda *outs: jnp.concatenate(outs), *outputs)
