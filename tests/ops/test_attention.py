"""Every attention backend against softmax attention in float64 NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxmeg.ops.attention as module
from maxmeg.ops.attention import AttentionDropout, attention

FORWARD = 2e-6  # of the largest value, float32
BACKWARD = 1e-5
BFLOAT16 = 2e-2  # weights and values are rounded before their product
K = 8
# Half the time to compile; rounding may differ, no more than the tolerances allow.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

# name: (L, M, H, G, offset, segments, queries a block); blocks of 512 hold any of these
CASES = {
    "one head": (7, 7, 1, 1, 0, None, 512),
    "multi-head": (7, 7, 4, 4, 0, None, 512),
    "grouped": (7, 7, 4, 2, 0, None, 512),
    "multi-query": (7, 7, 4, 1, 0, None, 512),
    "one token": (1, 9, 4, 2, 8, None, 512),
    "continued": (4, 9, 4, 2, 3, None, 512),  # the last two keys are still unwritten
    "all keys": (7, 7, 4, 2, None, None, 512),
    "cross": (5, 9, 4, 2, None, None, 512),
    "blocks": (48, 48, 4, 2, 0, None, 8),
    "uneven blocks": (45, 45, 2, 1, 0, None, 16),
    "blocks of all keys": (40, 24, 2, 2, None, None, 16),
    "blocks continued": (40, 48, 2, 1, 8, None, 16),
    "documents": (12, 12, 4, 2, 0, (5, 1, 6), 512),
    "documents, all keys": (12, 12, 2, 2, None, (5, 7), 512),
    "documents in blocks": (40, 40, 2, 1, 0, (3, 20, 17), 8),
}
TABLE = pytest.mark.parametrize("name", CASES)


def reference(q, k, v, offset, segments):
    """Output [B, L, H, K] and the weights [B, H, L, M]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("BLHK,BMHK->BHLM", q, k) / np.sqrt(q.shape[-1])
    if offset is not None:
        queries = offset + np.arange(q.shape[1])
        scores = np.where(np.arange(k.shape[1]) <= queries[:, None], scores, -np.inf)
    if segments is not None:
        scores = np.where(segments[:, None, :, None] == segments[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("BHLM,BMHK->BLHK", weights, v), weights


def gradients(q, k, v, out, weights, cotangent):
    """Gradients of sum(out * cotangent) by hand."""
    groups = q.shape[2] // k.shape[2]
    full_k, full_v = (np.repeat(x.astype(np.float64), groups, axis=2) for x in (k, v))
    d_v = np.einsum("BHLM,BLHK->BMHK", weights, cotangent)
    d_weights = np.einsum("BLHK,BMHK->BHLM", cotangent, full_v)
    row = np.einsum("BLHK,BLHK->BHL", out, cotangent)[..., None]
    d_scores = weights * (d_weights - row) / np.sqrt(q.shape[-1])
    d_q = np.einsum("BHLM,BMHK->BLHK", d_scores, full_k)
    d_k = np.einsum("BHLM,BLHK->BMHK", d_scores, q)
    shared = [x.reshape(*k.shape[:3], groups, -1).sum(3) for x in (d_k, d_v)]
    return d_q, *shared


def run_attention(q, k, v, offset, segments=None, backend="xla"):
    """`attention` on NumPy arrays, compiled anew (QUERY_BLOCK may have changed)."""

    def attend(q, k, v, segments):
        return attention(q, k, v, offset=offset, segments_BL=segments, backend=backend)

    return np.asarray(quick_jit(attend)(q, k, v, segments))


def inputs(name: str):
    L, M, H, G, offset, lengths, _ = CASES[name]
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(2, *shape, K)).astype(np.float32) for shape in ((L, H), (M, G), (M, G))
    )
    segments = None
    if lengths is not None:  # the second row has the documents the other way round
        rows = [np.repeat(np.arange(len(lengths)), order) for order in (lengths, lengths[::-1])]
        segments = np.stack(rows)
    return (q, k, v), offset, segments


def close(found, expected, tolerance) -> bool:
    return bool(np.abs(found - expected).max() <= tolerance * np.abs(expected).max())


@TABLE
def test_forward_and_gradients_equal_the_reference(name, monkeypatch):
    monkeypatch.setattr(module, "QUERY_BLOCK", CASES[name][-1])
    qkv, offset, segments = inputs(name)
    expected, weights = reference(*qkv, offset, segments)
    cotangent = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)

    def attend(qkv, segments, cotangent):
        def run(*qkv):
            return attention(*qkv, offset=offset, segments_BL=segments, backend="xla")

        out, transpose = jax.vjp(run, *qkv)
        return out, transpose(cotangent)

    out, found = quick_jit(attend)(qkv, segments, cotangent)
    assert close(out, expected, FORWARD)
    for got, want in zip(
        found, gradients(*qkv, expected, weights, cotangent.astype(np.float64)), strict=True
    ):
        assert close(got, want, BACKWARD)


@pytest.mark.parametrize("name", ["one token", "continued", "blocks continued"])
def test_a_traced_offset_is_a_static_one(name, monkeypatch):
    monkeypatch.setattr(module, "QUERY_BLOCK", CASES[name][-1])
    qkv, offset, _ = inputs(name)
    run = quick_jit(lambda offset, *qkv: attention(*qkv, offset=offset, backend="xla"))
    assert close(run(np.int32(offset), *qkv), reference(*qkv, offset, None)[0], FORWARD)


