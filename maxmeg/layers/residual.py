"""A residual sublayer: x + dropout(post_norm(mixers(norm(x)))), either norm optional; or
post_norm(x + dropout(mixers(x)))."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.layers.mixer import STREAM, MixerSpec
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.layers.stream import Side, Stream, side_context
from maxmeg.ops.cache import CacheSize
from maxmeg.ops.dropout import dropout
from maxmeg.ops.random import split
from maxmeg.parallel import collectives
from maxmeg.parallel.parameter import state

DROPOUT_PLACE = 1


@dataclasses.dataclass(frozen=True)
class ResidualSpec:
    """Mixers whose outputs are summed; two mixers are a parallel block.

    place: of the norms: "pre" before the mixers, "post" after their sum, "sandwich" both,
    "post_residual" after the residual sum.
    own_norms: each mixer has its own norm before it. scales: factors of the mixers' outputs.
    after_gradients: if n > 0, backward computes the weight gradients of n sublayers, from this one
    on, before it goes on to the one before. side: the array of the residual stream that it reads
    and replaces. adds: whether the output is added to the input, or takes its place.
    has_scale: multiply the sum by a number that is not trained, state of the model (Gemma 4).
    """

    norm: NormSpec
    mixers: tuple[MixerSpec, ...]
    dropout: float = 0.0
    place: str = "pre"
    own_norms: bool = False
    scales: tuple[float, ...] = ()
    after_gradients: int = 0
    side: Side = "target"
    adds: bool = True
    has_scale: bool = False


class Residual(nnx.Module):
    """The residual stream is sharded over tensor along the sequence. Inputs of mixers are gathered
    and their outputs are reduce-scattered, unless their specs say "shard"."""

    def __init__(self, key: jax.Array, spec: ResidualSpec):
        self.spec = spec
        keys = split(key, len(spec.mixers))
        mixers, norms = {}, {}
        for mixer_key, mixer in zip(keys, spec.mixers, strict=True):
            mixers[mixer.name] = mixer.make(mixer_key)
            norms[mixer.name] = Norm(mixer.hidden_size, spec.norm)
        width, place = spec.mixers[0].hidden_size, spec.place if spec.adds else "none"
        has_pre_norm = place in ("pre", "sandwich")
        self.norm = Norm(width, spec.norm) if has_pre_norm and not spec.own_norms else None
        self.norms = nnx.Dict(norms) if has_pre_norm and spec.own_norms else None
        self.post_norm = Norm(width, spec.norm) if place not in ("pre", "none") else None
        self.mixers = nnx.Dict(mixers)
        self.scale = state(jnp.ones(1), None) if spec.has_scale else None

    def __call__(
        self, x: Stream, ctx: Context, cache: dict | None = None
    ) -> tuple[Stream, dict | None, dict]:
        """(output, new caches by mixer name, auxiliary values by mixer name)."""
        side = self.spec.side
        if not x[side].size:  # decoding: the cache has what is read of the source
            return x, cache, {}
        ctx = side_context(x, ctx, side, self.spec.mixers[0])
        names = [name for spec in self.spec.mixers for name in spec.reads_stream]
        ctx = dataclasses.replace(ctx, stream={name: x[name] for name in names})
        y_BLD, new_cache, aux = self.applied(x[side], ctx, cache)
        updates = [values.pop(STREAM, {}) for values in aux.values()]
        x = functools.reduce(operator.or_, updates, x | {side: y_BLD})
        return x, new_cache, {name: values for name, values in aux.items() if values}

    def applied(
        self, x_BLD: Float[Array, "B L D"], ctx: Context, cache: dict | None = None
    ) -> tuple[Float[Array, "B L D"], dict | None, dict]:
        """As of a whole residual stream, on one of its arrays."""
        h_BLD = x_BLD if self.norm is None else self.norm(x_BLD)
        gathered_BLD = h_BLD
        if any(spec.reads == "whole" for spec in self.spec.mixers):
            gathered_BLD = collectives.gather_sequence(h_BLD, ctx.sequence_sharded)
        outputs, new_cache, aux = [], {}, {}
        for name, mixer in self.mixers.items():
            mixer_cache = None if cache is None else cache[name]
            input_BLD = h_BLD if mixer.spec.reads == "shard" else gathered_BLD
            input_BLD = input_BLD if self.norms is None else self.norms[name](input_BLD)
            with jax.named_scope(name):
                output_BLD, new_cache[name], values = mixer(input_BLD, ctx, mixer_cache)
            outputs.append(output_BLD)
            if values:
                aux[name] = values
        if any(scale != 1 for scale in self.spec.scales):
            outputs = [y * scale for y, scale in zip(outputs, self.spec.scales, strict=True)]
        y_BLD = sum(outputs[1:], outputs[0])
        if all(spec.writes == "whole" for spec in self.spec.mixers):
            y_BLD = collectives.scatter_sequence(y_BLD, ctx.sequence_sharded)
        y_BLD = collectives.stored(y_BLD, "mixer_output")
        after_sum = self.spec.place == "post_residual"
        if self.post_norm is not None and not after_sum:
            y_BLD = self.post_norm(y_BLD)
        if self.spec.dropout and ctx.training:
            y_BLD = drop_residual(y_BLD, self.spec.dropout, ctx.key(DROPOUT_PLACE), ctx)
        x_BLD = x_BLD + y_BLD if self.spec.adds else y_BLD
        if self.post_norm is not None and after_sum:
            x_BLD = self.post_norm(x_BLD)
        if self.scale is not None:
            x_BLD *= self.scale[...].astype(x_BLD.dtype)
        return x_BLD, None if cache is None else new_cache, aux

    def init_cache(self, size: CacheSize) -> dict:
        """An empty cache per mixer; None for mixers without one, and for those of an encoder."""
        is_encoder = self.spec.side == "source"
        return {n: None if is_encoder else m.init_cache(size) for n, m in self.mixers.items()}


def drop_residual(x_BLD: jax.Array, rate: float, key: jax.Array, ctx: Context) -> jax.Array:
    """Dropout of a sequence shard; masks do not depend on the layout."""
    return dropout(x_BLD, rate, key, ctx.rows()[:, None], ctx.places(x_BLD.shape[1]))
