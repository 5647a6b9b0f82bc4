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
    UNSEEN,
    Case,
    arrays_of,
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

FINITE_DIFFERENCES = 2e-3  # float32, steps of 1e-2
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


def attend(arrays, operands, spec, **options):
    """`attention` compiled anew (QUERY_BLOCK may have changed), the offset static."""

    def call(arrays, others):
        return attention(*arrays, spec, others._replace(offset=operands.offset), **options)

    return jax.tree.map(np.asarray, jax.jit(call)(arrays, operands))


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
    "name", thinned(["sinks in blocks", "grouped", "soft cap in blocks", "documents"], 4)
)
def test_gradients_equal_finite_differences(name, monkeypatch):
    case, arrays, operands = prepared(name, "float32", monkeypatch)
    inputs = [*arrays[:3], *([operands.sinks_H] if case.sinks else [])]

    def loss(inputs, others):
        sinks_H = inputs[3] if case.sinks else None
        others = others._replace(sinks_H=sinks_H, offset=case.offset)
        out, lse = attention_with_lse(*inputs[:3], case.spec, others, backend="xla")
        return jnp.sum(out * arrays[3]) + jnp.sum(lse * arrays[4])

    rng = np.random.default_rng(3)
    towards = [rng.normal(size=x.shape).astype(np.float32) for x in inputs]
    gradient = jax.jit(jax.grad(loss))(inputs, operands)
    slope = sum(np.vdot(g, d) for g, d in zip(gradient, towards, strict=True))
    value, step = jax.jit(loss), 1e-2
    ends = [
        value([x + way * d for x, d in zip(inputs, towards, strict=True)], operands)
        for way in (step, -step)
    ]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=FINITE_DIFFERENCES)


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


def test_unwritten_keys_have_no_effect_whatever_they_hold():
    case, arrays, operands = CASES["continued"], *arrays_of(CASES["continued"], "float32")
    q, *kv = arrays[:3]
    last = case.offset + case.length
    assert last < kv[0].shape[1]
    wanted = attend((q, *kv), operands, case.spec)
    for strange in (1e6, np.nan, np.inf):
        changed = [np.concatenate([x[:, :last], strange + x[:, last:]], axis=1) for x in kv]
        np.testing.assert_array_equal(attend((q, *changed), operands, case.spec), wanted)


# name: rows of both samples that are not finite, and queries that see none of them
STRANGE = {
    "grouped": ([4], [0, 1, 2, 3]),
    "blocks": ([17, 18], list(range(17))),
    "window in blocks": ([20], [*range(20), *range(31, 45)]),
    "chunks in blocks": ([16], [*range(16), *range(21, 45)]),
    "window on both sides": ([3], list(range(8, 37))),
    "documents within pieces": ([69], list(range(69))),
}


@pytest.mark.parametrize(
    ("name", "value"),
    thinned([("blocks", np.inf), ("grouped", -np.inf), *((n, np.nan) for n in STRANGE)], 3),
)
def test_non_finite_values_reach_only_queries_that_see_them(name, value, monkeypatch):
    """In queries, keys and values of a row, and in the cotangents of the queries that see it."""
    case, arrays, operands = prepared(name, "float32", monkeypatch)
    rows, live = STRANGE[name]
    dead = [n for n in range(case.length) if n not in live]
    clean, strange = ([x.copy() for x in arrays] for _ in range(2))
    for array in strange[:3]:
        array[:, rows, :, 1] = value
    for array in clean[3:]:
        array[:, dead] = 0
    for array in strange[3:]:
        array[:, dead] = value
    wanted = run(case, clean, operands, "xla", jax.jit)
    actual = run(case, strange, operands, "xla", jax.jit)
    for key in ("out", "lse", "dq"):
        np.testing.assert_allclose(actual[key][:, live], wanted[key][:, live], rtol=1e-5, atol=1e-6)
    assert np.isnan(actual["out"][:, dead]).all() and np.isnan(actual["lse"][:, dead]).all()
    kept = [n for n in range(case.length) if n not in rows]
    for key in ("dk", "dv"):
        np.testing.assert_allclose(actual[key][:, kept], wanted[key][:, kept], rtol=1e-5, atol=1e-6)
        assert np.isfinite(actual[key]).all()


