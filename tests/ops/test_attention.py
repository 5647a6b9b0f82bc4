"""Every attention backend over one table, against softmax attention in float64 NumPy."""

import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.attention_cases import (
    CASES,
    FULL,
    TOLERANCE,
    Case,
    arrays_of,
    dropout_factors,
    error,
    expected,
    run,
    sees,
)
from tables import thinned

import maxmeg.ops.attention.call as module
import maxmeg.ops.attention.xla as xla
from maxmeg.ops import backend as choice
from maxmeg.ops.attention.call import attention, attention_with_lse
from maxmeg.ops.attention.spec import AttentionDropout, Operands, ScoreSpec
from maxmeg.ops.backend import Device

CPU = Device("cpu")
WITHIN_PIECES = 2  # queries of a block so small that a piece holds several
ROUNDED = ("grouped", "uneven blocks", "documents", "everything", "heads of 128")


def can_run(backend: str) -> bool:
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    device = choice.target_device()
    return not module.BACKENDS[backend].refuses(x, x, x, ScoreSpec(), Operands(), device)


BACKENDS = [backend for backend in module.BACKENDS if can_run(backend)]


def prepared(name: str, dtype: str, monkeypatch) -> tuple:
    case = CASES[name]
    monkeypatch.setattr(xla, "QUERY_BLOCK", case.block)
    if case.block <= WITHIN_PIECES:
        monkeypatch.setattr(xla, "PIECES", 4)  # each is compiled separately
    return case, *arrays_of(case, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    thinned([(n, "float32") for n in CASES] + [(n, "bfloat16") for n in ROUNDED], 9),
)
def test_results_and_gradients_equal_the_reference(name, dtype, backend, monkeypatch):
    case, arrays, operands = prepared(name, dtype, monkeypatch)
    device = choice.target_device()
    if reason := module.BACKENDS[backend].refuses(*arrays[:3], case.spec, operands, device):
        with pytest.raises(ValueError, match=re.escape(reason)):  # named, it never gives way
            run(case, arrays, operands, backend, jax.jit)
        return
    wanted = expected(case, arrays, operands)
    actual = run(case, arrays, operands, backend, jax.jit)
    assert set(actual) == set(wanted) - (set() if case.sinks else {"dsinks"})
    assert actual["out"].dtype == dtype and actual["lse"].dtype == "float32"
    errors = {key: error(actual[key], wanted[key]) for key in actual}
    assert all(e <= TOLERANCE[dtype] for e in errors.values()), errors


@pytest.mark.parametrize(
    "name", ["one query", "before the keys", "window continued", "chunks continued", "everything"]
)
def test_a_traced_offset_is_a_static_one(name, monkeypatch):
    case, arrays, operands = prepared(name, "float32", monkeypatch)
    run = jax.jit(
        lambda arrays, operands: attention_with_lse(*arrays, case.spec, operands, backend="xla")
    )
    out, lse = run(arrays[:3], operands._replace(offset=np.int32(case.offset)))
    wanted = expected(case, arrays, operands)
    assert error(out, wanted["out"]) <= TOLERANCE["float32"]
    assert error(lse, wanted["lse"]) <= TOLERANCE["float32"]


@pytest.mark.parametrize("spec", thinned([ScoreSpec(window=64), FULL, ScoreSpec()], 3))
def test_memory_does_not_hold_all_scores(spec, monkeypatch):
    """Forward and backward, packed documents: scores of one block and some copies of the rows."""
    B, L, H, K, block = 1, 2048, 2, 4, 16
    monkeypatch.setattr(xla, "QUERY_BLOCK", block)
    monkeypatch.setattr(xla, "PIECES", 2)
    x, segments = (jax.ShapeDtypeStruct(*a) for a in (((B, L, H, K), "float32"), ((B, L), "int32")))

    def loss(qkv, segments):
        return jnp.sum(attention(*qkv, spec, Operands(0, segments)))

    compiled = jax.jit(jax.grad(loss)).lower((x, x, x), segments).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries <= 4 * (12 * H * block * L + 40 * L * H * K)  # all scores: 4 H L L


