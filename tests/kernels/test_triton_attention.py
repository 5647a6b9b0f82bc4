"""The Pallas-Triton attention kernels through Pallas' interpreter, forward and backward.

tests/absent/test_triton_kernels.py compiles them for GPUs.
"""

import dataclasses
import functools
import importlib.util
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.attention_cases import (
    CASES,
    NAMES,
    TOLERANCE,
    Case,
    arrays_of,
    documents,
    error,
    expected,
    run,
)

import maxmeg.ops.attention.call as op
from maxmeg.kernels import attention_triton as kernels
from maxmeg.kernels.attention import TUNED_SHAPES
from maxmeg.kernels.attention_triton import Tile, Tiles
from maxmeg.kernels.intervals import FlashSpec
from maxmeg.ops.attention import triton as attention_triton
from maxmeg.ops.attention.spec import AttentionDropout, Operands, ScoreSpec
from maxmeg.ops.backend import Device

pytestmark = pytest.mark.slow

# Small, so that a short case has several blocks; queries' and keys' differ, either way round.
SMALL = Tiles(Tile(16, 16, 4, 2), Tile(16, 8, 4, 2), Tile(8, 16, 4, 2), interpreted=True)
NOTHING_ELSE = Operands()
AMPERE = Device("cuda", (8, 0))
# Of the shared table what differs in these kernels: masks, lengths, places, head dims, options.
SHARED = [
    *("one query", "before the keys", "after the keys", "uneven blocks", "window on both sides"),
    *("chunks continued", "documents in blocks", "documents of queries and keys", "everything"),
    *("sinks in blocks", "soft cap in blocks"),
]
ROUNDED = ["blocks continued", "documents, window", "heads of 80"]
# Several blocks of the kernels' own tiles, the last one cut.
LARGE = {
    "64": Case(205, heads=2, head_dim=64, spec=ScoreSpec(window=70)),
    "128": Case(150, 205, heads=2, head_dim=128, offset=55, spec=ScoreSpec(chunk=90)),
    "192, 128": Case(150, heads=1, head_dim=192, value_dim=128, segments=(70, 61, 19)),
    "256": Case(101, heads=1, head_dim=256, spec=ScoreSpec(causal=False, softcap=2.0)),
}


def interpreted(monkeypatch, tiles: Tiles) -> str:
    """The backend as it is, but for the machine that runs it."""
    attend = functools.partial(attention_triton.attend, tiles=tiles)
    backend = types.SimpleNamespace(refuses=lambda *call: "", attend=attend)
    monkeypatch.setitem(op.BACKENDS, "interpreted", backend)
    return "interpreted"


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, "float32") for n in SHARED] + [(n, "bfloat16") for n in ROUNDED]
)
def test_results_and_gradients_equal_the_reference(name: str, dtype: str, monkeypatch):
    arrays, operands = arrays_of(CASES[name], dtype)
    actual = run(CASES[name], arrays, operands, interpreted(monkeypatch, SMALL), jax.jit)
    wanted = expected(CASES[name], arrays, operands)
    assert actual["out"].dtype == dtype and actual["lse"].dtype == "float32"
    errors = {key: error(actual[key], wanted[key]) for key in actual}
    assert all(value <= TOLERANCE[dtype] for value in errors.values()), errors


@pytest.mark.parametrize("name", LARGE)
def test_the_tiles_of_each_head_dim_do(name: str, monkeypatch):
    """Against the reference in XLA, in float32, where both have been through bfloat16's tiles."""
    case = LARGE[name]
    arrays, operands = arrays_of(case, "float32")
    halves = [jnp.asarray(array, jnp.bfloat16) for array in arrays[1:3]]
    tiles = dataclasses.replace(kernels.tiles_of(*halves), interpreted=True)
    actual = run(case, arrays, operands, interpreted(monkeypatch, tiles), jax.jit)
    wanted = run(case, arrays, operands, "xla", jax.jit)
    errors = {key: error(actual[key], wanted[key]) for key in actual}
    assert set(actual) == set(NAMES) - {"dsinks"}
    assert all(value <= TOLERANCE["float32"] for value in errors.values()), errors


def test_an_offset_may_be_traced():
    case = CASES["window continued"]
    arrays, operands = arrays_of(case, "float32")
    attend = functools.partial(attention_triton.attend, spec=case.spec, tiles=SMALL)
    out, lse = jax.jit(lambda qkv, offset: attend(*qkv, operands=Operands(offset)))(
        arrays[:3], np.int32(case.offset)
    )
    wanted = expected(case, arrays, operands)
    assert error(out, wanted["out"]) <= TOLERANCE["float32"]
    assert error(lse, wanted["lse"]) <= TOLERANCE["float32"]


