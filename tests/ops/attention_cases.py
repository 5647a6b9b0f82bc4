"""One table of attention calls that every backend runs, and what they should give.

Imports neither pytest nor the reference backend's code: a machine with a GPU runs it too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from maxmeg.ops.attention.call import Operands, ScoreSpec, attention_with_lse
from maxmeg.ops.attention.spec import AttentionDropout
from maxmeg.ops.random import random_bits

UNSEEN = -1e30  # log-sum-exp of a query that sees nothing
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of the norm


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of a call. segments: lengths of the documents of queries, and of keys; the
    second row of the batch has them the other way round. block: queries of a block in XLA."""

    length: int
    keys: int = 0  # 0: as many as queries
    heads: int = 2
    groups: int = 1
    head_dim: int = 8
    value_dim: int = 0  # 0: head_dim
    spec: ScoreSpec = ScoreSpec()
    offset: int = 0
    segments: tuple[int, ...] = ()
    key_segments: tuple[int, ...] = ()
    sinks: bool = False
    block: int = 512


FULL = ScoreSpec(causal=False)
CASES = {
    "grouped": Case(7, heads=4, groups=2),
    "multi-query": Case(7, heads=4),
    "one query": Case(1, 9, offset=8),
    "continued": Case(4, 9, offset=3),  # the last two keys are still unwritten
    "before the keys": Case(9, 6, offset=-4),  # the first four queries see nothing
    "after the keys": Case(4, 6, offset=9),
    "all keys": Case(7, heads=4, groups=2, spec=FULL),
    "cross": Case(5, 9, spec=FULL),
    "blocks": Case(48, heads=4, groups=2, block=8),
    "sinks alone": Case(9, 6, offset=-4, sinks=True),
    "blocks of all keys": Case(40, 24, spec=FULL, block=16),
    "blocks continued": Case(40, 48, offset=8, block=16),
    "blocks within pieces": Case(70, heads=4, groups=2, block=2),
    "window": Case(13, spec=ScoreSpec(window=4)),
    "window in blocks": Case(45, spec=ScoreSpec(window=11), block=8),
    "window continued": Case(9, 24, offset=13, spec=ScoreSpec(window=6), block=4),
    "window past the keys": Case(9, 8, offset=5, spec=ScoreSpec(window=4), block=4),
    "window on both sides": Case(37, spec=ScoreSpec(causal=False, window=5), block=8),
    "chunks": Case(13, spec=ScoreSpec(chunk=5)),
    "chunks in blocks": Case(45, spec=ScoreSpec(chunk=7), block=8),
    "chunks continued": Case(9, 24, offset=13, spec=ScoreSpec(chunk=10), block=4),
    "chunks of all keys": Case(21, spec=ScoreSpec(causal=False, chunk=6), block=8),
    "window and chunks": Case(21, spec=ScoreSpec(window=3, chunk=8), block=8),
    "documents": Case(12, heads=4, groups=2, segments=(5, 1, 6)),
    "documents, all keys": Case(12, heads=2, groups=2, segments=(5, 7), spec=FULL),
    "documents in blocks": Case(40, segments=(3, 20, 17), block=8),
    "documents within pieces": Case(70, segments=(3, 40, 27), block=2),
    "documents of queries and keys": Case(
        6, 10, spec=FULL, segments=(2, 4), key_segments=(0, 7, 3), block=4
    ),
    "documents, window": Case(40, segments=(3, 20, 17), spec=ScoreSpec(window=5), block=8),
    "scale": Case(7, spec=ScoreSpec(scale=0.7)),
    "soft cap": Case(13, spec=ScoreSpec(softcap=0.5)),
    "soft cap in blocks": Case(45, spec=ScoreSpec(softcap=0.5, window=9), block=8),
    "sinks": Case(7, heads=4, groups=2, sinks=True),
    "sinks in blocks": Case(45, heads=4, groups=2, sinks=True, block=8),
    "sinks, window": Case(21, heads=4, groups=2, sinks=True, spec=ScoreSpec(window=4)),
    "uneven blocks": Case(45, block=16),
    "everything": Case(
        *(45, 45, 4, 2, 12, 8),
        spec=ScoreSpec(window=9, chunk=16, softcap=1.5, scale=0.5),
        segments=(3, 25, 17),
        sinks=True,
        block=8,
    ),
    "heads of 64": Case(66, heads=4, groups=2, head_dim=64, block=32),
    "heads of 80": Case(34, head_dim=80),
    "heads of 96": Case(34, head_dim=96, spec=ScoreSpec(window=8)),
    "heads of 128": Case(34, head_dim=128, spec=FULL),
    "heads of 192 and 128": Case(34, head_dim=192, value_dim=128),
    "heads of 256": Case(34, head_dim=256, spec=ScoreSpec(window=16)),
}


def documents(lengths: tuple[int, ...]) -> np.ndarray:
    orders = (range(len(lengths)), reversed(range(len(lengths))))
    return np.stack([np.concatenate([np.full(lengths[n], n) for n in order]) for order in orders])


