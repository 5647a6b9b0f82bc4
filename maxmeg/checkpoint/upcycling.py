"""Upcycling: initialize a mixture-of-experts model from a dense one (He et al., arXiv:2410.07524).

The dense MLP is cut along its inner width into G = (width of the MLP) / (width of an expert)
slices, one per expert. Experts c G .. c G + G - 1 are the c-th copy of the whole MLP and have equal
columns of the router ("virtual groups"), so that a token with top-k = k G uses k whole copies.
Output weights are multiplied by G / (sum of a token's routing weights), so that the model computes
what the dense model did; the sum is exact if routing weights are normalized, else it is that of a
router with equal scores. (Megatron-LM spreads the factor over all matrices, which is not exact for
a nonlinear activation.) Noise makes the copies differ.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.checkpoint.regrouping import Regrouping, Rows
from maxmeg.config.mixers import RouterScore
from maxmeg.models.lm import LM
from maxmeg.ops.random import fold, normal, split

SCORES = {  # an expert's score if all logits are 0; for softmax times the number of experts
    RouterScore.softmax: 1.0,
    RouterScore.sigmoid: 0.5,
    RouterScore.sqrt_softplus: 0.8325546,
}


@dataclasses.dataclass(frozen=True)
class Upcycling(Regrouping):
    """Converts the dense model `saved` to one with experts, in place of every MLP.

    noise: standard deviation of the noise on the copies, relative to the root mean square of a
    layer's matrix. Noise and routers are drawn with the run's seed.
    """

    noise: float
    seed: int

    @property
    def slices(self) -> int:
        return self.saved.ffn // self.new.expert_ffn

    def convert(self, name: str, rows: Rows, rest: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        part = rest.removeprefix("mixers.moe.")
        if part == rest:
            return super().convert(name, rows, rest, like)
        if part == "router":
            return self.router(name, like)
        if not part.startswith("experts."):  # load-balancing bias, expert loads, biases of logits
            zeros = functools.partial(jnp.zeros, like.shape)
            return jax.jit(zeros, out_shardings=like.sharding)()
        return self.experts(rows, name, part.removeprefix("experts."), like)

    def experts(self, rows: Rows, name: str, part: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Return a projection [layers, E, in, out] of the experts, or a bias [layers, E, out]."""
        matrix, _, kind = part.partition("_")
        width, slices = self.saved.ffn, self.slices
        dim = 1 if matrix == "out" else -1  # the inner width, in [layers, in, out]
        shape = [like.shape[0], *like.shape[2:]]
        is_cut = not (matrix == "out" and kind)
        if is_cut:
            shape[dim] = width
        axes = tuple(like.sharding.spec) + (None,) * (len(like.shape) - len(like.sharding.spec))
        sharding = NamedSharding(like.sharding.mesh, P(axes[0], *axes[2:]))
        rest = f"mixers.mlp.{matrix}.{kind or 'weight'}"
        dense = self.stacked(rows, rest, tuple(shape), sharding)
        copies, scale = like.shape[1] // slices, self.scale()
        noise = 0.0 if kind else self.noise
        key = fold(jax.random.key(self.seed), zlib.crc32(name.encode()))
        order = np.array([row[0] if row else 0 for row in rows])

        def draw(layer):
            return normal(fold(key, layer), like.shape[1:])

        def cut(dense):
            parts = jnp.split(dense, slices, axis=dim) if is_cut else [dense] * slices
            cut = jnp.tile(jnp.stack(parts, axis=1), (1, copies) + (1,) * (dense.ndim - 1))
            if noise:
                axes = tuple(range(1, cut.ndim))
                size = jnp.sqrt(jnp.mean(jnp.square(cut), axes, keepdims=True))
                cut += noise * size * jax.vmap(draw)(order)
            if matrix != "out":
                return cut
            return cut * (scale / slices if kind else scale)

        return jax.jit(cut, out_shardings=like.sharding)(dense)

    def router(self, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Return random columns, one per copy of the MLP, repeated for the experts of the copy."""
        group, sublayer = (int(name.split(".")[at]) for at in (3, 5))
        order = np.array(self.layout.orders[group]).reshape(-1, 1, 1)

        def draw(key):
            stack = LM(split(key, 2)[0], self.new).stack
            router = stack.groups[group].sublayers[sublayer].mixers["moe"].router[...]
            columns = router[..., : like.shape[-1] // self.slices]
            columns = jnp.where(order >= 0, columns[np.maximum(order, 0)[:, 0, 0]], 0)
            return jnp.repeat(columns, self.slices, axis=-1)

        return jax.jit(draw, out_shardings=like.sharding)(jax.random.key(self.seed))

    def scale(self) -> float:
        """Return the factor of the output weights of every expert."""
        model = self.new
        chosen, score = model.moe.top_k, model.moe.score
        late = score is RouterScore.softmax and not model.moe.softmax_before_topk
        if (late and not model.moe.sinkhorn) or (model.moe.normalize_weights and chosen > 1):
            total = 1.0
        else:
            if model.moe.sinkhorn:
                score = RouterScore.sigmoid if chosen == 1 else RouterScore.softmax
            experts = model.moe.num_experts if score is RouterScore.softmax else 1
            total = chosen * SCORES[score] / experts
        return self.slices / (total * model.moe.scale)
