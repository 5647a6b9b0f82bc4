"""The loops of the flash attention kernels, tile by tile on the CPU, against plain attention.

`model_forward` and its like walk the blocks that the kernels walk, in their order, with the
kernels' own tables, masks, softmax and gradients of scores; the tensor cores, copies and barriers
of the kernels are not here (test_flash_interpreted.py runs, tests/absent/test_kernels.py compiles
the kernels).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.kernels import attention
from maxmeg.kernels.attention_backward import (
    BACKWARD_TILES,
    Span,
    probabilities,
    row_statistics,
)
from maxmeg.kernels.attention_forward import FORWARD_TILES, Scores, online_softmax, visits
from maxmeg.kernels.intervals import (
    FlashSpec,
    MaskSides,
    key_ranges,
    mask_sides,
    query_ranges,
    visible,
    visible_intervals,
)
from maxmeg.kernels.mosaic import LOG2E
from maxmeg.parallel.sequence import chunk_places

pytestmark = pytest.mark.slow

FORWARD_TOLERANCE = 2e-6  # by norm
GRADIENT_TOLERANCE = 5e-6


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
    "full": Case(FlashSpec(causal=False), 32, 32),
    "full, odd lengths": Case(FlashSpec(causal=False), 33, 45),
    "one query": Case(FlashSpec(causal=False), 1, 45),
    "causal": Case(FlashSpec(), 64, 64),
    "causal, odd lengths": Case(FlashSpec(), 61, 61),
    "causal, blocks longer than rows": Case(FlashSpec(), 61, 61, rows=8, block=32),
    "causal, one block": Case(FlashSpec(), 5, 5, rows=16, block=16),
    "later queries": Case(FlashSpec(), 20, 61, offset=41),
    "queries of a longer cache": Case(FlashSpec(), 20, 64, offset=17),
    "queries before all keys": Case(FlashSpec(), 40, 64, offset=-20),
    "queries past all keys": Case(FlashSpec(window=10), 40, 50, offset=40),
    "window": Case(FlashSpec(window=11), 61, 61),
    "window of one": Case(FlashSpec(window=1), 40, 40),
    "window, both sides": Case(FlashSpec(causal=False, window=9), 61, 61),
    "window wider than all": Case(FlashSpec(window=1000), 40, 40),
    "chunks": Case(FlashSpec(chunk=24), 61, 61),
    "chunks, both sides": Case(FlashSpec(causal=False, chunk=20), 61, 61),
    "chunks, window, later queries": Case(FlashSpec(chunk=16, window=6), 30, 61, offset=31),
    "packed": Case(FlashSpec(segments=True), 64, 64, segments=PACKED),
    "packed, both sides": Case(FlashSpec(causal=False, segments=True), 64, 64, segments=PACKED),
    "packed, window": Case(FlashSpec(segments=True, window=7), 64, 64, segments=PACKED),
    "packed, later queries": Case(FlashSpec(segments=True), 30, 64, offset=34, segments=PACKED),
    "chunks apart": Case(FlashSpec(), 24, 64, chunks=(1, 4, 5, 9)),
    "packed, chunks apart": Case(
        FlashSpec(segments=True), 18, 64, segments=PACKED, chunks=(0, 3, 8)
    ),
    "soft cap": Case(FlashSpec(softcap=1.5), 40, 40),
    "scale": Case(FlashSpec(scale=0.7), 40, 40),
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


def arrays(case: Case, dtype=np.float32) -> list[jax.Array]:
    batch, heads, groups, dim, value_dim = max(len(case.segments), 1), 2, 1, 8, 6
    random = np.random.default_rng(0)
    shapes = [
        (batch, case.queries, heads, dim),
        (batch, case.keys, groups, dim),
        (batch, case.keys, groups, value_dim),
        (batch, case.queries, heads, value_dim),
        (batch, heads, case.queries),
    ]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


def scaled(case: Case) -> FlashSpec:
    return dataclasses.replace(case.spec, scale=case.spec.scale or 8**-0.5)


def naive(case: Case, q, k, v) -> tuple[jax.Array, jax.Array]:
    """(output, log-sum-exp [B, H, L]) with all scores at once; zeros and -inf where none is."""
    spec = scaled(case)
    return plain(spec.scale, spec.softcap, seen_naively(case), q, k, v)


@jax.jit
def plain(scale, softcap, seen, q, k, v) -> tuple[jax.Array, jax.Array]:
    k, v = (jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    scores = jnp.einsum("blhk,bmhk->bhlm", q, k, precision="highest") * scale
    cap = jnp.where(softcap > 0, softcap, 1.0)
    scores = jnp.where(softcap > 0, cap * jnp.tanh(scores / cap), scores)
    seen = seen[:, None]
    lse = jax.nn.logsumexp(jnp.where(seen, scores, -1e30), axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0.0)
    out = jnp.einsum("bhlm,bmhk->blhk", weights, v, precision="highest")
    return out, jnp.where(seen.any(-1), lse, -math.inf)


@functools.cache
def tables(case: Case) -> tuple[np.ndarray, ...]:
    """(lower, upper, spans of keys of each block of queries, and of queries of each of keys)."""

    def make(*ids):
        offset = jnp.asarray(case.places[None] - np.arange(case.queries))
        offset = offset if case.chunks else case.offset
        bounds = visible_intervals(case.spec, case.queries, case.keys, offset, *ids)
        shape = (case.rows, case.block, case.keys)
        return *bounds, key_ranges(*bounds, *shape), query_ranges(*bounds, *shape)

    return tuple(map(np.asarray, jax.jit(make)(*segment_ids(case))))


@dataclasses.dataclass(frozen=True)
class Walk:
    """The programs of a kernel in which each owns a block of queries, or one of keys."""

    case: Case
    owner: str

    @property
    def sides(self) -> MaskSides:
        return mask_sides(self.case.spec, self.case.keys, self.case.block if self.rows_own else 1)

    @property
    def rows_own(self) -> bool:
        return self.owner == "queries"

    def programs(self, batch: int, heads: int):
        """(batch row, head, program, its span)."""
        spans = tables(self.case)[2 if self.rows_own else 3]
        for row, head, program in np.ndindex(batch, heads, spans.shape[1]):
            yield (
                row,
                head,
                program,
                Span(*map(jnp.int32, spans[min(row, len(spans) - 1), program])),
            )

    def visits(self, span: Span, last: jax.Array) -> list[tuple[bool, int]]:
        """(masked, block) in the order of the kernel's loops before `last`."""
        ends = (self.sides.lower, self.sides.upper)
        loops = visits(*(ends if self.rows_own else ends[::-1]), span, last)
        return [(masked, j) for masked, start, stop in loops for j in range(int(start), int(stop))]

    def mask(self, row: int, rows: slice, keys: slice) -> np.ndarray | None:
        bounds = (padded(bound, 1, self.case.rows, "edge") for bound in tables(self.case)[:2])
        lower, upper = (bound[min(row, len(bound) - 1), rows, None] for bound in bounds)
        return visible(np.arange(keys.start, keys.stop)[None, :], lower, upper, self.sides)


