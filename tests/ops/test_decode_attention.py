"""Every decode attention backend over one table, against float64 NumPy and `attention`."""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.decode_attention_cases import (
    CASES,
    LONG,
    TOLERANCE,
    Case,
    arrays_of,
    contiguous,
    errors,
    expected,
    run,
)
from tables import thinned

import maxmeg.ops.backend as choice
import maxmeg.ops.decode_attention.call as module
import maxmeg.ops.decode_attention.xla as xla
from maxmeg.ops.attention.call import Operands, ScoreSpec, attention_with_lse
from maxmeg.ops.backend import Device
from maxmeg.ops.decode_attention.call import PagedCache, decode_attention, write_pages

SAME = 1e-4  # relative, float32: the same sums by other programs
HOPPER = Device("cuda", (9, 0))
HALF = ("bfloat16", "float16")
ROUNDED = ("grouped", "drafts, several blocks", "everything")


def described(case: Case, dtype=jnp.bfloat16, pool: int = 64) -> tuple:
    """The arrays of a call as shapes."""
    array, dims = jax.ShapeDtypeStruct, (case.head_dim, case.value_dim or case.head_dim)
    pools = [array((pool, case.page, case.groups, dim), dtype) for dim in dims]
    rows = len(case.lengths)
    table = (array((rows, case.pages), jnp.int32), array((rows,), jnp.int32))
    q = array((rows, case.queries, case.heads, case.head_dim), dtype)
    return q, PagedCache(*pools, *table)


def can_run(backend: str) -> bool:
    call = (*described(Case(pages=4)), ScoreSpec(), None, None, choice.target_device())
    return not module.BACKENDS[backend].refuses(*call)


BACKENDS = [backend for backend in module.BACKENDS if can_run(backend)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    thinned([(n, "float32") for n in CASES] + [(n, d) for n in ROUNDED for d in HALF], 2),
)
def test_results_equal_the_reference(name: str, dtype: str, backend: str, monkeypatch):
    monkeypatch.setattr(xla, "KEYS_AT_ONCE", 64 * len(CASES[name].lengths))
    case, arrays = CASES[name], arrays_of(CASES[name], dtype)
    call = (*arrays[:2], case.spec, arrays[2], None, choice.target_device())
    if reason := module.BACKENDS[backend].refuses(*call):
        with pytest.raises(ValueError, match=re.escape(reason)):  # named, it never gives way
            run(case, *arrays, backend)
        return
    actual = run(case, *arrays, backend, jax.jit)
    assert actual["out"].dtype == dtype and actual["lse"].dtype == "float32"
    measured = errors(actual, expected(case, *arrays))
    assert all(e <= TOLERANCE[dtype] for e in measured.values()), measured


def test_relative_biases_are_those_of_attention_over_the_gathered_cache():
    case = dataclasses.replace(CASES["everything"], spec=ScoreSpec(scale=1.0, distance=90))
    q, cache, sinks = arrays_of(case, "float32")
    bias = np.random.default_rng(0).normal(size=(16, case.heads)).astype(np.float32)
    call = functools.partial(decode_attention, spec=case.spec)
    pages = PagedCache(*map(jnp.asarray, cache))
    actual = jax.jit(call)(q, pages, sinks_H=sinks, bias_NH=bias)
    row = 3
    operands = Operands(case.lengths[row] - case.queries, sinks_H=sinks, bias_NH=bias)
    qkv = (q[row : row + 1], *(array[None] for array in contiguous(cache, row)))
    wanted = jax.jit(functools.partial(attention_with_lse, spec=case.spec, operands=operands))(*qkv)
    for part, whole in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(part[row], whole[0], rtol=SAME, atol=SAME / 10)


def test_one_query_needs_no_dimension_of_its_own():
    q, cache, _ = arrays_of(CASES["grouped"], "float32")
    both = jax.jit(lambda q, cache: [decode_attention(x, cache) for x in (q, q[:, 0])])
    for whole, one in zip(*both(q, PagedCache(*map(jnp.asarray, cache))), strict=True):
        assert one.shape == whole[:, 0].shape
        np.testing.assert_allclose(one, whole[:, 0], rtol=SAME, atol=SAME / 10)


def test_non_finite_values_reach_only_their_row():
    """A key that is seen is NaN in the row, as in `attention`; the other rows are as they were."""
    case = CASES["several blocks"]
    q, cache, sinks = arrays_of(case, "float32")
    wanted = run(case, q, cache, sinks, "xla", jax.jit)
    pages = cache.k_pages.copy()
    pages[cache.page_table[1, 2]] = np.nan
    actual = run(case, q, cache._replace(k_pages=pages), sinks, "xla", jax.jit)
    for key in ("out", "lse"):
        assert np.isnan(actual[key][1]).all()
        others = [0, 2, 3, 4]
        np.testing.assert_array_equal(actual[key][others], wanted[key][others])


def test_memory_does_not_grow_with_the_cache(monkeypatch):
    monkeypatch.setattr(xla, "KEYS_AT_ONCE", 2**11)

    def temporaries(pages: int) -> int:
        arguments = described(Case(pages=pages), jnp.float32, 5 * pages)
        compiled = jax.jit(decode_attention).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(64), temporaries(1024)
    block = xla.KEYS_AT_ONCE * 2 * 64 * 4  # keys of one block
    assert large <= 1.1 * small
    assert large <= 6 * block


