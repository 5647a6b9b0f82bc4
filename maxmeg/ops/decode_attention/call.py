"""Decode attention: a few new queries per row against a paged key/value cache.

A backend (ops/backend.py) has `refuses(q, cache, spec, sinks_H, bias_NH, device)`, the reason why
it cannot run a call, and `attend(q, cache, spec, sinks_H, bias_NH)`, which returns output and
log-sum-exp.
"""

import functools
import logging

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from maxmeg.ops import backend as dispatch
from maxmeg.ops.attention.spec import ScoreSpec
from maxmeg.ops.backend import pick
from maxmeg.ops.decode_attention import mosaic as decode_attention_mosaic
from maxmeg.ops.decode_attention import xla as decode_attention_xla
from maxmeg.ops.decode_attention.xla import PagedCache, with_dtype

__all__ = ["PagedCache", "decode_attention", "write_pages"]

BACKENDS = {"mosaic": decode_attention_mosaic, "xla": decode_attention_xla}
ORDER = ("xla",)  # for "auto", on every device: the kernel has not been measured
CAUSAL = ScoreSpec()


def decode_attention(
    q_BLHK: Float[Array, "B *L H K"],
    cache: PagedCache,
    spec: ScoreSpec = CAUSAL,
    sinks_H: Array | None = None,
    bias_NH: Float[Array, "N H"] | None = None,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "B *L H V"], Float[Array, "B *L H"]]:
    """(output, float32 log-sum-exp) of each row's newest queries, [B, H, K] or [B, L, H, K].

    The queries are at the last L of the row's lengths_B positions; their keys are in the cache.
    A row of length 0 gives zeros and a log-sum-exp of -1e30, or its sinks. bias_NH: of distances,
    as in `Operands`. backend: a key of BACKENDS, or "auto". ValueError if shapes do not fit, if the
    backend does not support the call, and when differentiated: decode attention has no gradient.
    """
    check_shapes(q_BLHK, cache, sinks_H, bias_NH)
    is_single = q_BLHK.ndim == 3
    call = (q_BLHK[:, None] if is_single else q_BLHK, cache, spec, sinks_H, bias_NH)
    name = pick("decode attention", BACKENDS, ORDER, backend, call)
    if (backend, name) == ("auto", "xla") and dispatch.target_device().is_cuda:
        warn_of_xla(*cache.page_table.shape, *cache.k_pages.shape[1:])
    out_BLHV, lse_BLH = forward_only(name, *call)
    return (out_BLHV[:, 0], lse_BLH[:, 0]) if is_single else (out_BLHV, lse_BLH)


@functools.cache
def warn_of_xla(rows: int, columns: int, slots: int, groups: int, size: int) -> None:
    """Warn once of the copies that XLA makes of a cache of this shape on a GPU."""
    logging.getLogger("maxmeg").warning(
        "decode attention runs in plain XLA on the GPU: each step and layer copies up to %s "
        "positions of %s rows, %s key heads of size %s, and as many values, before it reads them. "
        "The kernel mosaic, which reads them in place, has not run on a GPU yet",
        f"{columns * slots:,}",
        rows,
        groups,
        size,
    )


def run_backend(name: str, q_BLHK, cache: PagedCache, spec: ScoreSpec, sinks_H, bias_NH):
    return BACKENDS[name].attend(q_BLHK, cache, spec, sinks_H, bias_NH)


def refuse_gradient(*call):
    raise ValueError(
        "decode attention has no gradient: train with ops.attention on contiguous keys and values"
    )


forward_only = jax.custom_vjp(run_backend, nondiff_argnums=(0, 3))
forward_only.defvjp(refuse_gradient, refuse_gradient)


def check_shapes(q_BLHK, cache: PagedCache, sinks_H, bias_NH) -> None:
    """ValueError if the shapes or dtypes of a call do not match."""
    (P, S, G, K), V = cache.k_pages.shape, cache.v_pages.shape[-1]
    B, H = q_BLHK.shape[0], q_BLHK.shape[-2]
    if q_BLHK.ndim not in (3, 4) or q_BLHK.shape[-1] != K:
        raise ValueError(f"queries {q_BLHK.shape} are not [B, H, {K}] or [B, L, H, {K}]")
    if H % G:
        raise ValueError(f"query heads={H} must be a multiple of key heads={G}")
    shapes = {
        "v_pages": (cache.v_pages, (P, S, G, V)),
        "page_table": (cache.page_table, (B, cache.page_table.shape[-1])),
        "lengths_B": (cache.lengths_B, (B,)),
        "sinks_H": (sinks_H, (H,)),
        "bias_NH": (bias_NH, (0 if bias_NH is None else len(bias_NH), H)),
    }
    for name, (array, shape) in shapes.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, needs {shape}")
    for name in ("page_table", "lengths_B"):
        if getattr(cache, name).dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {getattr(cache, name).dtype}, needs int32")


def write_pages(
    pages_PSGK: Shaped[Array, "P S G K"],
    new_BLGK: Float[Array, "B L G K"],
    page_table: Int[Array, "B N"],
    starts_B: Int[Array, " B"],
    counts_B: Int[Array, " B"],
) -> Shaped[Array, "P S G K"]:
    """The pool with the first counts_B keys (or values) of each row written to its pages, from
    position starts_B of the row."""
    (P, S), L = pages_PSGK.shape[:2], new_BLGK.shape[1]
    position_BL = starts_B[:, None] + jnp.arange(L)
    page_BL = jnp.take_along_axis(page_table, position_BL // S, axis=1, mode="clip")
    is_written_BL = jnp.arange(L) < counts_B[:, None]
    page_BL = jnp.where(is_written_BL, page_BL, P)  # outside of the pool: not written
    new_BLGK = with_dtype(new_BLGK, pages_PSGK.dtype)
    return pages_PSGK.at[page_BL, position_BL % S].set(new_BLGK, mode="drop")