def padded(array, axis: int, block: int, mode: str = "constant", **how) -> np.ndarray:
    """Whole blocks; zeros are what TMA fills in past the end."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % block)
    return np.pad(np.asarray(array), widths, mode=mode, **how)


def block_of(number: int, length: int) -> slice:
    return slice(number * length, (number + 1) * length)


softmax_step = jax.jit(online_softmax, static_argnums=0)


def model_forward(case: Case, q, k, v) -> tuple[np.ndarray, np.ndarray]:
    spec, groups, walk = scaled(case), q.shape[2] // k.shape[2], Walk(case, "queries")
    scores = Scores(spec.scale, spec.softcap)
    q = padded(q, 1, case.rows)
    k, v = (padded(array, 1, case.block) for array in (k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]), np.float32)
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    for row, head, program, span in walk.programs(q.shape[0], q.shape[2]):
        rows = block_of(program, case.rows)
        total, maximum = np.zeros(case.rows, np.float32), np.full(case.rows, -math.inf, np.float32)
        acc = np.zeros((case.rows, v.shape[-1]), np.float32)
        last = span.end - 1  # stands outside the loops, and is masked if anything can be
        for masked, block in [*walk.visits(span, last), (walk.sides.any, int(last))]:
            keys = block_of(block, case.block)
            products = q[row, rows, head] @ k[row, keys, head // groups].T
            mask = walk.mask(row, rows, keys) if masked else None
            step = softmax_step(scores, products, mask, maximum, total)
            weights, shrink, maximum, total = map(np.asarray, step)
            acc = acc * shrink[:, None] + weights @ v[row, keys, head // groups]
        out[row, rows, head] = acc / np.where(total == 0.0, 1.0, total)[:, None]
        with np.errstate(divide="ignore"):
            lse[row, head, rows] = maximum / LOG2E + np.log(total)
    return out[:, : case.queries], lse[:, :, : case.queries]


@functools.partial(jax.jit, static_argnums=0)
def score_slopes(scores: Scores, products, weight_slope, lse, delta, mask):
    weights, slope = probabilities(scores, products, mask, lambda: lse)
    return weights, slope * (weight_slope - delta)


def model_backward(case: Case, q, k, v, out, lse, slope, lse_slope) -> list[np.ndarray]:
    """Gradients of q, k and v, each as its own kernel makes it."""
    lse, delta = row_statistics(out, lse, slope, lse_slope)
    lse = padded(lse, 2, case.rows, constant_values=math.inf)
    delta = padded(delta, 2, case.rows)
    q, slope = (padded(array, 1, case.rows) for array in (q, slope))
    k, v = (padded(array, 1, case.block) for array in (k, v))
    spec, groups = scaled(case), q.shape[2] // k.shape[2]
    scores = Scores(spec.scale, spec.softcap)
    q_grad, k_grad, v_grad = (np.zeros(array.shape, np.float32) for array in (q, k, v))
    for walk in (Walk(case, "queries"), Walk(case, "keys")):
        for row, head, program, span in walk.programs(q.shape[0], q.shape[2]):
            for masked, block in walk.visits(span, span.end):
                order = (program, block) if walk.rows_own else (block, program)
                rows, keys = block_of(order[0], case.rows), block_of(order[1], case.block)
                queries, own = (row, rows, head), (row, keys, head // groups)
                mask = walk.mask(row, rows, keys) if masked else None
                numbers = [number[row, head, rows, None] for number in (lse, delta)]
                products = (q[queries] @ k[own].T, slope[queries] @ v[own].T)
                actual = score_slopes(scores, *products, *numbers, mask)
                weights, score_slope = map(np.asarray, actual)
                if walk.rows_own:
                    q_grad[queries] += score_slope @ k[own]
                else:
                    past = np.arange(keys.start, keys.stop) >= case.keys  # never written
                    k_grad[own] += np.where(past[:, None], 0, score_slope.T) @ q[queries]
                    v_grad[own] += np.where(past[:, None], 0, weights.T) @ slope[queries]
    grads = (q_grad[:, : case.queries] * spec.scale, k_grad[:, : case.keys] * spec.scale)
    return [*grads, v_grad[:, : case.keys]]


def error(actual, expected) -> float:
    """Relative, by norm; infinities must agree."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert (np.isinf(actual) == np.isinf(expected)).all()
    finite = np.isfinite(expected)
    distance = np.linalg.norm(actual[finite] - expected[finite])
    return float(distance / max(float(np.linalg.norm(expected[finite])), 1e-30))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_loop_is_attention(case: Case):
    q, k, v, *_ = arrays(case)
    expected = naive(case, q, k, v)
    actual = model_forward(case, q, k, v)
    for part, reference in zip(actual, expected, strict=True):
        assert error(part, reference) < FORWARD_TOLERANCE


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_backward_loops_are_the_gradients(case: Case):
    q, k, v, slope, lse_slope = arrays(case)
    (out, lse), pull = jax.vjp(lambda *inputs: naive(case, *inputs), q, k, v)
    lse_slope = jnp.where(lse == -math.inf, 0.0, lse_slope)
    expected = pull((slope, lse_slope))
    actual = model_backward(case, q, k, v, out, lse, slope, lse_slope)
    for part, reference in zip(actual, expected, strict=True):
        assert error(part, reference) < GRADIENT_TOLERANCE


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tables_skip_and_unmask_what_they_can(case: Case):
    """Blocks of one key range: none left out that is seen, no full block masked, none too many."""
    by_rows, by_keys = tables(case)[2:]
    seen = padded(seen_naively(case), 1, case.rows, "edge")
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


