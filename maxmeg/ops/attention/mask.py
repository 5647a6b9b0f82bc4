"""Which keys a query sees: the one definition that all backends and the planner's counts share.

Without documents they are an interval of keys for each query (`bounds`). Documents are compared
(`visible`). A backend that reads the mask as an array builds it by `dense_mask` of its module, for
which `Operands.mask_B1LM` has room: layers/context.py builds it once for all layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ENDLESS = np.iinfo(np.int32).max  # number of keys where no query can see past the last one


def bounds(spec, positions: Any, keys: Any) -> tuple[Any, Any]:
    """(lower, upper): a query sees the keys lower <= j < upper of its document.

    spec: an ops.attention.spec.ScoreSpec. positions: of queries, a number or a NumPy or JAX array.
    keys: number of keys.
    """
    xp: Any = jnp if isinstance(positions, jax.Array) else np
    lower = xp.zeros_like(positions)
    upper = lower + keys
    if spec.causal:
        upper = xp.minimum(upper, positions + 1)
    if spec.window:
        lower = xp.maximum(lower, positions - spec.window + 1)
        upper = xp.minimum(upper, positions + spec.window)
    if spec.chunk:
        start = positions // spec.chunk * spec.chunk
        lower, upper = xp.maximum(lower, start), xp.minimum(upper, start + spec.chunk)
    return lower, upper


def visible(spec, positions_AL, keys_M, segments_BL=None, segments_BM=None) -> jax.Array:
    """The mask [A or B, L, M]: whether each query sees each key. segments: documents of both."""
    lower_AL, upper_AL = bounds(spec, positions_AL, ENDLESS)
    is_visible_ALM = (keys_M >= lower_AL[..., None]) & (keys_M < upper_AL[..., None])
    if segments_BL is None or segments_BM is None:
        return is_visible_ALM
    return is_visible_ALM & (segments_BL[:, :, None] == segments_BM[:, None])
