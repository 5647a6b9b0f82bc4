"""Attention over a sequence that is cut over context: every option under every strategy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import maxmeg.ops.attention.context as context_module
from maxmeg.config.recompute import kept_names
from maxmeg.ops.attention import rounds
from maxmeg.ops.attention.context import ContextCall, attention_over_context
from maxmeg.ops.attention.context_choice import ContextStrategy
from maxmeg.ops.attention.rounds import Expand
from maxmeg.ops.attention.spec import AttentionDropout, Operands, ScoreSpec
from maxmeg.ops.random import random_bits
from maxmeg.parallel.collectives import keeps
from maxmeg.parallel.mesh import AXES, CONTEXT_AXES, make_mesh
from maxmeg.parallel.placement import in_context_order
from maxmeg.parallel.spmd import spmd

TOLERANCE = 1e-6  # of the largest value, float32
RATE = 0.25
CAUSAL = ScoreSpec()
FEATURES = {
    "causal": {},
    "all keys": {"spec": ScoreSpec(causal=False)},
    "documents": {"documents": True},
    "window": {"spec": ScoreSpec(window=5)},
    "window, documents": {"spec": ScoreSpec(window=4), "documents": True},
    "long window": {"spec": ScoreSpec(window=23)},
    "chunks": {"spec": ScoreSpec(chunk=10)},
    "short chunks": {"spec": ScoreSpec(chunk=2), "documents": True},
    "sinks": {"sinks": True},
    "sinks, window": {"spec": ScoreSpec(window=3), "sinks": True},
    "soft cap": {"spec": ScoreSpec(softcap=0.5)},
    "dropout": {"drop": True},
    "dropout, window": {"drop": True, "spec": ScoreSpec(window=6)},
    "multi-query": {"groups": 1},
}
B, L, H, K, V = 2, 48, 8, 8, 4


def strategies(context: int) -> dict[str, ContextStrategy]:
    names = ["ring", "gather"]
    names += ["exchange"] * (context != 3) + ["hierarchy"] * (context in (4, 8))
    found = {name: ContextStrategy(name, 2 * (name == "hierarchy")) for name in names}
    return found | {"owners": ContextStrategy("gather")}  # of chunks, chosen by row


# Every cell of strategy x feature, on one of the numbers of devices; a few are quick.
CONTEXTS = (2, 3, 4, 8)
QUICK = (("ring", "causal"), ("ring", "window, documents"), ("gather", "chunks"))
QUICK += (("exchange", "dropout"), ("hierarchy", "sinks, window"), ("owners", "documents"))
CELLS = [
    (strategy, feature, [n for n in CONTEXTS if strategy in strategies(n)])
    for strategy in strategies(8)
    for feature in FEATURES
]
CASES = [
    pytest.param(
        *(context, strategy, feature),
        marks=() if (strategy, feature) in QUICK else pytest.mark.slow,
        id=f"{context} {strategy} {feature}",
    )
    for number, (strategy, feature, contexts) in enumerate(CELLS)
    for context in [contexts[number % len(contexts)]]
]


def arrays_of(groups: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (B, L, H, K), (B, L, groups, K + V), (B, L, H, V), (H,)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def segments_of(documents: bool) -> np.ndarray | None:
    ends = np.array([[3, 20, 31], [7, 8, 40]])
    return (
        (np.arange(L)[None, :, None] >= ends[:, None]).sum(-1).astype(np.int32)
        if documents
        else None
    )


def operands_of(segments, sinks, drop: bool) -> Operands:
    dropout = AttentionDropout(jax.random.key(3), jnp.arange(B), 0, RATE) if drop else None
    return Operands(0, segments, None, sinks, dropout)


@functools.cache
def expected(feature: str) -> list[np.ndarray]:
    """Output, and gradients of q, kv and sinks, by softmax attention in NumPy and float64."""
    return reference(**FEATURES[feature])


def reference(spec=CAUSAL, documents=False, sinks=False, drop=False, groups=2):
    q, kv, slope, sink_H = (x.astype(np.float64) for x in arrays_of(groups))
    k, v = (np.repeat(x, H // groups, axis=2) for x in (kv[..., :K], kv[..., K:]))
    i, j = np.arange(L)[:, None], np.arange(L)
    seen = np.ones((B, 1, L, L), bool)
    seen &= (j <= i) if spec.causal else True
    seen &= (np.abs(i - j) < spec.window) if spec.window else True
    seen &= (i // spec.chunk == j // spec.chunk) if spec.chunk else True
    segments = segments_of(documents)
    if segments is not None:
        seen &= (segments[:, :, None] == segments[:, None])[:, None]
    scores = np.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(K)
    cap = spec.softcap or np.inf
    capped = cap * np.tanh(scores / cap) if spec.softcap else scores
    weights = np.where(seen, np.exp(capped), 0)
    total = weights.sum(-1, keepdims=True)
    sink = np.exp(sink_H)[:, None, None] if sinks else 0
    weights = weights / (total + sink)
    keep = np.ones_like(weights)
    if drop:
        coordinates = np.arange(B)[:, None, None], np.arange(H)[:, None], np.arange(L)
        bits = random_bits(weights.shape, jax.random.key(3), *map(jnp.asarray, coordinates))
        keep = np.asarray(bits >= np.uint32(RATE * 2**32)) / (1 - RATE)
    out = np.einsum("bhlm,bmhv->blhv", weights * keep, v)
    d_weights = keep * np.einsum("blhv,bmhv->bhlm", slope, v)
    inner = (weights * d_weights).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - inner)
    d_scores *= 1 - np.tanh(scores / cap) ** 2 if spec.softcap else 1
    d_q = np.einsum("bhlm,bmhk->blhk", d_scores, k) / np.sqrt(K)
    d_k = np.einsum("bhlm,blhk->bmhk", d_scores, q) / np.sqrt(K)
    d_v = np.einsum("bhlm,blhv->bmhv", weights * keep, slope)
    d_kv = np.concatenate((d_k, d_v), -1).reshape(B, L, groups, H // groups, K + V).sum(3)
    d_sinks = -(sink / (total + sink) * inner).sum((0, 2, 3)) if sinks else 0 * sink_H
    return [out, d_q, d_kv, d_sinks]


def actual(
    context: int,
    strategy: ContextStrategy,
    spec=CAUSAL,
    documents=False,
    sinks=False,
    drop=False,
    groups=2,
    chunks=0,
):
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"context": context}, jax.devices()[:context])
    q, kv, slope, sink_H = arrays_of(groups)
    arrays = {"tokens": np.tile(np.arange(L), (B, 1)), "q": q, "kv": kv, "slope": slope}
    segments = segments_of(documents)
    arrays |= {} if segments is None else {"segment_ids": segments}
    placed = in_context_order(arrays, context, chunks)

    def local(q, kv, slope, segments, chunks, sink_H):
        def run(q, kv, sink_H):
            operands = operands_of(segments, sink_H if sinks else None, drop)
            call = ContextCall(q, kv, Expand(K), (), spec, operands, chunks_BC=chunks)
            return attention_over_context(call, strategy)[0]

        out, pull = jax.vjp(run, q, kv, sink_H)
        *slopes, d_sinks = pull(slope)
        return out, *slopes, jax.lax.psum(d_sinks, CONTEXT_AXES)

    cut = P(None, CONTEXT_AXES)
    run = jax.jit(spmd(local, mesh, ((cut,) * 5 + (P(),)), (cut, cut, cut, P())))
    names = "q", "kv", "slope", "segment_ids", "chunks"
    found = run(*(placed.get(name) for name in names), sink_H)
    rows, back = np.arange(B)[:, None], np.argsort(placed["tokens"], axis=1)
    return [np.asarray(x) if i == 3 else np.asarray(x)[rows, back] for i, x in enumerate(found)]


@pytest.mark.parametrize(("context", "strategy", "feature"), CASES)
def test_results_and_gradients_equal_attention_over_the_row(context, strategy, feature):
    chunks = (3 if context == 8 else 4) if strategy == "owners" else 0
    found = actual(context, strategies(context)[strategy], **FEATURES[feature], chunks=chunks)
    for one, other in zip(found, expected(feature), strict=True):
        assert np.abs(one - other).max() <= TOLERANCE * max(np.abs(other).max(), 1)


def attention(remat: str, q, kv, slope):
    """Sum of products with the slope, recomputed as in a layer."""

    def run(q, kv):
        call = ContextCall(q, kv, Expand(K), (), CAUSAL, Operands())
        return jnp.sum(attention_over_context(call, ContextStrategy("ring"))[0] * slope)

    return jax.checkpoint(run, policy=keeps(kept_names(remat)))(q, kv)


@pytest.mark.parametrize(("recompute", "rings"), [("minimal", 3), ("selective", 3), ("full", 4)])
def test_backward_runs_a_ring_again_only_under_full_recomputation(recompute, rings):
    """A ring sends keys once forward, and keys and their gradients once backward."""
    context = 4
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"context": context}, jax.devices()[:context])
    gradients = jax.value_and_grad(functools.partial(attention, recompute), (0, 1))
    cut = P(None, CONTEXT_AXES)
    run = jax.jit(spmd(gradients, mesh, (cut,) * 3, (P(), (cut,) * 2)))
    text = str(run.lower(*arrays_of(2)[:3]).as_text())
    assert text.count("stablehlo.collective_permute") == rings * (context - 1)


def test_backward_of_a_ring_stores_what_flash_attention_stores():
    """Queries, keys and values, the output and its log-sum-exp."""
    shapes = (B, L // 2, H, K), (B, L // 2, 2, K + V), (B, L // 2, H, V), (B, L // 2, H)

    def local(q, kv):
        def run(q, kv):
            call = ContextCall(q, kv, Expand(K), (), CAUSAL, Operands())
            return attention_over_context(call, ContextStrategy("ring"))[0]

        out, pull = jax.vjp(run, q, kv)
        found = sorted(x.shape for x in jax.tree.leaves(pull) if x.ndim > 2)
        assert found == sorted(shapes)
        return out

    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"context": 2}, jax.devices()[:2])
    cut = P(None, CONTEXT_AXES)
    jax.eval_shape(spmd(local, mesh, (cut, cut), cut), *arrays_of(2)[:2])


def wrong_order(x, count):
    return x


def rounded_merge(totals, which, out, lse):
    MERGE(totals, which, out.astype(jnp.bfloat16).astype(jnp.float32), lse)


def sink_every_round(*call, **options):
    q, k, v, spec, operands = call
    sinks = jnp.asarray(arrays_of(2)[3])
    return ATTEND(q, k, v, spec, operands._replace(sinks_H=sinks), **options)


def wide_window(self, *arguments):
    operands = OPERANDS(self, *arguments)
    return operands._replace(offset=operands.offset - 1) if self.halo else operands


def leaking_documents(x):
    return jnp.zeros_like(WHOLE(x))


MERGE, ATTEND, OPERANDS = rounds.add, rounds.attention_with_lse, rounds.Round.operands
WHOLE = context_module.whole_rows
MUTATIONS = [
    ("gather", "causal", context_module, "in_order", wrong_order),
    ("ring", "causal", rounds, "add", rounded_merge),
    ("ring", "sinks", rounds, "attention_with_lse", sink_every_round),
    ("ring", "window", rounds.Round, "operands", wide_window),
    ("ring", "documents", context_module, "whole_rows", leaking_documents),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "feature", "module", "name", "mutant"), MUTATIONS)
def test_a_mistake_is_found(strategy, feature, module, name, mutant, monkeypatch):
    monkeypatch.setattr(module, name, mutant)
    found = actual(2, ContextStrategy(strategy), **FEATURES[feature])
    errors = [np.abs(a - b).max() for a, b in zip(found, expected(feature), strict=True)]
    assert max(errors) > 100 * TOLERANCE
