"""The kernels of linear + cross entropy by the interpreter, alone and as a backend of the op.

tests/absent/test_cross_entropy_memory.py compiles them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import COMPLETE, WRITES_PAST_THE_END, interpret
from ops.cross_entropy_cases import TOLERANCE, Case, arrays_of, error, expected, run

import maxmeg.ops.backend as choice
import maxmeg.ops.cross_entropy.mosaic as mosaic
from maxmeg.kernels import linear_cross_entropy as kernel
from maxmeg.kernels import matmul
from maxmeg.kernels.linear_cross_entropy import Logits, split_count
from maxmeg.kernels.matmul import Tiling
from maxmeg.ops.backend import Device

pytestmark = pytest.mark.slow

SMALL = Tiling(columns=64, stages=2, consumers=1, right="NK")
EDGE = 8 if WRITES_PAST_THE_END else 64  # jax 0.10 drops copies that are partly past the end
EVERYTHING = Logits(softcap=3.0, z_loss=0.1, target_share=0.9, uniform=0.1 / 150)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(kernel, "STATISTICS_TILING", SMALL)
    monkeypatch.setattr(kernel, "GRADIENT_TILING", SMALL)
    for module in (kernel, matmul):
        monkeypatch.setattr(module, "MULTIPROCESSORS", 3)
    if not COMPLETE:
        monkeypatch.setattr(kernel.plgpu, "layout_cast", lambda x, layout: x)
    return monkeypatch


def arrays(tokens: int, words: int, real: int, width: int = 64):
    """(h, w, targets), some of which are no words."""
    rng = np.random.default_rng(words)
    h, w = (jnp.asarray(0.3 * rng.normal(size=(n, width)), jnp.bfloat16) for n in (tokens, words))
    targets = rng.integers(0, real, tokens)
    targets[::5] = -1
    return h, w, jnp.asarray(targets, jnp.int32)


def logits_in_float64(h, w, logits: Logits) -> np.ndarray:
    raw = np.asarray(h, np.float64) @ np.asarray(w, np.float64).T
    return logits.softcap * np.tanh(raw / logits.softcap) if logits.softcap else raw


# tokens, words, words that count
SHAPES = [(64, 64, 64, Logits()), (72, 136, 70, EVERYTHING)]  # a tile of no words among them


@pytest.mark.parametrize(("tokens", "words", "real", "logits"), SHAPES)
def test_statistics_of_the_logits_without_a_race(tokens, words, real, logits, small):
    h, w, targets = arrays(tokens, words, real)
    call = lambda: kernel.statistics(h, w, targets, jnp.int32(real), logits)  # noqa: E731
    (largest, total, of_target, every), race = interpret(call, small)
    z = logits_in_float64(h, w, logits)[:, :real]
    hit = np.arange(real) == np.asarray(targets)[:, None]
    assert not race and largest.shape == (tokens,)
    assert error(largest, z.max(axis=1)) <= TOLERANCE["float32"]
    assert error(total, np.exp(z - np.float64(largest)[:, None]).sum(1)) <= TOLERANCE["float32"]
    assert error(of_target, np.where(hit, z, 0).sum(axis=1)) <= TOLERANCE["float32"]
    assert (every is None) == (not logits.uniform)
    if every is not None:
        assert error(every, z.sum(axis=1)) <= TOLERANCE["float32"]


# tokens, words, words that count, first of the range, its number
RANGES = [
    (64, 64, 64, 0, 64, Logits()),
    (64 + EDGE, 256, 185, 64, 64 + EDGE, EVERYTHING),
]


@pytest.mark.parametrize(("tokens", "words", "real", "start", "number", "logits"), RANGES)
def test_gradient_of_the_logits_without_a_race(tokens, words, real, start, number, logits, small):
    h, w, targets = arrays(tokens, words, real)
    z = logits_in_float64(h, w, logits)
    logsumexp = np.log(np.exp(z[:, :real]).sum(axis=1))
    weights = np.linspace(0, 2, tokens)
    rows = (targets, *(jnp.asarray(x, jnp.float32) for x in (weights, logsumexp)))
    h = h.at[0].set(jnp.nan)  # of weight 0
    span = (jnp.int32(real), jnp.int32(start), number)
    actual, race = interpret(lambda: kernel.logit_gradient(h, w, rows, span, logits), small)
    hit = np.arange(words) == np.asarray(targets)[:, None]
    wanted = np.exp(z - logsumexp[:, None]) * (1 + 2 * logits.z_loss * logsumexp[:, None])
    wanted -= logits.uniform + logits.target_share * hit
    if logits.softcap:
        wanted *= 1 - (z / logits.softcap) ** 2
    wanted = (wanted * weights[:, None] * (np.arange(words) < real))[:, start : start + number]
    assert not race and actual.dtype == jnp.bfloat16 and not actual[0].any()
    assert error(actual, wanted) <= TOLERANCE["bfloat16"]


def test_the_backend_is_the_reference(small):
    """Loss and gradients of the whole op, backward in chunks of words that do not divide."""
    small.setattr(choice, "target_device", lambda: Device("cuda", (9, 0)))
    small.setattr("maxmeg.ops.cross_entropy.call.target_device", lambda: Device("cuda", (9, 0)))
    small.setattr(mosaic, "CHUNK", 64 * 128)
    small.setattr(mosaic, "MULTIPLE", 64)
    case = Case(61, 64, 192, 150, 0.1, 3.0, 0.1, bad_targets=True, large=0.3)
    assert mosaic.chunk_words(64, 192) == 128  # of 61 tokens, in whole blocks
    given = arrays_of(case, "bfloat16")
    actual, race = interpret(lambda: run(case, given, "mosaic"), small)
    wanted = expected(case, given)
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


def test_every_tuned_shape_is_taken():
    for shape in kernel.TUNED_SHAPES.values():
        assert dataclasses.asdict(shape.logits)
        h, w = (
            jax.ShapeDtypeStruct((n, shape.width), jnp.bfloat16)
            for n in (shape.tokens, shape.words)
        )
        assert kernel.cross_entropy_refuses(h, w) == ""