def test_unwritten_keys_have_no_effect_whatever_they_hold():
    (q, k, v), offset, _ = inputs("continued")
    last = offset + q.shape[1]
    changed = [np.concatenate([x[:, :last], 1e6 * x[:, last:]], axis=1) for x in (k, v)]
    a, b = (run_attention(q, *kv, offset) for kv in ((k, v), changed))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["grouped", "blocks"])
def test_bfloat16(name, monkeypatch):
    monkeypatch.setattr(module, "QUERY_BLOCK", CASES[name][-1])
    qkv, offset, segments = inputs(name)
    rounded = [np.asarray(jnp.bfloat16(x)) for x in qkv]
    out = run_attention(*rounded, offset, segments)
    assert out.dtype == jnp.bfloat16
    expected = reference(*rounded, offset, segments)[0]
    assert close(np.float64(out), expected, BFLOAT16)


def test_auto_runs_the_reference_on_a_cpu():
    qkv, offset, _ = inputs("grouped")
    a, b = (run_attention(*qkv, offset, backend=backend) for backend in ("auto", "xla"))
    np.testing.assert_array_equal(a, b)


def test_a_named_backend_that_cannot_run_raises_and_says_why():
    qkv, offset, _ = inputs("grouped")
    with pytest.raises(ValueError, match=r"cudnn cannot run: the device is cpu.*use auto or xla"):
        run_attention(*qkv, offset, backend="cudnn")


# the reason: (dtype, head size, L, M, offset, segments, dropout) of what cuDNN refuses for it
REFUSED = {
    "float32": (np.float32, 64, 4, 4, 0, False, False),
    "head dim 12": (jnp.bfloat16, 12, 4, 4, 0, False, False),
    "head dim 136": (jnp.bfloat16, 136, 4, 4, 0, False, False),
    "segment ids": (jnp.bfloat16, 64, 4, 4, 0, True, False),
    "dropout": (jnp.bfloat16, 64, 4, 4, 0, False, True),
    "one length": (jnp.bfloat16, 64, 1, 4, 3, False, False),
    "position 0": (jnp.bfloat16, 64, 4, 4, np.int32(0), False, False),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_reasons_on_a_gpu(reason, monkeypatch):
    monkeypatch.setattr(module, "target_platform", lambda: "cuda")
    dtype, size, L, M, offset, segments, dropout = REFUSED[reason]
    q, k = (jax.ShapeDtypeStruct((1, length, 2, size), dtype) for length in (L, M))
    given = (np.zeros((1, L)) if segments else None, object() if dropout else None)
    assert reason in module.cudnn_refuses(q, k, offset, *given)


@pytest.mark.parametrize(("dtype", "size"), itertools.product(["bfloat16", "float16"], [64, 128]))
def test_nothing_against_the_usual_shapes_on_a_gpu(dtype, size, monkeypatch):
    monkeypatch.setattr(module, "target_platform", lambda: "cuda")
    q = jax.ShapeDtypeStruct((1, 4, 2, size), dtype)
    assert module.cudnn_refuses(q, q, 0, None, None) == ""
    assert module.cudnn_refuses(q, q, None, None, None) == ""


def test_heads_that_do_not_divide_are_refused():
    q, k = np.zeros((1, 4, 3, K), np.float32), np.zeros((1, 4, 2, K), np.float32)
    with pytest.raises(ValueError, match="query heads=3 must be a multiple of key heads=2"):
        run_attention(q, k, k, 0)


def dropped(
    name: str, first_head: int = 0, rows: tuple[int, ...] = (0, 1), heads: slice = slice(None)
):
    """Attention whose values are the identity, so that the output shows the weights."""
    (q, k, _), offset, _ = inputs(name)
    groups = q.shape[2] // k.shape[2]
    k = np.repeat(k, groups, axis=2)[list(rows)][:, :, heads]
    q = q[list(rows)][:, :, heads]
    q, k = (np.pad(x, [(0, 0)] * 3 + [(0, k.shape[1] - K)]) for x in (q, k))
    v = np.broadcast_to(np.eye(k.shape[1], dtype=np.float32)[:, None], k.shape)
    spec = AttentionDropout(jax.random.key(5), jnp.array(rows), first_head, 0.3)
    run = quick_jit(
        lambda q, k, v: attention(q, k, v, offset=offset, dropout_spec=spec, backend="xla")
    )
    return np.asarray(run(q, k, v))  # [B, L, H, M]


def test_dropped_weights_depend_on_row_head_and_query_alone(monkeypatch):
    whole = dropped("blocks")
    seen = np.tril(np.ones((48, 48), bool))[None, :, None]
    share = (whole == 0)[np.broadcast_to(seen, whole.shape)].mean()
    assert 0.28 < share < 0.32
    assert len(np.unique((whole[:, -1] == 0).reshape(-1, 48), axis=0)) == 8  # 2 rows x 4 heads
    later = dropped("blocks", first_head=2, heads=slice(2, None))
    np.testing.assert_array_equal(later == 0, whole[:, :, 2:] == 0)
    np.testing.assert_array_equal(dropped("blocks", rows=(1,)) == 0, whole[1:] == 0)
    monkeypatch.setattr(module, "QUERY_BLOCK", 8)
    np.testing.assert_array_equal(dropped("blocks") == 0, whole == 0)
