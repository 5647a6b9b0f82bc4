"""The kernels of linear + cross entropy by the interpreter, as a backend of the op.

tests/absent/test_cross_entropy_memory.py compiles them.
"""

import jax
import jax.numpy as jnp
import pytest
from interpreted import COMPLETE, interpret
from ops.cross_entropy_cases import TOLERANCE, Case, arrays_of, error, expected, run

import maxmeg.ops.backend as choice
import maxmeg.ops.cross_entropy.mosaic as mosaic
from maxmeg.kernels import linear_cross_entropy as kernel
from maxmeg.kernels import matmul
from maxmeg.kernels.linear_cross_entropy import split_count
from maxmeg.kernels.matmul import Tiling
from maxmeg.ops.backend import Device

pytestmark = pytest.mark.slow

HOPPER = Device("cuda", (9, 0))
SMALL = Tiling(columns=64, stages=2, consumers=1, right="NK")


def test_the_backend_is_the_reference(monkeypatch):
    """Loss and gradients of the whole op, backward in chunks of words that do not divide."""
    monkeypatch.setattr(choice, "target_device", lambda: HOPPER)
    monkeypatch.setattr("maxmeg.ops.cross_entropy.call.target_device", lambda: HOPPER)
    monkeypatch.setattr(mosaic, "CHUNK", 64 * 128)
    monkeypatch.setattr(mosaic, "MULTIPLE", 64)
    monkeypatch.setattr(kernel, "STATISTICS_TILING", SMALL)
    monkeypatch.setattr(kernel, "GRADIENT_TILING", SMALL)
    for module in (kernel, matmul):
        monkeypatch.setattr(module, "MULTIPROCESSORS", 3)
    if not COMPLETE:
        monkeypatch.setattr(kernel.plgpu, "layout_cast", lambda x, layout: x)
    case = Case(61, 64, 192, 150, 0.1, 3.0, 0.1, bad_targets=True, large=0.3)
    assert mosaic.chunk_words(64, 192) == 128  # of 61 tokens, in whole blocks
    arrays = arrays_of(case, "bfloat16")
    actual, race = interpret(lambda: run(case, arrays, "mosaic"), monkeypatch)
    wanted = expected(case, arrays)
    assert not race
    errors = {key: error(actual[key], wanted[key]) for key in wanted}
    assert all(e <= TOLERANCE["bfloat16"] for e in errors.values()), errors
    assert all(errors[key] <= TOLERANCE["float32"] for key in ("loss", "losses")), errors


@pytest.mark.parametrize(
    ("tokens", "words", "expected"), [(8192, 131_072, 8), (128, 131_072, 128), (8192, 128, 1)]
)
def test_parts_of_the_words_leave_few_multiprocessors_idle(tokens, words, expected):
    rows, columns = tokens // 128, -(-words // 256)
    splits = split_count(rows, columns)
    assert splits == expected
    each = -(-columns // splits)
    assert (splits - 1) * each < columns <= splits * each  # none is empty
    if rows * columns >= 132:
        waves = -(-rows * splits // 132)
        assert rows * columns / (132 * waves * each) >= 0.9


def test_chunks_of_words_are_as_equal_as_can_be():
    assert mosaic.chunk_words(8192, 131_072) == 16_384
    assert mosaic.chunk_words(8192, 128_256) == 16_128
    assert mosaic.chunk_words(512, 50_304) == 50_304
    assert mosaic.chunk_words(8192, 50_304) % 256 == 0


def test_unsupported_inputs_are_refused():
    h, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 64), (64, 64)))
    assert kernel.cross_entropy_refuses(h, w) == ""
    for change, reason in (
        ({"dtype": jnp.float32}, "dtype float32 is neither of bfloat16, float16"),
        ({"shape": (64, 12)}, "is not a multiple of 8 by 64 bfloat16"),
        ({"shape": (12, 64)}, "12 words are not a multiple of 64"),
    ):
        other = jax.ShapeDtypeStruct(**{"shape": w.shape, "dtype": w.dtype} | change)
        assert reason in kernel.cross_entropy_refuses(
            jax.ShapeDtypeStruct((4, other.shape[1]), other.dtype), other
        )