def qkv(dim: int = 64, dtype=jnp.bfloat16, heads: int = 4, groups: int = 2):
    q = jax.ShapeDtypeStruct((1, 128, heads, dim), dtype)
    return q, *[jax.ShapeDtypeStruct((1, 128, groups, dim), dtype)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (qkv(dtype=jnp.float32), "not all bfloat16 or all float16"),
        (qkv(dim=40), r"\(40, 40\) are none of"),
        (qkv(heads=3), "query heads=3 are not a multiple of key heads=2"),
    ],
)
def test_unsupported_inputs_are_refused(arguments, message: str):
    assert attention.flash_refuses(*qkv()) == ""
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *qkv: attention.flash_attention(*qkv, FlashSpec()), *arguments)


def test_segments_must_fit_the_spec():
    with pytest.raises(ValueError, match=r"spec\.segments=True needs query_segments_BL"):
        spec = FlashSpec(segments=True)
        jax.eval_shape(lambda *qkv: attention.flash_attention(*qkv, spec), *qkv())
    with pytest.raises(ValueError, match="window=-1 must not be negative"):
        FlashSpec(window=-1)


def test_shapes_of_results_and_gradients():
    def loss(*arrays):
        out, lse = attention.flash_attention(*arrays, FlashSpec())
        assert out.shape == (1, 128, 4, 64) and lse.shape == (1, 128, 4)
        assert lse.dtype == jnp.float32
        return out.astype(jnp.float32).sum() + lse.sum()

    grads = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), *qkv())
    assert [(grad.shape, grad.dtype) for grad in grads] == [(a.shape, a.dtype) for a in qkv()]


def test_every_tuned_shape_has_a_tile():
    for shape in attention.TUNED_SHAPES.values():
        dims = (shape.head_dim, shape.value_dim or shape.head_dim)
        assert dims in FORWARD_TILES and dims in BACKWARD_TILES
        assert bool(shape.documents) == shape.spec.segments
