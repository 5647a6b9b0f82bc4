"""One table of decode attention calls that every backend runs, and what they should give.

Imports neither pytest nor the kernels: a machine with a GPU runs it too. Everything outside the
rows' keys is NaN, and every entry of the table past a row's pages is no page.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from ops.attention_cases import UNSEEN, sees_place

from maxmeg.ops.attention.call import ScoreSpec
from maxmeg.ops.decode_attention.call import PagedCache, decode_attention

TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}  # of the norm


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of a call. pages: of a row's table, 0: as many as the longest row needs."""

    lengths: tuple[int, ...] = (37, 1, 0, 16, 23)
    heads: int = 4
    groups: int = 2
    head_dim: int = 64
    value_dim: int = 0  # 0: head_dim
    page: int = 16
    pages: int = 0
    queries: int = 1
    spec: ScoreSpec = ScoreSpec()
    sinks: bool = False


LONG = (261, 130, 0, 64, 65)
CASES = {
    "grouped": Case(),
    "multi-query": Case(groups=1),
    "multi-head": Case(groups=4),
    "one head": Case(heads=1, groups=1),
    "many heads a group": Case(heads=24, groups=1),
    "a long table": Case(pages=40),
    "pages of 8": Case(page=8),
    "pages of 32": Case(page=32),
    "pages of 64": Case(LONG, page=64),
    "pages of 128": Case(LONG, page=128),
    "pages of 256": Case(LONG, page=256),
    "several blocks": Case(LONG),
    "nothing at all": Case((0, 0)),
    "drafts": Case(queries=4),
    "drafts, several blocks": Case(LONG, queries=3),
    "drafts of many heads": Case(LONG, heads=8, groups=1, queries=8),
    "drafts longer than the row": Case((3, 5, 0), queries=4),
    "drafts, all keys": Case(LONG, queries=3, spec=ScoreSpec(causal=False)),
    "window": Case(spec=ScoreSpec(window=5)),
    "window of one": Case(spec=ScoreSpec(window=1)),
    "window of several blocks": Case(LONG, spec=ScoreSpec(window=100)),
    "window, drafts": Case(LONG, queries=4, spec=ScoreSpec(window=70)),
    "window on both sides": Case(LONG, queries=4, spec=ScoreSpec(causal=False, window=3)),
    "chunks": Case(spec=ScoreSpec(chunk=10)),
    "chunks, drafts": Case(LONG, queries=4, spec=ScoreSpec(chunk=66)),
    "chunks of all keys": Case(LONG, queries=4, spec=ScoreSpec(causal=False, chunk=66)),
    "window and chunks": Case(LONG, queries=2, spec=ScoreSpec(window=80, chunk=128)),
    "scale": Case(spec=ScoreSpec(scale=0.7)),
    "soft cap": Case(LONG, spec=ScoreSpec(softcap=1.5)),
    "sinks": Case(sinks=True),
    "everything": Case(
        *(LONG, 6, 3, 64, 0, 32, 20, 3),
        spec=ScoreSpec(window=90, chunk=128, softcap=1.5, scale=0.3),
        sinks=True,
    ),
    "heads of 80": Case(LONG, head_dim=80),
    "heads of 96": Case(LONG, head_dim=96, queries=2),
    "heads of 128": Case(LONG, head_dim=128, heads=8),
    "heads of 192 and 128": Case(LONG, head_dim=192, value_dim=128),
    "heads of 256": Case(LONG, head_dim=256, spec=ScoreSpec(window=90)),
}


def arrays_of(case: Case, dtype: str) -> tuple[np.ndarray, PagedCache, np.ndarray | None]:
    """(q, cache, sinks), the pages of the rows in any order."""
    rng = np.random.default_rng(case.head_dim + sum(case.lengths))
    B, G, S = len(case.lengths), case.groups, case.page
    needed = [-(-length // S) for length in case.lengths]
    width = max(case.pages, *needed, 1)
    order = iter(rng.permutation(sum(needed) + 3))
    table = rng.choice([-7, 2**31 - 1, 10**6], size=(B, width)).astype(np.int32)
    pools = []
    for dim in (case.head_dim, case.value_dim or case.head_dim):
        pools.append(np.full((sum(needed) + 3, S, G, dim), np.nan, np.float32))
    for row, length in enumerate(case.lengths):
        for number in range(needed[row]):
            table[row, number] = page = next(order)
            slots = min(S, length - number * S)
            for pool in pools:
                pool[page, :slots] = rng.normal(size=(slots, *pool.shape[2:]))
    q = rng.normal(size=(B, case.queries, case.heads, case.head_dim))
    sinks = rng.normal(size=case.heads).astype(np.float32) if case.sinks else None
    q, *pools = (np.asarray(jnp.asarray(array, dtype)) for array in (q, *pools))
    return q, PagedCache(*pools, table, np.array(case.lengths, np.int32)), sinks


def contiguous(cache: PagedCache, row: int) -> list[np.ndarray]:
    """Keys and values of a row, [M, G, K] and [M, G, V]."""
    _, _, table, lengths = map(np.asarray, cache)
    size = cache.k_pages.shape[1]
    numbers = table[row, : -(-lengths[row] // size)]
    pools = (np.asarray(pool)[numbers] for pool in cache[:2])
    return [pool.reshape(-1, *pool.shape[2:])[: lengths[row]] for pool in pools]


def expected(case: Case, q, cache: PagedCache, sinks) -> dict[str, np.ndarray]:
    """Output and log-sum-exp in float64, a query of a head at a time."""
    q, spec = np.asarray(q, np.float64), case.spec
    out = np.zeros((*q.shape[:3], case.value_dim or case.head_dim))
    lse = np.full(q.shape[:3], UNSEEN)
    for b, length in enumerate(case.lengths):
        k, v = (np.asarray(array, np.float64) for array in contiguous(cache, b))
        for i, h in np.ndindex(*q.shape[1:3]):
            place, g = length - case.queries + i, h // (case.heads // case.groups)
            scores = (spec.scale or case.head_dim**-0.5) * k[:, g] @ q[b, i, h]
            if spec.softcap:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            weights = np.exp(scores) * [sees_place(spec, place, j) for j in range(length)]
            total = weights.sum() + (np.exp(np.float64(sinks[h])) if case.sinks else 0)
            if total > 0:
                out[b, i, h] = weights @ v[:, g] / total
                lse[b, i, h] = np.log(total)
    return {"out": out, "lse": lse}


def run(case: Case, q, cache: PagedCache, sinks, backend: str, jit=jax.jit) -> dict:
    """What a backend gives for `expected`; a call that it refuses raises ValueError."""

    def call(q, cache, sinks):
        return decode_attention(q, cache, case.spec, sinks, backend=backend)

    out, lse = jit(call)(q, PagedCache(*map(jnp.asarray, cache)), sinks)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}


def errors(actual: dict, wanted: dict) -> dict[str, float]:
    """Of the norm, by name; infinite unless the same queries see nothing and the rest is finite."""
    unseen = wanted["lse"] == UNSEEN
    if not np.array_equal(actual["lse"] == np.float32(UNSEEN), unseen):
        return {"lse": np.inf}
    measured = {}
    for name, mask in (("out", unseen[..., None]), ("lse", unseen)):
        reference = np.where(mask, 0, wanted[name])
        difference = np.where(mask & (name == "lse"), 0, actual[name]) - reference
        size = np.linalg.norm(difference) / (np.linalg.norm(reference) or 1.0)
        measured[name] = float(size) if np.isfinite(size) else np.inf
    return measured
