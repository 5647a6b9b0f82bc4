"""The tables of the flash attention kernels: which blocks they visit, and which they mask.

test_flash_interpreted.py runs, tests/absent/test_kernels.py compiles the kernels that read them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.kernels import attention
from maxmeg.kernels.intervals import (
    FlashSpec,
    key_ranges,
    mask_sides,
    query_ranges,
    visible,
    visible_intervals,
)
from maxmeg.parallel.sequence import chunk_places

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Case:
    spec: FlashSpec
    queries: int
    keys: int
    rows: int = 16
    block: int = 8
    offset: int = 0
    segments: tuple[tuple[int, ...], ...] = ()  # lengths of documents, a row each
    chunks: tuple[int, ...] = ()  # the queries: chunks of CHUNK keys, by number

    @property
    def places(self) -> np.ndarray:
        if self.chunks:
            return chunk_places(np.array([self.chunks]), CHUNK)[0]
        return self.offset + np.arange(self.queries)


CHUNK = 6
PACKED = ((20, 1, 30, 13), (5, 40, 19, 0), (64, 0, 0, 0))
CASES = {
    "full, odd lengths": Case(FlashSpec(causal=False), 33, 45),
    "causal, odd lengths": Case(FlashSpec(), 61, 61),
    "causal, blocks longer than rows": Case(FlashSpec(), 61, 61, rows=8, block=32),
    "causal, one block": Case(FlashSpec(), 5, 5, rows=16, block=16),
    "queries of a longer cache": Case(FlashSpec(), 20, 64, offset=17),
    "queries before all keys": Case(FlashSpec(), 40, 64, offset=-20),
    "queries past all keys": Case(FlashSpec(window=10), 40, 50, offset=40),
    "window": Case(FlashSpec(window=11), 61, 61),
    "window of one": Case(FlashSpec(window=1), 40, 40),
    "window, both sides": Case(FlashSpec(causal=False, window=9), 61, 61),
    "window wider than all": Case(FlashSpec(window=1000), 40, 40),
    "chunks, both sides": Case(FlashSpec(causal=False, chunk=20), 61, 61),
    "chunks, window, later queries": Case(FlashSpec(chunk=16, window=6), 30, 61, offset=31),
    "packed": Case(FlashSpec(segments=True), 64, 64, segments=PACKED),
    "packed, both sides": Case(FlashSpec(causal=False, segments=True), 64, 64, segments=PACKED),
    "packed, later queries": Case(FlashSpec(segments=True), 30, 64, offset=34, segments=PACKED),
    "chunks apart": Case(FlashSpec(), 24, 64, chunks=(1, 4, 5, 9)),
    "packed, chunks apart": Case(
        FlashSpec(segments=True), 18, 64, segments=PACKED, chunks=(0, 3, 8)
    ),
}


def segment_ids(case: Case) -> tuple[jax.Array | None, jax.Array | None]:
    if not case.segments:
        return None, None
    rows = [np.repeat(np.arange(1, len(row) + 1), row) for row in case.segments]
    keys = jnp.asarray(np.stack(rows), jnp.int32)
    return keys[:, case.places], keys


def seen_naively(case: Case) -> np.ndarray:
    """[A, L, M], from the definitions, key by key."""
    spec, (query_ids, key_ids) = case.spec, segment_ids(case)
    i = case.places[:, None]
    j = np.arange(case.keys)[None, :]
    seen = np.ones((case.queries, case.keys), bool)
    if spec.causal:
        seen &= j <= i
    if spec.window:
        seen &= abs(i - j) < spec.window
    if spec.chunk:
        seen &= i // spec.chunk == j // spec.chunk
    if query_ids is None or key_ids is None:
        return seen[None]
    return seen & (np.asarray(query_ids)[:, :, None] == np.asarray(key_ids)[:, None, :])


def tables(case: Case) -> list[np.ndarray]:
    """(lower, upper, spans of keys of each block of queries, and of queries of each of keys)."""

    def make(*ids):
        offset = jnp.asarray(case.places[None] - np.arange(case.queries))
        offset = offset if case.chunks else case.offset
        bounds = visible_intervals(case.spec, case.queries, case.keys, offset, *ids)
        shape = (case.rows, case.block, case.keys)
        return *bounds, key_ranges(*bounds, *shape), query_ranges(*bounds, *shape)

    return [np.asarray(part) for part in jax.jit(make)(*segment_ids(case))]


def padded(array, axis: int, block: int, mode: str = "constant") -> np.ndarray:
    """Whole blocks; zeros are what TMA fills in past the end."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % block)
    return np.pad(array, widths, mode=mode)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tables_skip_and_unmask_what_they_can(case: Case):
    """Blocks of one key range: none left out that is seen, no full block masked, none too many."""
    lower, upper, by_rows, by_keys = tables(case)
    seen = seen_naively(case)
    keys = np.arange(-(-case.keys // case.block) * case.block)
    sides = mask_sides(case.spec, case.keys, case.block)
    mask = visible(keys, lower[..., None], upper[..., None], sides)
    wanted = padded(seen, 2, case.block)
    assert np.array_equal(mask, wanted) if sides.any else wanted.all()
    seen = padded(seen, 1, case.rows, "edge")
    for table, mode in ((by_rows, "constant"), (by_keys, "edge")):
        blocks = padded(seen, 2, case.block, mode)
        shape = (case.rows, blocks.shape[2] // case.block, case.block)
        blocks = blocks.reshape(len(seen), -1, *shape)
        live, full = blocks.any(axis=(2, 4)), blocks.all(axis=(2, 4))
        if table is by_keys:
            live, full = live.swapaxes(1, 2), full.swapaxes(1, 2)
        assert table.shape[:2] == live.shape[:2]
        for place in np.ndindex(*table.shape[:2]):
            first, first_full, end_full, end = map(int, table[place])
            assert 0 <= first <= first_full <= end_full <= end <= live.shape[2]
            (visited,) = np.nonzero(live[place])
            assert set(visited) <= set(range(first, end))
            assert full[place][first_full:end_full].all()
            (whole,) = np.nonzero(full[place])
            assert set(whole) == set(range(first_full, end_full))
            if visited.size:
                assert end - first == visited[-1] - visited[0] + 1
            else:
                assert end - first == 1


def test_packed_documents_cost_their_own_blocks():
    """8 documents of 1024 in 8192 tokens: live blocks over all, as the benchmark reports it."""
    ids = jnp.repeat(jnp.arange(8, dtype=jnp.int32), 1024)[None]
    spans = key_ranges(
        *visible_intervals(FlashSpec(segments=True), 8192, 8192, 0, ids, ids), 128, 128, 8192
    )
    plain = key_ranges(*visible_intervals(FlashSpec(), 8192, 8192), 128, 128, 8192)
    blocks = [int((table[..., 3] - table[..., 0]).sum()) for table in (spans, plain)]
    assert blocks == [8 * 8 * 9 // 2, 64 * 65 // 2]


def test_tables_follow_an_offset_known_only_when_run():
    table = jax.jit(lambda offset: visible_intervals(FlashSpec(), 8, 32, offset))
    for offset in (0, 5, 24):
        traced, known = table(jnp.int32(offset)), visible_intervals(FlashSpec(), 8, 32, offset)
        assert all((a == b).all() for a, b in zip(traced, known, strict=True))


def test_segments_must_fit_the_spec():
    spec, q = FlashSpec(segments=True), jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"spec\.segments=True needs query_segments_BL"):
        jax.eval_shape(lambda q: attention.flash_attention(q, q, q, spec), q)
    with pytest.raises(ValueError, match="window=-1 must not be negative"):
        FlashSpec(window=-1)
