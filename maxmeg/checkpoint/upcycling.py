"""A model with experts that begins with the weights of a dense one (He et al., arXiv:2410.07524).

The dense MLP is cut into G slices along its inner width, each expert being one of them, so that
G = (its width) / (an expert's). Experts c G .. c G + G - 1 are the c-th copy of the whole MLP, and
their columns of the router begin alike ("virtual groups"): a token that takes k G experts takes k
whole copies. Output weights are multiplied by G / (sum of a token's weights), so that the model
computes what the dense one did; that sum is exact where weights are normalized, else it is that of
a router whose scores are all the same. (Megatron-LM spreads the factor over all matrices, which is
not exact for a nonlinear activation.) Noise on the copies makes them differ.
"""

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.config.model import ModelConfig, RouterScore
from maxmeg.models.lm import LM, layer_places

Read = Callable[[str, jax.ShapeDtypeStruct], jax.Array]  # of the dense model's checkpoint
STACKED = re.compile(r"^model\.stack\.groups\.(\d+)\.sublayers\.(\d+)\.(.*)$")
EVEN = {  # an expert's score where all logits are zero, of softmax times the number of experts
    RouterScore.softmax: 1.0,
    RouterScore.sigmoid: 0.5,
    RouterScore.sqrt_softplus: 0.8325546,
}


@dataclasses.dataclass(frozen=True)
class Upcycling:
    """From the dense model `saved` to `wanted`.

    noise: of the copies, its deviation over the root mean square of a matrix; drawn, as routers
    are, by the run's seed.
    """

    saved: ModelConfig
    wanted: ModelConfig
    noise: float
    seed: int
    read: Read

    @property
    def slices(self) -> int:
        return self.saved.ffn // self.wanted.expert_ffn

    def take(self, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        """An array of the new model in model order, as `like` says."""
        return self.made(name, like).astype(like.dtype)

    def made(self, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        found = STACKED.match(name)
        if found is None:
            return self.read(name, like)
        group, sublayer, rest = int(found[1]), int(found[2]), found[3]
        kept = [
            (layer, sublayer - first)
            for layer, (g, _, first) in enumerate(layer_places(self.wanted))
            if g == group and 0 <= sublayer - first < 2
        ]
        part = rest.removeprefix("mixers.moe.")
        if part == rest:
            return self.rows(kept, rest, like.shape, like.sharding)
        if part == "router":
            return self.router(group, sublayer, like)
        if not part.startswith("experts."):  # what moves by counts, and biases of logits
            zeros = functools.partial(jnp.zeros, like.shape)
            return jax.jit(zeros, out_shardings=like.sharding)()
        return self.experts(kept, name, part.removeprefix("experts."), like)

    def rows(self, kept: list[tuple[int, int]], rest: str, shape, sharding) -> jax.Array:
        """The dense model's arrays of these layers and sublayers, stacked."""
        places = layer_places(self.saved)
        counts = [0] * (1 + max(group for group, _, _ in places))
        for group, repeat, _ in places:
            counts[group] = max(counts[group], repeat + 1)
        arrays: dict[str, jax.Array] = {}
        picked = []
        for layer, at in kept:
            group, repeat, first = places[layer]
            name = f"model.stack.groups.{group}.sublayers.{first + at}.{rest}"
            if name not in arrays:
                stored = (counts[group], *shape[1:])
                spec = P(None, *sharding.spec[1:])
                local = NamedSharding(sharding.mesh, spec)
                arrays[name] = self.read(
                    name, jax.ShapeDtypeStruct(stored, jnp.float32, sharding=local)
                )
            picked.append((name, repeat))

        def stack(arrays):
            return jnp.stack([arrays[name][repeat] for name, repeat in picked])

        return jax.jit(stack, out_shardings=sharding)(arrays)

    def experts(self, kept, name: str, part: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        """up, gate, out [layers, E, in, out] and their biases [layers, E, out]."""
        matrix, _, kind = part.partition("_")
        width, slices = self.saved.ffn, self.slices
        dim = 1 if matrix == "out" else -1  # of the inner width, in [layers, in, out]
        shape = [like.shape[0], *like.shape[2:]]
        is_cut = not (matrix == "out" and kind)
        if is_cut:
            shape[dim] = width
        axes = tuple(like.sharding.spec) + (None,) * (len(like.shape) - len(like.sharding.spec))
        sharding = NamedSharding(like.sharding.mesh, P(axes[0], *axes[2:]))
        rest = f"mixers.mlp.{matrix}.{kind or 'weight'}"
        dense = self.rows(kept, rest, tuple(shape), sharding)
        copies, scale = like.shape[1] // slices, self.scale()
        noise = 0.0 if kind else self.noise
        key = jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(name.encode()))

        def cut(dense):
            parts = jnp.split(dense, slices, axis=dim) if is_cut else [dense] * slices
            cut = jnp.tile(jnp.stack(parts, axis=1), (1, copies) + (1,) * (dense.ndim - 1))
            if noise:
                size = jnp.sqrt(jnp.mean(jnp.square(dense)))
                cut += noise * size * jax.random.normal(key, cut.shape, cut.dtype)
            if matrix != "out":
                return cut
            return cut * (scale / slices if kind else scale)

        return jax.jit(cut, out_shardings=like.sharding)(dense)

    def router(self, group: int, sublayer: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Random columns, one for each copy of the MLP."""

        def columns(key):
            stack = LM(jax.random.split(key)[0], self.wanted).stack
            router = stack.groups[group].sublayers[sublayer].mixers["moe"].router[...]
            kept = router[..., : like.shape[-1] // self.slices]
            return jnp.repeat(kept, self.slices, axis=-1)

        return jax.jit(columns, out_shardings=like.sharding)(jax.random.key(self.seed))

    def scale(self) -> float:
        """What an expert's output is multiplied by."""
        model = self.wanted
        chosen, score = model.experts_per_token, model.router_score
        late = score is RouterScore.softmax and not model.router_over_all
        if (late and not model.router_sinkhorn) or (model.router_normalize and chosen > 1):
            total = 1.0
        else:
            if model.router_sinkhorn:
                score = RouterScore.sigmoid if chosen == 1 else RouterScore.softmax
            experts = model.num_experts if score is RouterScore.softmax else 1
            total = chosen * EVEN[score] / experts
        return self.slices / (total * model.router_scale)
