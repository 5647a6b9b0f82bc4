"""The decode attention kernel by Mosaic-GPU's interpreter on the CPU, with its race detection.

What runs is the kernel's own program: grid, copies by the page table, rings, barriers, masks,
softmax. Replaced are its two products and its register layouts, for which jax 0.10's interpreter
has no code, by plain ones of the same operands; and memory that results share with the rings.
"""

import dataclasses
import functools

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ops.attention_cases import sees_place
from ops.decode_attention_cases import CASES, TOLERANCE, arrays_of, errors, expected, run

import maxmeg.ops.backend as choice
from maxmeg.kernels import decode_attention as kernel
from maxmeg.kernels import mosaic
from maxmeg.kernels.decode_attention import DECODE_TILES, Pages
from maxmeg.kernels.intervals import FlashSpec
from maxmeg.ops.backend import Device

pytestmark = pytest.mark.slow

# name of a case: dtype, parts of each row, blocks in the rings
INTERPRETED = {
    "drafts longer than the row": ("bfloat16", 1, 2),
    "chunks of all keys": ("float16", 3, 2),  # more parts than blocks
    "everything": ("bfloat16", 2, 2),
    "heads of 192 and 128": ("bfloat16", 2, 2),
}


def contract(a, b, dims) -> jax.Array:
    return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.float32)


def key_products(q_tile, k_tile) -> jax.Array:
    return contract(q_tile[...], k_tile[...], ((1,), (1,)))


def add_values(out, weights, v_tile) -> jax.Array:
    return out + contract(weights, v_tile[...], ((1,), (0,)))


@pytest.fixture
def interpreter(monkeypatch):
    """Lets the interpreter run the kernel for calls that name the backend mosaic."""
    monkeypatch.setattr(choice, "target_device", lambda: Device("cuda", (9, 0)))
    monkeypatch.setattr(kernel, "key_products", key_products)
    monkeypatch.setattr(kernel, "add_values", add_values)
    monkeypatch.setattr(mosaic, "load", lambda ref, layout: ref[...])
    monkeypatch.setattr(mosaic.plgpu, "layout_cast", lambda array, layout: array)
    monkeypatch.setattr(mosaic.plgpu, "broadcasted_iota", interpreted.iota)
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
    actual, race = interpreted.interpret(lambda: run(case, *arrays, "mosaic"), monkeypatch)
    if actual is None:
        return {}, True
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
        seen = np.array([[sees_place(case.spec, i, j) for j in range(length)] for i in places])
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