@pytest.mark.parametrize("named", ["cudnn", "mosaic", "triton"])
def test_what_an_old_gpu_lacks_is_named_and_auto_takes_the_reference(named, monkeypatch, caplog):
    monkeypatch.setattr(choice, "target_device", lambda: Device("cuda", (7, 0)))
    x = jax.ShapeDtypeStruct((1, 4, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=rf"{named} cannot run: it needs .*found 7\.0"):
        jax.eval_shape(lambda x: attention(x, x, x, backend=named), x)
    choice.log_choice.cache_clear()
    with caplog.at_level(logging.INFO, "maxmeg"):
        for _ in range(2):
            jax.eval_shape(lambda x: attention(x, x, x), x)
    (record,) = caplog.records
    assert record.getMessage().startswith("attention backend: xla (cudnn: it needs compute")


@pytest.mark.parametrize("name", CASES)
def test_blocks_read_the_keys_that_they_see_and_pairs_are_counted(name, monkeypatch):
    """By a loop over all pairs; without documents, which ranges of keys do not know."""
    case = dataclasses.replace(CASES[name], segments=())
    monkeypatch.setattr(xla, "QUERY_BLOCK", case.block)
    keys = case.keys or case.length
    call = (case.length, keys)
    seen = np.array([sees(case, 0, *pair) for pair in np.ndindex(call)]).reshape(call)
    covered, most = [], 0
    for start, stop in xla.pieces(case.length):
        covered += range(start, stop)
        first, last = xla.key_range(start, stop, keys, case.spec, case.offset)
        assert 0 <= first <= last <= keys
        of_block = seen[start:stop].any(axis=0)
        assert not of_block[:first].any() and not of_block[last:].any()
        if of_block.any():
            assert of_block[first] and of_block[last - 1]
        most = max(most, of_block.sum())
    assert covered == list(range(case.length))
    assert len(xla.pieces(100_003)) <= xla.PIECES + 1
    assert xla.visible_pairs(*call, case.spec, case.offset) == seen.sum()
    computed = xla.computed_pairs(*call, case.spec, case.offset)
    assert seen.sum() <= computed <= case.length * keys
    if case.block < 512 and (case.spec.window or case.spec.chunk):
        assert computed <= 0.8 * case.length * keys
    if keys == case.length and case.offset == 0:
        assert most <= xla.most_keys(keys, case.spec) <= keys


WARNED = {  # why: the call
    "softcap=30.0 is not supported": {"spec": ScoreSpec(softcap=30.0)},
    "dtype float32 is neither": {"dtype": "float32"},
    "head dim 512 is not": {"head_dim": 512},
}


@pytest.mark.parametrize("why", WARNED)
def test_attention_in_plain_xla_on_a_gpu_is_a_warning_with_its_price(why, monkeypatch, caplog):
    """1,024 queries in two blocks of 512: 512 x 512 + 512 x 1,024 pairs of 2 x 4 heads."""
    call = {"dtype": "bfloat16", "head_dim": 64, "spec": ScoreSpec()} | WARNED[why]
    monkeypatch.setattr(choice, "target_device", lambda: Device("cuda", (9, 0)))
    monkeypatch.setattr(module, "WARNED", set())
    for length in (512, 1024, 1024):
        x = jax.ShapeDtypeStruct((2, length, 4, call["head_dim"]), call["dtype"])
        jax.eval_shape(lambda x: attention(x, x, x, call["spec"]), x)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    text = record.getMessage()
    assert why in text and "0.0252 GB" in text and "1,024 queries x 768 keys" in text
    assert "1.5 times as many pairs" in text
    assert ("mosaic" in text) == ("softcap" in why)


def test_where_no_backend_can_run_the_error_lists_what_each_supports(monkeypatch):
    monkeypatch.setattr(choice, "target_platform", lambda: "cuda")
    x = jnp.zeros((1, 4, 2, 8), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="no attention backend") as raised:
        attention(x, x, x)
    for text in ("cudnn: dtype float8", "xla: dtypes float8", "by cudnn: bfl", "by xla: every opt"):
        assert text in str(raised.value)


def test_invalid_arguments_are_refused():
    q, k = jnp.zeros((1, 4, 3, 8)), jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="query heads=3 must be a multiple of key heads=2"):
        attention(q, k, k)
    x, y = jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 6, 2, 8))
    segments = np.zeros((1, 4), np.int32)
    with pytest.raises(ValueError, match="4 queries and 6 keys: segments_BL needs key_segments_BM"):
        attention(x, y, y, FULL, Operands(0, segments))
    with pytest.raises(ValueError, match="key_segments_BM needs segments_BL"):
        attention(x, x, x, FULL, Operands(0, None, segments))
    with pytest.raises(ValueError, match=r"key_segments_BM has shape \(1, 4\), needs \(1, 6\)"):
        attention(x, y, y, FULL, Operands(0, segments, segments))
    with pytest.raises(ValueError, match=r"sinks_H has shape \(3,\), needs \(2,\)"):
        attention(x, x, x, FULL, Operands(sinks_H=np.zeros(3, np.float32)))
    for name in ("window", "chunk", "softcap", "scale"):
        with pytest.raises(ValueError, match=f"{name}=-1 must not be negative"):
            ScoreSpec(**{name: -1})


@pytest.mark.parametrize("block", [512, 8, 1])  # 1: within pieces
def test_dropped_weights_depend_only_on_row_head_and_query(block, monkeypatch):
    """Also of some rows and heads of a larger call. (Gradients: test_attention_context.py.)"""
    monkeypatch.setattr(xla, "PIECES", 6)
    monkeypatch.setattr(xla, "QUERY_BLOCK", block)
    case = Case(24, heads=4, groups=2)
    arrays, operands = arrays_of(case, "float32")
    dropout = AttentionDropout(jax.random.key(5), jnp.array([3, 1]), 2, 0.3)
    wanted = expected(case, arrays, operands, dropout_factors(case, dropout))
    how = operands._replace(dropout=dropout)
    call = jax.jit(lambda *qkv: attention_with_lse(*qkv, case.spec, how, backend="xla"))
    for name, array in zip(("out", "lse"), call(*arrays[:3]), strict=True):
        assert error(array, wanted[name]) <= TOLERANCE["float32"], name
