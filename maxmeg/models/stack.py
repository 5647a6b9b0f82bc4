"""The residual stack: a pattern ((unit, repeats), ...) of sublayers, run by scans."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.layers.residual import Residual, ResidualSpec
from maxmeg.parallel.collectives import stores, stores_attention

UnitSpec = tuple[ResidualSpec, ...]
Pattern = tuple[tuple[UnitSpec, int], ...]


POLICIES = {"none": stores_attention, "selective": stores, "full": None}


class Unit(nnx.Module):
    """Sublayers one after the other; the thing that repeats."""

    def __init__(self, key: jax.Array, spec: UnitSpec):
        keys = jax.random.split(key, len(spec))
        made = [Residual(k, s, i) for i, (k, s) in enumerate(zip(keys, spec, strict=True))]
        self.sublayers = nnx.List(made)

    def __call__(
        self, x_BLD: Float[Array, "B L D"], ctx: Context, cache: list | None = None
    ) -> tuple[Float[Array, "B L D"], list | None, dict]:
        caches, aux = [], {}
        for i, sublayer in enumerate(self.sublayers):
            x_BLD, new, values = sublayer(x_BLD, ctx, None if cache is None else cache[i])
            caches.append(new)
            aux |= values
        return x_BLD, None if cache is None else caches, aux


class Stack(nnx.Module):
    """`groups[i]` holds the parameters of all repeats of a unit, stacked on dimension 0.

    recompute: "none" keeps the results of matrix products and attention, "selective" those of
    matrix products, "full" only the units' inputs.
    """

    def __init__(self, key: jax.Array, pattern: Pattern, recompute: str = "none"):
        self.repeats = tuple(repeats for _, repeats in pattern)
        self.recompute = recompute
        keys = jax.random.split(key, len(pattern))
        self.groups = nnx.List(
            [
                jax.vmap(lambda k, spec=spec: Unit(k, spec))(jax.random.split(group_key, repeats))
                for group_key, (spec, repeats) in zip(keys, pattern, strict=True)
            ]
        )

    def __call__(
        self, x_BLD: Float[Array, "B L D"], ctx: Context, cache: list | None = None
    ) -> tuple[Float[Array, "B L D"], list | None, list]:
        """Output, new caches and auxiliary values, both stacked over the repeats of each group."""
        policy = POLICIES[self.recompute]

        def body(x_BLD, layer):
            unit, index, unit_cache = layer
            here = dataclasses.replace(ctx, layer=index)
            x_BLD, new_cache, aux = unit(x_BLD, here, unit_cache)
            return x_BLD, (new_cache, aux)

        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
        first, caches, auxes = 0, [], []
        for i, (group, repeats) in enumerate(zip(self.groups, self.repeats, strict=True)):
            indices = first + jnp.arange(repeats)
            part = None if cache is None else cache[i]
            x_BLD, (new_cache, aux) = lax.scan(body, x_BLD, (group, indices, part))
            caches.append(new_cache)
            auxes.append(aux)
            first += repeats
        return x_BLD, None if cache is None else caches, auxes

    def init_cache(self, batch: int, length: int) -> list:
        """Empty caches, stacked over the repeats of each group."""

        def unit_cache(unit):
            return [sublayer.init_cache(batch, length) for sublayer in unit.sublayers]

        return [jax.vmap(unit_cache)(group) for group in self.groups]