def test_what_is_not_finite_stays_in_its_document():
    """Of 37 queries and keys in blocks of 16 and 8, forward and backward."""
    case = Case(37, segments=(20, 17))
    arrays, operands = arrays_of(case, "float32")
    arrays, strange = ([array.copy() for array in arrays] for _ in range(2))
    operands = Operands(segments_BL=jnp.asarray(operands.segments_BL))
    rows = documents(case.segments) == 1
    for array in strange[:3]:
        array[rows] = np.nan
    for array in (*arrays[3:], *strange[3:]):
        array[rows] = 0

    @jax.jit
    def both(*arrays):
        *qkv, d_out, d_lse = arrays
        attend = functools.partial(attention_triton.attend, tiles=SMALL)
        call = functools.partial(attend, spec=case.spec, operands=operands)
        (out, lse), pull = jax.vjp(call, *qkv)
        return out, lse, *pull((d_out, d_lse))

    for actual, wanted in zip(both(*strange), both(*arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(actual)[~rows], np.asarray(wanted)[~rows])
        assert np.isfinite(np.asarray(wanted)).all()
    assert np.isnan(np.asarray(both(*strange)[0])[rows]).all()


def test_parts_of_a_head_are_powers_of_two_that_fill_it():
    for head_dim in range(kernels.SMALLEST_PART, kernels.LONGEST_HEAD + 1, kernels.SMALLEST_PART):
        parts = kernels.columns(head_dim)
        covered = [column for first, count in parts for column in range(first, first + count)]
        assert covered == list(range(head_dim))
        assert all(count.bit_count() == 1 and count >= kernels.SMALLEST_PART for _, count in parts)
    assert kernels.columns(192) == [(0, 128), (128, 64)]


def test_every_head_dim_has_tiles_of_powers_of_two():
    for dtype in kernels.DTYPES:
        for head_dim in range(1, kernels.LONGEST_HEAD + 1):
            array = jax.ShapeDtypeStruct((1, 1, 1, head_dim), jnp.dtype(dtype))
            assert kernels.tiles_of(array, array)
    for tiles in kernels.TILES.values():
        for tile in (tiles.forward, tiles.query_gradient, tiles.key_gradients):
            assert all(count.bit_count() == 1 for count in (tile.rows, tile.keys, tile.warps))
            assert min(tile.rows, tile.keys) >= kernels.SMALLEST_PART
    for shape in TUNED_SHAPES.values():
        assert not kernels.flash_refuses(*qkv(shape.head_dim, groups=shape.key_heads, heads=128))


def qkv(dim: int = 64, dtype="bfloat16", heads: int = 4, groups: int = 2) -> tuple:
    q = jax.ShapeDtypeStruct((1, 128, heads, dim), jnp.dtype(dtype))
    return q, *[jax.ShapeDtypeStruct((1, 128, groups, dim), jnp.dtype(dtype))] * 2


def refusal(arrays: tuple, device: Device, operands: Operands = NOTHING_ELSE) -> str:
    q, k, v = arrays
    return attention_triton.refuses(q, k, v, ScoreSpec(), operands, device)


REFUSED = {
    "cpu, not a CUDA GPU": (qkv(), Device("cpu"), NOTHING_ELSE),
    r"8\.0 \(Ampere\) or newer, found 7\.5": (qkv(), Device("cuda", (7, 5)), NOTHING_ELSE),
    r"dtypes \['float64'\] are not one of": (qkv(dtype="float64"), AMPERE, NOTHING_ELSE),
    r"head dims \(query, value\) \(264, 264\) exceed 256": (qkv(264), AMPERE, NOTHING_ELSE),
    "query heads=3 are not a multiple of key heads=2": (qkv(heads=3), AMPERE, NOTHING_ELSE),
    "dropout is not supported": (
        qkv(),
        AMPERE,
        Operands(dropout=AttentionDropout(jnp.zeros(2, jnp.uint32), jnp.zeros(1), 0, 0.1)),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_backend_that_cannot_run_is_refused(message: str):
    arrays, device, operands = REFUSED[message]
    assert re.search(message, refusal(arrays, device, operands))


def test_a_jax_without_triton_is_refused(monkeypatch):
    for device in (AMPERE, Device("cuda", (9, 0)), Device("cuda", (12, 0)), Device("cuda")):
        assert not refusal(qkv(), device)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "has no Pallas-Triton" in refusal(qkv(), AMPERE)


def test_arrays_and_ids_must_fit_the_kernels():
    def attend(spec: FlashSpec, arrays: tuple):
        jax.eval_shape(functools.partial(kernels.flash_attention, spec=spec), *arrays)

    with pytest.raises(ValueError, match="backend triton cannot run: head dims"):
        attend(FlashSpec(), qkv(300))
    with pytest.raises(ValueError, match=r"spec\.segments=True needs query_segments_BL"):
        attend(FlashSpec(segments=True), qkv())
