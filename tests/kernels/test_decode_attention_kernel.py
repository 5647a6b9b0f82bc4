"""The decode attention kernel by Mosaic-GPU's interpreter on the CPU, with its race detection.

What runs is the kernel's own program: grid, copies by the page table, rings, barriers, masks,
softmax. Replaced are its two products and its register layouts, for which jax 0.10's interpreter
has no code, by plain ones of the same operands; and memory that results share with the rings.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params
from ops.decode_attention_cases import CASES, TOLERANCE, arrays_of, errors, expected, run, sees

import maxmeg.ops.backend as choice
from maxmeg.kernels import decode_attention as kernel
from maxmeg.kernels import mosaic
from maxmeg.kernels.decode_attention import DECODE_TILES, TUNED_SHAPES, Pages
from maxmeg.kernels.intervals import FlashSpec
from maxmeg.ops.backend import Device

pytestmark = pytest.mark.slow

MERGED = 1e-6  # by norm, float32
# name of a case: dtype, parts of each row, blocks in the rings
INTERPRETED = {
    "several blocks": ("bfloat16", 1, 2),  # more blocks than the rings hold
    "pages of 8": ("float16", 1, 3),
    "pages of 128": ("bfloat16", 2, 2),
    "drafts longer than the row": ("bfloat16", 1, 2),
    "window, drafts": ("bfloat16", 3, 1),
    "chunks of all keys": ("float16", 3, 2),  # more parts than blocks
    "nothing at all": ("bfloat16", 2, 2),
    "everything": ("bfloat16", 2, 2),
    "heads of 80": ("bfloat16", 1, 4),
    "heads of 192 and 128": ("bfloat16", 2, 2),
}


def contract(a, b, dims) -> jax.Array:
    return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.float32)


def key_products(q_tile, k_tile) -> jax.Array:
    return contract(q_tile[...], k_tile[...], ((1,), (1,)))


def add_values(out, weights, v_tile) -> jax.Array:
    return out + contract(weights, v_tile[...], ((1,), (0,)))


def plain_iota(dtype, shape, dim, *, layout) -> jax.Array:
    return lax.broadcasted_iota(dtype, shape, dim)


@pytest.fixture
def interpreter(monkeypatch):
    """Lets the interpreter run the kernel for calls that name the backend mosaic."""
    monkeypatch.setattr(choice, "target_device", lambda: Device("cuda", (9, 0)))
    monkeypatch.setattr(kernel, "key_products", key_products)
    monkeypatch.setattr(kernel, "add_values", add_values)
    monkeypatch.setattr(mosaic, "load", lambda ref, layout: ref[...])
    monkeypatch.setattr(mosaic.plgpu, "layout_cast", lambda array, layout: array)
    monkeypatch.setattr(mosaic.plgpu, "broadcasted_iota", plain_iota)
    monkeypatch.setattr(mosaic.plgpu, "RefUnion", lambda *groups: groups)
    return monkeypatch


def interpret(name: str, monkeypatch) -> tuple[dict[str, float], bool]:
    """Errors of a case, and whether a race was found."""
    case, (dtype, parts, stages) = CASES[name], INTERPRETED[name]
    dims = (case.head_dim, case.value_dim or case.head_dim)
    tile = dataclasses.replace(DECODE_TILES[dims], stages=stages)
    monkeypatch.setitem(DECODE_TILES, dims, tile)
    monkeypatch.setattr(kernel, "part_count", lambda *sizes: parts)
    arrays = arrays_of(case, dtype)
    try:
        with params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)):
            actual = run(case, *arrays, "mosaic")
        race = interpret_pallas_call.get_races().races_found
    except jax.errors.JaxRuntimeError as error:  # how jax 0.12 reports a race
        if "RACE DETECTED" not in str(error):
            raise
        return {}, True
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    assert actual["out"].dtype == dtype and actual["lse"].dtype == "float32"
    return errors(actual, expected(case, *arrays)), race


@pytest.mark.parametrize("name", INTERPRETED)
def test_the_interpreted_kernel_is_attention_without_a_race(name: str, interpreter):
    actual, race = interpret(name, interpreter)
    assert not race
    assert all(e <= TOLERANCE[INTERPRETED[name][0]] for e in actual.values()), actual


def test_a_program_that_does_not_wait_for_its_copies_is_a_race(interpreter):
    interpreter.setattr(mosaic.plgpu, "barrier_wait", lambda barrier: None)
    assert interpret("chunks of all keys", interpreter)[1]


@pytest.mark.parametrize("name", ["several blocks", "drafts longer than the row", "everything"])
def test_spans_hold_what_is_seen_and_no_more(name: str):
    """Of every row: bounds of each query, positions that any sees, and blocks of keys."""
    case, keys = CASES[name], 16
    spec = FlashSpec(case.spec.causal, case.spec.window, case.spec.chunk)
    capacity = -(-max(case.lengths) // 64) * 64
    lengths = jnp.array(case.lengths, jnp.int32)
    table = kernel.visible_spans(spec, lengths, case.queries, keys, capacity)
    for row, length in enumerate(case.lengths):
        places = length - case.queries + np.arange(case.queries)
        seen = np.array([[sees(case.spec, i, j) for j in range(length)] for i in places])
        seen = np.pad(seen.reshape(case.queries, length), ((0, 0), (0, capacity - length)))
        lower, upper, span = (np.asarray(part)[row] for part in table)
        positions = np.arange(capacity)
        between = (positions >= lower[:, None]) & (positions < upper[:, None])
        np.testing.assert_array_equal(between, seen)
        first, first_full, end_full, end, low, high = span
        live = seen.any(axis=0)
        np.testing.assert_array_equal((positions >= low) & (positions < high), live)
        blocks = live.reshape(-1, keys).any(axis=1)
        index = np.arange(len(blocks))
        np.testing.assert_array_equal((index >= first) & (index < end), blocks)
        full = seen.all(axis=0).reshape(-1, keys).all(axis=1)
        assert full[first_full:end_full].all() and full.sum() == end_full - first_full


def test_merged_parts_are_the_whole():
    """A softmax over three parts, of which one sees nothing and holds NaN, and one is a sink."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(2, 3, 7, 16)).astype(np.float32) * 4
    values = rng.normal(size=(2, 3, 16, 5)).astype(np.float32)
    sinks = jnp.asarray(rng.normal(size=(3, 7)), jnp.float32)
    halves = np.split(np.arange(16), [5])
    lse = [np.log(np.exp(scores[..., part]).sum(-1)) for part in halves]
    out = [
        np.exp(scores[..., part]) @ values[:, :, part] / np.exp(sums)[..., None]
        for part, sums in zip(halves, lse, strict=True)
    ]
    parts = jnp.stack([*out, np.full_like(out[0], np.nan)], axis=1)
    sums = jnp.stack([*lse, np.full_like(lse[0], -np.inf)], axis=1)
    for sink in (None, sinks):
        total = np.exp(scores).sum(-1) + (0 if sink is None else np.exp(sink))
        wanted = (np.exp(scores) @ values / total[..., None], np.log(total))
        for actual, whole in zip(kernel.merge_parts(parts, sums, sink), wanted, strict=True):
            assert np.linalg.norm(actual - whole) <= MERGED * np.linalg.norm(whole)
    nothing = kernel.merge_parts(parts[:, 2:], sums[:, 2:], None)
    assert not nothing[0].any() and (nothing[1] == -np.inf).all()