def test_auto_takes_the_reference_even_where_the_kernel_could_run(monkeypatch, caplog):
    monkeypatch.setattr(choice, "target_device", lambda: HOPPER)
    choice.log_choice.cache_clear()
    module.warn_of_xla.cache_clear()
    arguments = described(Case(pages=4))
    assert module.BACKENDS["mosaic"].refuses(*arguments, ScoreSpec(), None, None, HOPPER) == ""
    with caplog.at_level(logging.INFO, "maxmeg"):
        jax.eval_shape(decode_attention, *arguments)
        jax.eval_shape(decode_attention, *arguments)
    chosen, warned = caplog.records
    assert chosen.getMessage() == "decode attention backend: xla"
    assert warned.levelno == logging.WARNING and "in plain XLA on the GPU" in warned.getMessage()


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (Device("cpu"), {}, "cannot run: the device is cpu, not a CUDA GPU; use auto or xla"),
        (Device("cuda", (8, 0)), {}, "it needs a Hopper GPU .*found 8.0"),
        (HOPPER, {"page": 12}, "pages have 12 slots"),
        (HOPPER, {"head_dim": 40}, r"head dims \(query, value\) \(40, 40\) are none of"),
        (HOPPER, {"queries": 33}, "33 queries of 2 heads per key head are more than 64 rows"),
    ],
)
def test_the_named_kernel_says_why_it_cannot_run(device, options, message, monkeypatch):
    monkeypatch.setattr(choice, "target_device", lambda: device)
    arguments = described(Case(pages=4, **options))
    with pytest.raises(ValueError, match=f"decode attention backend mosaic .*{message}"):
        jax.eval_shape(functools.partial(decode_attention, backend="mosaic"), *arguments)


def test_where_no_backend_can_run_the_error_lists_what_each_supports():
    arguments = described(Case(pages=4), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"xla: dtypes float8.*by mosaic: bfloat16 and"):
        jax.eval_shape(decode_attention, *arguments)
    with pytest.raises(ValueError, match="'flash' is none of auto, mosaic, xla"):
        jax.eval_shape(functools.partial(decode_attention, backend="flash"), *arguments)


def test_gradients_are_refused():
    q, cache, _ = arrays_of(CASES["grouped"], "float32")
    cache = PagedCache(*map(jnp.asarray, cache))
    with pytest.raises(ValueError, match="decode attention has no gradient: train with"):
        jax.grad(lambda q: decode_attention(q, cache)[0].sum())(jnp.asarray(q))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_pages": (64, 8, 2, 64)}, r"v_pages has shape \(64, 8, 2, 64\), needs \(64,"),
        ({"k_pages": (64, 16, 3, 64)}, "query heads=4 must be a multiple of key heads=3"),
        ({"k_pages": (64, 16, 2, 32)}, r"queries \(5, 1, 4, 64\) are not \[B, H, 32\]"),
        ({"page_table": (4, 4)}, r"page_table has shape \(4, 4\), needs \(5, 4\)"),
        ({"lengths_B": (4,)}, r"lengths_B has shape \(4,\), needs \(5,\)"),
    ],
)
def test_invalid_arguments_are_refused(changes: dict, message: str):
    q, cache = described(Case(pages=4))
    for name, shape in changes.items():
        dtype = getattr(cache, name).dtype
        cache = cache._replace(**{name: jax.ShapeDtypeStruct(shape, dtype)})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(decode_attention, q, cache)


def test_sinks_and_indices_must_fit():
    q, cache = described(Case(pages=4))
    with pytest.raises(ValueError, match=r"sinks_H has shape \(3,\), needs \(4,\)"):
        jax.eval_shape(lambda *call: decode_attention(*call, sinks_H=jnp.zeros(3)), q, cache)
    cache = cache._replace(lengths_B=jax.ShapeDtypeStruct((5,), jnp.int16))
    with pytest.raises(ValueError, match="lengths_B has dtype int16, needs int32"):
        jax.eval_shape(decode_attention, q, cache)


@pytest.mark.parametrize("queries", [1, 4])
def test_written_keys_are_those_that_count_and_nothing_else_changes(queries: int):
    """Some rows have fewer new keys than there are places for; one row is empty."""
    lengths = (*LONG, 3)
    _, cache, _ = arrays_of(Case(lengths), "float32")
    new = np.random.default_rng(1).normal(size=(6, queries, 2, 64)).astype(np.float32)
    before = jnp.nan_to_num(jnp.asarray(cache.k_pages), nan=7.0)
    counts = np.minimum(np.array(lengths), queries).astype(np.int32)
    starts = np.array(lengths, np.int32) - counts
    after = jax.jit(write_pages)(before, new, cache.page_table, starts, counts)
    whole = cache._replace(k_pages=np.asarray(after))
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        keys = contiguous(whole, row)[0]
        np.testing.assert_array_equal(keys[length - count :], new[row, :count])
    changed = (np.asarray(after) != np.asarray(before)).any(axis=(2, 3)).sum()
    assert changed == counts.sum()
