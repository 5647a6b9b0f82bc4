"""The Pallas-Triton attention kernels through Pallas' interpreter, forward and backward.

tests/absent/test_triton_kernels.py compiles them for GPUs.
"""

import functools
import importlib.util
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.attention_cases import CASES, TOLERANCE, arrays_of, error, expected, run

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
SHARED = ["before the keys", "uneven blocks", "chunks continued", "everything"]
SHARED += ["documents of queries and keys"]
ROUNDED = ["blocks continued", "heads of 80"]


def interpreted(monkeypatch) -> str:
    """The backend as it is, but for the machine that runs it."""
    attend = functools.partial(attention_triton.attend, tiles=SMALL)
    backend = types.SimpleNamespace(refuses=lambda *call: "", attend=attend)
    monkeypatch.setitem(op.BACKENDS, "interpreted", backend)
    return "interpreted"


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, "float32") for n in SHARED] + [(n, "bfloat16") for n in ROUNDED]
)
def test_results_and_gradients_equal_the_reference(name: str, dtype: str, monkeypatch):
    arrays, operands = arrays_of(CASES[name], dtype)
    actual = run(CASES[name], arrays, operands, interpreted(monkeypatch), jax.jit)
    wanted = expected(CASES[name], arrays, operands)
    assert actual["out"].dtype == dtype and actual["lse"].dtype == "float32"
    errors = {key: error(actual[key], wanted[key]) for key in actual}
    assert all(value <= TOLERANCE[dtype] for value in errors.values()), errors


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