@pytest.mark.parametrize(
    ("programs", "blocks", "parts"),
    [
        *((8, 2048, 33), (64, 512, 4), (512, 128, 1), (2048, 16, 1), (8, 1, 1), (8, 0, 1)),
        *((1, 3, 3), (2048, 512, 5), (512, 10**6, 128)),
    ],
)
def test_rows_are_split_until_the_gpu_is_full_or_parts_are_short(programs, blocks, parts):
    assert kernel.part_count(programs, blocks, 264) == parts


def arrays(dtype=jnp.bfloat16, heads=8, groups=2, dim=64, page=16, queries=1):
    array = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    pool = array((9, page, groups, dim))
    indices = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 4), (3,)))
    return array((3, queries, heads, dim)), Pages(pool, pool, *indices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": jnp.float32}, "not all bfloat16 or all float16"),
        ({"dim": 40}, r"\(40, 40\) are none of"),
        ({"heads": 3}, "query heads=3 are not a multiple of key heads=2"),
        ({"queries": 17}, "17 queries of 4 heads per key head are more than 64 rows"),
        ({"page": 4}, "pages have 4 slots: supported are 8, 16, 32 and multiples of 64"),
        ({"page": 96}, "pages have 96 slots"),
    ],
)
def test_unsupported_input_is_refused(options: dict, message: str):
    assert kernel.decode_refuses(*arrays()) == ""
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *all: kernel.paged_attention(*all, FlashSpec()), *arrays(**options))


@pytest.mark.parametrize("options", [{"page": 16}, {"dim": 256, "page": 128, "queries": 4}])
def test_it_lowers_for_a_gpu(options: dict):
    """With the layouts of registers and memory, which the interpreter does not know."""
    spec = FlashSpec(window=100, softcap=30.0)
    call = jax.jit(functools.partial(kernel.paged_attention, spec=spec))
    lowered = call.trace(*arrays(**options)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_every_tuned_shape_is_taken():
    for shape in TUNED_SHAPES.values():
        q = jax.ShapeDtypeStruct((1, shape.queries, shape.heads, shape.head_dim), jnp.bfloat16)
        dims = (shape.head_dim, shape.values)
        pools = [
            jax.ShapeDtypeStruct((2, shape.page, shape.key_heads, dim), jnp.bfloat16)
            for dim in dims
        ]
        assert kernel.decode_refuses(q, Pages(*pools, None, None)) == ""
        assert shape.length % shape.page == 0
