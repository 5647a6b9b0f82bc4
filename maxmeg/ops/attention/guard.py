"""What is not finite stays in its own document, around kernels that multiply by weights of zero.

A kernel masks a key by the weight 0, and 0 x NaN is NaN: in a block that the border of two
documents cuts, padding that holds anything would reach live queries. Around such a kernel, packed
documents are cleaned before and marked after, by the rule of attention_xla: what is not finite in a
query, key or value makes NaN of the queries that see it, and of no others. Which queries those are
follows from prefix sums, as every query sees an interval of keys; it costs a pass over the arrays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def guarded(
    attend: Attend,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGV: jax.Array,
    bounds: tuple[Int[Array, "A L"], Int[Array, "A L"]],
    dead_B: Bool[Array, " B"],
) -> tuple[jax.Array, jax.Array]:
    """attend(q, k, v) -> (out, lse); NaN for queries that see what is not finite, and dead rows.

    bounds: first key that each query sees, and the one after its last.
    """
    q_BLHK, strange_BLH = finite(q_BLHK)
    k_BMGK, strange_k_BMG = finite(k_BMGK)
    v_BMGV, strange_v_BMG = finite(v_BMGV)
    counts_BMG = jnp.cumsum((strange_k_BMG | strange_v_BMG).astype(jnp.int32), axis=1)
    counts_BMG = jnp.pad(counts_BMG, ((0, 0), (1, 0), (0, 0)))

    def until(bound_AL: jax.Array) -> jax.Array:
        bound_BL = jnp.broadcast_to(bound_AL, (q_BLHK.shape[0], bound_AL.shape[1]))
        return jnp.take_along_axis(counts_BMG, bound_BL[..., None], axis=1)

    seen_BLG = until(bounds[1]) > until(bounds[0])
    seen_BLH = jnp.repeat(seen_BLG, q_BLHK.shape[2] // k_BMGK.shape[2], axis=2)
    spoilt_BLH = seen_BLH | strange_BLH | dead_B[:, None, None]
    out_BLHV, lse_BLH = attend(q_BLHK, k_BMGK, v_BMGV)
    out_BLHV = jnp.where(spoilt_BLH[..., None], jnp.nan, out_BLHV)
    return out_BLHV, jnp.where(spoilt_BLH, jnp.nan, lse_BLH)


def finite(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x with 0 for what is not finite, and which of its vectors held such."""
    fine = jnp.isfinite(x)
    return jnp.where(fine, x, 0), ~jnp.all(fine, axis=-1)
