"""A residual sublayer: x + dropout(post_norm(mixers(norm(x)))), either norm optional."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.config.lazy import Lazy
from maxmeg.layers.attention import Attention, AttentionSpec
from maxmeg.layers.context import Context
from maxmeg.layers.mlp import Mlp, MlpSpec
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.ops.dropout import dropout
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import TENSOR_AXES

DROPOUT_PLACE = 1
MIXERS = {AttentionSpec: ("attention", Attention), MlpSpec: ("mlp", Mlp)}
mla = Lazy("maxmeg.layers.mla")
moe = Lazy("maxmeg.layers.moe")


def make_mixer(key: jax.Array, spec) -> tuple[str, nnx.Module]:
    """The name that a mixer's parameters go by, and the mixer."""
    if type(spec) in MIXERS:
        name, kind = MIXERS[type(spec)]
        return name, kind(key, spec)
    if isinstance(spec, AttentionSpec):
        return "mla", mla.Mla(key, spec)
    return "moe", moe.Moe(key, spec)


@dataclasses.dataclass(frozen=True)
class ResidualSpec:
    """Mixers whose outputs are summed (two: a parallel block).

    place: "pre", they read a norm of the residual stream; "post", their sum is normalized;
    "sandwich", both. own_norms: each mixer reads a norm of its own.
    """

    norm: NormSpec
    mixers: tuple[typing.Any, ...]  # AttentionSpec, MlaSpec, MlpSpec or MoeSpec
    dropout: float = 0.0
    place: str = "pre"
    own_norms: bool = False


class Residual(nnx.Module):
    """The residual stream is sharded over tensor along the sequence; mixers see it whole and
    give partial sums, but those with `reads_shard` and `writes_shard`."""

    def __init__(self, key: jax.Array, spec: ResidualSpec):
        self.spec = spec
        keys = jax.random.split(key, len(spec.mixers))
        made, norms = {}, {}
        for mixer_key, mixer in zip(keys, spec.mixers, strict=True):
            name, made_mixer = make_mixer(mixer_key, mixer)
            made[name] = made_mixer
            norms[name] = Norm(mixer.hidden_size, spec.norm)
        width, before = spec.mixers[0].hidden_size, spec.place in ("pre", "sandwich")
        self.norm = Norm(width, spec.norm) if before and not spec.own_norms else None
        self.norms = nnx.Dict(norms) if before and spec.own_norms else None
        self.post_norm = Norm(width, spec.norm) if spec.place in ("post", "sandwich") else None
        self.mixers = nnx.Dict(made)

    def __call__(
        self, x_BLD: Float[Array, "B L D"], ctx: Context, cache: dict | None = None
    ) -> tuple[Float[Array, "B L D"], dict | None, dict]:
        h_BLD = x_BLD if self.norm is None else self.norm(x_BLD)
        whole_BLD = h_BLD
        if not all(hasattr(mixer, "reads_shard") for mixer in self.mixers.values()):
            whole_BLD = collectives.gather_sequence(h_BLD, ctx.sequence_sharded)
        parts_BLD, new_cache, aux = [], {}, {}
        for name, mixer in self.mixers.items():
            part = None if cache is None else cache[name]
            own_BLD = h_BLD if hasattr(mixer, "reads_shard") else whole_BLD
            own_BLD = own_BLD if self.norms is None else self.norms[name](own_BLD)
            part_BLD, new_cache[name], values = mixer(own_BLD, ctx, part)
            parts_BLD.append(part_BLD)
            aux |= values
        y_BLD = sum(parts_BLD[1:], parts_BLD[0])
        if not any(hasattr(mixer, "writes_shard") for mixer in self.mixers.values()):
            y_BLD = collectives.scatter_sequence(y_BLD, ctx.sequence_sharded)
        y_BLD = collectives.stored(y_BLD)
        if self.post_norm is not None:
            y_BLD = self.post_norm(y_BLD)
        if self.spec.dropout and ctx.dropout_key is not None:
            y_BLD = drop_residual(y_BLD, self.spec.dropout, ctx.key(DROPOUT_PLACE), ctx)
        return x_BLD + y_BLD, None if cache is None else new_cache, aux

    def init_cache(self, batch: int, length: int) -> dict:
        """An empty cache for each mixer that has one (None for the others)."""
        return {
            name: mixer.init_cache(batch, length) if hasattr(mixer, "init_cache") else None
            for name, mixer in self.mixers.items()
        }


def drop_residual(x_BLD: jax.Array, rate: float, key: jax.Array, ctx: Context) -> jax.Array:
    """Dropout of a sequence shard, keyed by (row of the global batch, place in the sequence)."""
    length = x_BLD.shape[1]
    first = collectives.axis_index(TENSOR_AXES) * length
    return dropout(x_BLD, rate, key, ctx.rows()[:, None], first + jnp.arange(length)[None, :])