def arrays_of(case: Case, dtype: str) -> tuple[list, Operands]:
    """([q, k, v, cotangent of the output, of the log-sum-exp], operands)."""
    rng = np.random.default_rng(case.length + 100 * case.head_dim)
    keys, values = case.keys or case.length, case.value_dim or case.head_dim
    shapes = (
        (2, case.length, case.heads, case.head_dim),
        (2, keys, case.groups, case.head_dim),
        (2, keys, case.groups, values),
        (2, case.length, case.heads, values),
    )
    arrays = [np.asarray(jnp.asarray(rng.normal(size=shape), dtype)) for shape in shapes]
    arrays.append(rng.normal(size=shapes[0][:3]).astype(np.float32))
    sinks = rng.normal(size=case.heads).astype(np.float32) if case.sinks else None
    actual = [documents(s) if s else None for s in (case.segments, case.key_segments)]
    return arrays, Operands(case.offset, *actual, sinks)


def sees(case: Case, row: int, query: int, key: int) -> bool:
    """The masks, a pair at a time."""
    if case.segments:
        of_query = documents(case.segments)[row, query]
        if of_query != documents(case.key_segments or case.segments)[row, key]:
            return False
    return sees_place(case.spec, case.offset + query, key)


def sees_place(spec: ScoreSpec, place: int, key: int) -> bool:
    """The masks without documents, a pair of positions at a time."""
    if spec.causal and key > place:
        return False
    if spec.window and abs(place - key) >= spec.window:
        return False
    return not spec.chunk or place // spec.chunk == key // spec.chunk


def dropout_factors(case: Case, dropout: AttentionDropout) -> np.ndarray:
    """What multiplies the weights [B, H, L, M], by the row, head and query of each."""
    heads_H, places_L = dropout.first_head + jnp.arange(case.heads), jnp.arange(case.length)
    coordinates = dropout.rows_B[:, None, None], heads_H[:, None], places_L
    shape = (2, case.heads, case.length, case.keys or case.length)
    bits = random_bits(shape, dropout.key, *coordinates)
    return np.asarray(bits >= np.uint32(round(dropout.rate * 2**32))) / (1 - dropout.rate)


def expected(case: Case, arrays: list, operands: Operands, dropout=None) -> dict[str, np.ndarray]:
    """Output, log-sum-exp and gradients in float64, a head of a row at a time. dropout: factors of
    the weights [B, H, L, M]."""
    q, k, v, d_out, d_lse = (np.asarray(x, np.float64) for x in arrays)
    spec, groups = case.spec, case.heads // case.groups
    scale = spec.scale or 1 / np.sqrt(case.head_dim)
    actual = {"out": 0 * d_out, "lse": 0 * d_lse, "dq": 0 * q, "dk": 0 * k, "dv": 0 * v}
    actual["dsinks"] = np.zeros(case.heads)
    sinks = operands.sinks_H if case.sinks else np.full(case.heads, -np.inf)
    size = (2, q.shape[1], k.shape[1])
    seen = np.array([sees(case, *place) for place in np.ndindex(size)]).reshape(size)
    for b, h in np.ndindex(2, case.heads):
        g, mask = h // groups, seen[b]
        raw = scale * q[b, :, h] @ k[b, :, g].T
        capped = spec.softcap * np.tanh(raw / spec.softcap) if spec.softcap else raw
        scores = np.where(mask, capped, -np.inf)
        sums = np.exp(scores).sum(1) + np.exp(sinks[h])
        alive = sums > 0
        weights = np.exp(scores) / np.where(alive, sums, 1)[:, None]
        factors = 1 if dropout is None else dropout[b, h]
        out = factors * weights @ v[b, :, g]
        slope = factors * (d_out[b, :, h] @ v[b, :, g].T)
        slope -= (out * d_out[b, :, h]).sum(1, keepdims=True)
        slope = weights * (slope + d_lse[b, :, h, None])
        if spec.softcap:
            slope *= 1 - (capped / spec.softcap) ** 2
        actual["out"][b, :, h] = out
        actual["lse"][b, :, h] = np.where(alive, np.log(np.where(alive, sums, 1)), UNSEEN)
        actual["dq"][b, :, h] = scale * slope @ k[b, :, g]
        actual["dk"][b, :, g] += scale * slope.T @ q[b, :, h]
        actual["dv"][b, :, g] += (factors * weights).T @ d_out[b, :, h]
        share = np.exp(sinks[h]) / np.where(alive, sums, 1)
        actual["dsinks"][h] += share @ (d_lse[b, :, h] - (out * d_out[b, :, h]).sum(1))
    return actual


def run(case: Case, arrays: list, operands: Operands, backend: str, jit=jax.jit) -> dict:
    """What a backend gives for `expected`; a call that it refuses raises ValueError."""

    def both(arrays, operands):
        *qkv, d_out, d_lse = arrays

        def call(q, k, v, sinks_H):
            changed = operands._replace(sinks_H=sinks_H, offset=case.offset)
            return attention_with_lse(q, k, v, case.spec, changed, backend=backend)

        (out, lse), pull = jax.vjp(call, *qkv, operands.sinks_H)
        return out, lse, *pull((d_out, d_lse))

    actual = jit(both)(arrays, operands)
    named = zip(NAMES, actual, strict=True)
    return {name: np.asarray(array) for name, array in named if array is not None}


def error(actual, wanted) -> float:
    """Of the norm; of a norm of nothing, the size. Infinite unless the same queries see nothing."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    unseen = wanted == UNSEEN
    if not np.array_equal(np.float32(actual) == np.float32(UNSEEN), unseen):
        return np.inf
    actual, wanted = np.where(unseen, 0, actual), np.where(unseen, 0, wanted)
    return float(np.linalg.norm(actual - wanted) / (np.linalg.norm(wanted) or 1.0))