def test_a_document_of_padding_holds_what_it_likes():
    case, arrays, operands = CASES["documents"], *arrays_of(CASES["documents"], "float32")
    operands = operands._replace(segments_BL=np.broadcast_to(np.arange(12) // 8, (2, 12)))

    def padded(value):
        live = [np.arange(12).reshape(-1, *[1] * (x.ndim - 2)) < 8 for x in arrays]
        filled = [
            np.where(rows, x, np.float32(value)) for rows, x in zip(live, arrays, strict=True)
        ]
        return run(case, filled, operands, "xla", jax.jit)

    actual = padded(np.nan)
    for key, wanted in padded(0).items():
        np.testing.assert_allclose(actual[key][:, :8], wanted[:, :8], rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    case, arrays, operands = (
        CASES["before the keys"],
        *arrays_of(CASES["before the keys"], "float32"),
    )
    actual = run(case, arrays, operands, "xla", jax.jit)
    assert not actual["out"][:, :4].any() and not actual["dq"][:, :4].any()
    assert (actual["lse"][:, :4] == np.float32(UNSEEN)).all() and np.isfinite(actual["lse"]).all()
    case = CASES["sinks alone"]
    arrays, operands = arrays_of(case, "float32")
    actual = run(case, arrays, operands, "xla", jax.jit)
    np.testing.assert_allclose(actual["lse"][:, :4], np.broadcast_to(operands.sinks_H, (2, 4, 2)))
    assert not actual["out"][:, :4].any()


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].block < 512])
def test_keys_outside_the_range_of_a_block_are_seen_by_none_of_it(name, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(xla, "QUERY_BLOCK", case.block)
    keys = case.keys or case.length
    covered, read = [], 0
    for start, stop in xla.pieces(case.length):
        covered += range(start, stop)
        first, last = xla.key_range(start, stop, keys, case.spec, case.offset)
        assert 0 <= first <= last <= keys
        places = case.offset + np.arange(start, stop)[:, None]
        rows = xla.Rows(xla.positions(case.offset, start, stop), None, None, None, None)
        seen = np.asarray(xla.visible(case.spec, rows, jnp.arange(keys)))[0]
        assert not seen[:, :first].any() and not seen[:, last:].any(), places
        if first < last and seen.any():
            assert seen[:, first].any() and seen[:, last - 1].any()
        read += (stop - start) * (last - first)
    assert covered == list(range(case.length))
    if case.spec.window or case.spec.chunk:
        assert read <= 0.8 * case.length * keys
    assert len(xla.pieces(100_003)) <= xla.PIECES + 1


@pytest.mark.parametrize("spec", thinned([FULL, ScoreSpec(), ScoreSpec(window=64)], 3))
def test_memory_grows_linearly_with_the_length(spec, monkeypatch):
    """Forward and backward, packed documents; with the square of it, it would grow four times."""
    monkeypatch.setattr(xla, "QUERY_BLOCK", 16)
    monkeypatch.setattr(xla, "PIECES", 4)

    def temporaries(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(qkv, segments):
            return jnp.sum(attention(*qkv, spec, Operands(0, segments)))

        compiled = jax.jit(jax.grad(loss)).lower((x, x, x), segments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(1024), temporaries(2048)
    assert large <= 2.5 * small
    assert large <= 12 * 4 * 2 * 16 * 2048 + 40 * 2048 * 2 * 4 * 4  # blocks of scores, and rows


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


def test_auto_runs_the_reference_on_a_cpu_and_says_so_once(caplog):
    arrays, operands = arrays_of(CASES["grouped"], "float32")
    choice.log_choice.cache_clear()
    with caplog.at_level(logging.INFO, "maxmeg"):
        actual = [
            attend(arrays[:3], operands, ScoreSpec(), backend=b) for b in ("auto", "auto", "xla")
        ]
    np.testing.assert_array_equal(actual[0], actual[2])
    assert [record.getMessage() for record in caplog.records] == ["attention backend: xla"]


@pytest.mark.parametrize("name", CASES)
def test_pairs_are_those_of_the_mask_and_of_the_blocks(name, monkeypatch):
    """By a loop over all pairs; without documents, which a count of pairs does not know."""
    case = dataclasses.replace(CASES[name], segments=())
    monkeypatch.setattr(xla, "QUERY_BLOCK", case.block)
    keys, call = case.keys or case.length, (case.length, case.keys or case.length)
    seen = np.array([sees(case, 0, *pair) for pair in np.ndindex(call)]).reshape(call)
    assert xla.visible_pairs(*call, case.spec, case.offset) == seen.sum()
    computed = xla.computed_pairs(*call, case.spec, case.offset)
    assert seen.sum() <= computed <= case.length * keys
    if keys == case.length and case.offset == 0:
        blocks = [seen[start:stop].any(axis=0) for start, stop in xla.pieces(keys)]
        assert max(block.sum() for block in blocks) <= xla.most_keys(keys, case.spec) <= keys


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


def test_a_named_backend_that_cannot_run_raises_and_says_why():
    arrays, operands = arrays_of(CASES["grouped"], "float32")
    with pytest.raises(
        ValueError,
        match=r"cudnn cannot run: the device is cpu.*use auto or mosaic or triton or xla for model",
    ):
        attend(arrays[:3], operands, ScoreSpec(), backend="cudnn")
    with pytest.raises(ValueError, match="'flash' is none of auto, cudnn, mosaic, triton, xla"):
        attend(arrays[:3], operands, ScoreSpec(), backend="flash")


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


def dropped(case: Case, first_head: int = 0, rows=(0, 1), heads: slice = slice(None)):
    """Attention whose values are the identity, so that the output shows the weights."""
    q, k = arrays_of(case, "float32")[0][:2]
    k = np.repeat(k, case.heads // case.groups, axis=2)[list(rows)][:, :, heads]
    q = q[list(rows)][:, :, heads]
    v = np.broadcast_to(np.eye(k.shape[1], dtype=np.float32)[:, None], (*k.shape[:3], k.shape[1]))
    spec = AttentionDropout(jax.random.key(5), jnp.array(rows), first_head, 0.3)
    return attend((q, k, v), Operands(dropout=spec), case.spec, backend="xla")  # [B, L, H, M]


def test_dropped_weights_depend_only_on_row_head_and_query(monkeypatch):
    case = CASES["blocks"]
    whole = dropped(case)
    seen = np.tril(np.ones((48, 48), bool))[None, :, None]
    share = (whole == 0)[np.broadcast_to(seen, whole.shape)].mean()
    assert 0.28 < share < 0.32
    assert len(np.unique((whole[:, -1] == 0).reshape(-1, 48), axis=0)) == 8  # 2 rows x 4 heads
    later = dropped(case, first_head=2, heads=slice(2, None))
    np.testing.assert_array_equal(later == 0, whole[:, :, 2:] == 0)
    np.testing.assert_array_equal(dropped(case, rows=(1,)) == 0, whole[1:] == 0)
    monkeypatch.setattr(xla, "PIECES", 6)
    for block in (8, 1):  # blocks of their own, and within pieces
        monkeypatch.setattr(xla, "QUERY_BLOCK", block)
        np.testing.assert_array_equal(dropped(case) == 0, whole == 0)
