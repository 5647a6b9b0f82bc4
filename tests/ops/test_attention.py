"""Every attention backend over one table, against softmax attention in float64 NumPy."""

import dataclasses
import functools
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


# name: rows of both samples that are not finite, and queries that see none of them
STRANGE = {
    "grouped": ([4], [0, 1, 2, 3]),
    "blocks": ([17, 18], list(range(17))),
    "documents": ([7], list(range(7))),  # each row's last document begins before
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


def dropped(first_head: int = 0, rows: tuple[int, ...] = (0, 1)):
    """Attention whose values are the identity, so that the output shows the weights."""
    q, k = arrays_of(DROPPED, "float32")[0][:2]
    k = np.repeat(k, DROPPED.heads // DROPPED.groups, axis=2)
    q, k = (array[list(rows)][:, :, first_head:] for array in (q, k))
    v = np.broadcast_to(np.eye(k.shape[1], dtype=np.float32)[:, None], (*k.shape[:3], k.shape[1]))
    spec = AttentionDropout(jax.random.key(5), jnp.array(rows), first_head, 0.3)
    return attend((q, k, v), Operands(dropout=spec), DROPPED.spec, backend="xla")  # [B, L, H, M]


@functools.cache
def all_dropped() -> np.ndarray:
    return dropped() == 0


DROPPED = Case(24, heads=4, groups=2)


def test_dropped_weights_have_the_rate_and_a_mask_for_each_row_and_head():
    whole, seen = all_dropped(), np.tri(24, dtype=bool)[:, None]
    drops = whole[np.broadcast_to(seen, whole.shape)]
    assert abs(drops.mean() - 0.3) < 5 * (0.3 * 0.7 / drops.size) ** 0.5
    assert len(np.unique(whole[:, -1].reshape(-1, 24), axis=0)) == 8  # 2 rows x 4 heads


@pytest.mark.parametrize(
    ("part", "block"),
    [({"first_head": 2}, 512), ({"rows": (1,)}, 512), ({}, 8), ({}, 1)],  # 1: within pieces
    ids=str,
)
def test_dropped_weights_depend_only_on_row_head_and_query(part, block, monkeypatch):
    whole = all_dropped()
    monkeypatch.setattr(xla, "PIECES", 6)
    monkeypatch.setattr(xla, "QUERY_BLOCK", block)
    wanted = whole[list(part.get("rows", (0, 1)))][:, :, part.get("first_head", 0) :]
    np.testing.assert_array_equal(dropped(**part) == 0, wanted)
