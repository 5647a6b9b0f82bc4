"""Initialize a model whose layers are in other groups than those of the checkpoint.

Groups are units of equal layers that repeat (`ModelConfig.groups`), each with stacked arrays of its
own. They depend on model.first_layers_bf16 and last_layers_bf16, which a run may change.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.config.layers import places
from maxmeg.config.model import ModelConfig
from maxmeg.pipeline.layout import Layout

Rows = list[tuple[int, int] | None]  # layer and sublayer of each row; None: padding
Read = Callable[[str, jax.ShapeDtypeStruct], jax.Array]  # reads an array of the checkpoint
STACKED = re.compile(r"^model\.stack\.groups\.(\d+)\.sublayers\.(\d+)\.(.*)$")


@dataclasses.dataclass(frozen=True)
class Regrouping:
    """Reads the layers of the model `saved` into the groups of `new`, in `layout`'s order.

    If `new` is a biencoder with two encoders and `saved` has one, each reads all its layers.
    """

    saved: ModelConfig
    new: ModelConfig
    layout: Layout
    read: Read

    def take(self, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Return an array of the new model with the shape, dtype and sharding of `like`; padding
        is zero."""
        if not (match := STACKED.match(name)):
            return self.read(name, like)
        group, sublayer, rest = int(match[1]), int(match[2]), match[3]
        kinds = self.new.layer_kinds
        layers = [
            (layer, sublayer - place.sublayer)
            for layer, place in enumerate(places(self.new.groups))
            if place.group == group and 0 <= sublayer - place.sublayer < len(kinds[layer])
        ]
        rows = [layers[n] if n >= 0 else None for n in self.layout.orders[group]]
        return self.convert(name, rows, rest, like).astype(like.dtype)

    def convert(self, name: str, rows: Rows, rest: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        return self.stacked(rows, rest, like.shape, like.sharding)

    def stacked(self, rows: Rows, rest: str, shape, sharding) -> jax.Array:
        """Stack the saved model's arrays of these layers and sublayers; None gives zeros."""
        saved, counts = places(self.saved.groups), [count for _, count in self.saved.groups]
        arrays: dict[str, jax.Array] = {}
        picked: list[tuple[str, int] | None] = []
        for row in rows:
            if row is None:
                picked.append(None)
                continue
            layer, at = row
            place = saved[layer % len(saved)]
            at += place.sublayer
            name = f"model.stack.groups.{place.group}.sublayers.{at}.{rest}"
            if name not in arrays:
                stored = (counts[place.group], *shape[1:])
                spec = P(None, *sharding.spec[1:])
                local = NamedSharding(sharding.mesh, spec)
                arrays[name] = self.read(
                    name, jax.ShapeDtypeStruct(stored, jnp.float32, sharding=local)
                )
            picked.append((name, place.repeat))

        def stack(arrays):
            zeros = jnp.zeros(shape[1:], jnp.float32)
            return jnp.stack([arrays[pick[0]][pick[1]] if pick else zeros for pick in picked])

        return jax.jit(stack, out_shardings=sharding)(arrays)
