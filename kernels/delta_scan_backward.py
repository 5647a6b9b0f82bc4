"""The chunked scan of the gated delta rule for Hopper, backward. Not yet run on a GPU: compiled,
interpreted.

With u the corrected values, known_s = exp(c_s) k_s^T H + sum_{t < s} (k_s . k_t) exp(c_s - c_t) u_t
and u = beta (v - known), the outputs and the known values are both Mamba-2's scans of u, of q and
of k, where a token of the second one does not see itself. Hence gradients are sums of those of
Mamba-2's (chunk_scan_backward.py): of a scan with gradients dy of its outputs, and of one with
-dv, since d known = -beta du = -dv, with du the gradient of u by everything that follows.

Two runs of the forward kernel write u and H, and against the time m = du and G, the gradient of the
state after each chunk. Then all chunks are independent.

Letters as in chunk_scan.py.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import chunk_scan, delta_scan
from .chunk_scan import CONSUMERS, DTYPE
from .chunk_scan_backward import decay_gradient, side

LEAST = 1e-12  # of beta, by which products with dv are divided


def gradients(
    inputs: tuple[Any, ...],
    beta_BLH: Float[Array, "B L H"],
    docs_BL: Int[Array, "B L"] | None,
    slopes: tuple[Float[Array, "B L H P"], Float[Array, "B H N P"]],
) -> tuple[tuple[Array, ...], Array]:
    """Gradients of `inputs` (q, k, v, log_decay, state of delta_scan.scan, with queries), and of
    beta. slopes: those of y and of the last state."""
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLH, _ = inputs
    S, L = CONSUMERS * chunk_scan.WARPGROUP_ROWS, v_BLHP.shape[1]
    d_y_BLHP, d_last_BHNP, dtype = slopes[0].astype(DTYPE), slopes[1], jnp.float32
    call = delta_scan.prepared(inputs, beta_BLH, docs_BL)
    u_BLHP, _, before_BCHNP = delta_scan.launch(call._replace(q_BLGN=None), is_saved=True)
    reverse = call._replace(v_BLHP=d_y_BLHP, state_BHNP=d_last_BHNP)
    m_BLHP, d_state_BHNP, after_BCHNP = delta_scan.launch(reverse, is_saved=True, is_reverse=True)
    beta_BLH1 = beta_BLH.astype(dtype)[..., None]
    beta_BLH1 = jnp.where(abs(beta_BLH1) < LEAST, LEAST, beta_BLH1)
    d_v_BLHP = (beta_BLH1 * m_BLHP.astype(dtype)).astype(DTYPE)
    common = chunk_scan.chunk_sums(log_decay_BLH, S), call.first_BL
    d_q_BLGN, *queries = side(q_BLGN, k_BLGN, d_y_BLHP, u_BLHP, before_BCHNP, common)
    d_k_BLGN, *keys = side(k_BLGN, q_BLGN, u_BLHP, d_y_BLHP, after_BCHNP, common, "keys")
    arguments = k_BLGN, k_BLGN, d_v_BLHP, u_BLHP, before_BCHNP, common, "strict queries"
    d_reader_BLGN, *readers = side(*arguments)
    arguments = k_BLGN, k_BLGN, u_BLHP, d_v_BLHP, None, common, "strict keys"
    d_known_BLGN, *others = side(*arguments)
    parts = d_k_BLGN, -d_reader_BLGN, -d_known_BLGN
    d_k_BLGN = sum((x.astype(dtype) for x in parts), jnp.zeros((), dtype))
    d_beta_BLH = jnp.sum(v_BLHP.astype(dtype) * m_BLHP.astype(dtype), axis=3)
    d_beta_BLH -= (readers[0] + readers[1]).swapaxes(1, 2)[:, :L] / beta_BLH1[..., 0]
    sides = [
        tuple(x - y for x, y in zip(*pair, strict=True))
        for pair in ((queries, readers), (keys, others))
    ]
    d_decay_BLH = decay_gradient(S, common, (before_BCHNP, after_BCHNP), *sides)[:, :L]
    d_inputs = d_q_BLGN, d_k_BLGN.astype(DTYPE), d_v_BLHP, d_decay_BLH, d_state_BHNP
    return d_inputs, d_beta_BLH.astype(beta_BLH.dtype)
