"""Attention over a sequence that is cut over context: every option under every strategy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ops.attention_cases import Case, arrays_of, dropout_factors
from ops.attention_cases import expected as attention_in_numpy

from maxmeg.data.placement import in_context_order
from maxmeg.distributed.attention.context import ContextCall, attention_over_context
from maxmeg.distributed.attention.context_choice import ContextStrategy
from maxmeg.distributed.attention.rounds import KeyValueExpansion
from maxmeg.ops.attention.spec import AttentionDropout, Operands, ScoreSpec
from maxmeg.parallel.mesh import AXES, CONTEXT_AXES, make_mesh
from maxmeg.parallel.spmd import spmd

TOLERANCE = 1e-6  # of the largest value, float32
CAUSAL = ScoreSpec()
CASE = functools.partial(Case, 48, heads=8, groups=2, head_dim=8, value_dim=4)
DOCUMENTS = (3, 17, 11, 17)
FEATURES = {
    "causal": CASE(),
    "all keys": CASE(spec=ScoreSpec(causal=False)),
    "documents": CASE(segments=DOCUMENTS),
    "window": CASE(spec=ScoreSpec(window=5)),
    "window, documents": CASE(spec=ScoreSpec(window=4), segments=DOCUMENTS),
    "long window": CASE(spec=ScoreSpec(window=23)),
    "chunks": CASE(spec=ScoreSpec(chunk=10)),
    "short chunks": CASE(spec=ScoreSpec(chunk=2), segments=DOCUMENTS),
    "sinks": CASE(sinks=True),
    "sinks, window": CASE(spec=ScoreSpec(window=3), sinks=True),
    "soft cap": CASE(spec=ScoreSpec(softcap=0.5)),
    "dropout": CASE(),
    "dropout, window": CASE(spec=ScoreSpec(window=6)),
    "multi-query": CASE(groups=1),
}
DROPS = ("dropout", "dropout, window")
B, L, H, K, V = 2, 48, 8, 8, 4
DROPOUT = AttentionDropout(jax.random.key(3), jnp.arange(B), 0, rate=0.25)


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


def inputs(feature: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, Operands]:
    """Queries, keys beside values, and the cotangent of the output."""
    (q, k, v, slope, _), operands = arrays_of(FEATURES[feature], "float32")
    return q, np.concatenate((k, v), axis=-1), slope, operands


@functools.cache
def expected(feature: str) -> list[np.ndarray]:
    """Output, and gradients of q, kv and sinks, in float64."""
    arrays, operands = arrays_of(FEATURES[feature], "float32")
    arrays[4] = 0 * arrays[4]  # the log-sum-exp is no result
    factors = dropout_factors(FEATURES[feature], DROPOUT) if feature in DROPS else None
    wanted = attention_in_numpy(FEATURES[feature], arrays, operands, factors)
    d_kv = np.concatenate((wanted["dk"], wanted["dv"]), axis=-1)
    return [wanted["out"], wanted["dq"], d_kv, wanted["dsinks"]]


def actual(context: int, strategy: ContextStrategy, feature: str, chunks: int) -> list[np.ndarray]:
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"context": context}, jax.devices()[:context])
    case, (q, kv, slope, operands) = FEATURES[feature], inputs(feature)
    sinks_H = operands.sinks_H if case.sinks else np.zeros(H, np.float32)
    arrays = {"tokens": np.tile(np.arange(L), (B, 1)), "q": q, "kv": kv, "slope": slope}
    arrays |= {"segment_ids": np.int32(operands.segments_BL)} if case.segments else {}
    placed = in_context_order(arrays, context, chunks)

    def local(q, kv, slope, segments, chunks, sinks_H):
        def run(q, kv, sinks_H):
            sinks = sinks_H if case.sinks else None
            how = Operands(0, segments, None, sinks, DROPOUT if feature in DROPS else None)
            call = ContextCall(q, kv, KeyValueExpansion(K), (), case.spec, how, chunks_BC=chunks)
            return attention_over_context(call, strategy)[0]

        out, pull = jax.vjp(run, q, kv, sinks_H)
        *slopes, d_sinks = pull(slope)
        return out, *slopes, jax.lax.psum(d_sinks, CONTEXT_AXES)

    cut = P(None, CONTEXT_AXES)
    run = jax.jit(spmd(local, mesh, ((cut,) * 5 + (P(),)), (cut, cut, cut, P())))
    names = "q", "kv", "slope", "segment_ids", "chunks"
    found = run(*(placed.get(name) for name in names), sinks_H)
    rows, back = np.arange(B)[:, None], np.argsort(placed["tokens"], axis=1)
    return [np.asarray(x) if i == 3 else np.asarray(x)[rows, back] for i, x in enumerate(found)]


@pytest.mark.parametrize(("context", "strategy", "feature"), CASES)
def test_results_and_gradients_equal_attention_over_the_row(context, strategy, feature):
    chunks = (3 if context == 8 else 4) if strategy == "owners" else 0
    found = actual(context, strategies(context)[strategy], feature, chunks)
    for one, other in zip(found, expected(feature), strict=True):
        assert np.abs(one - other).max() <= TOLERANCE * max(np.abs(other).max(), 1)


def test_backward_of_a_ring_stores_what_flash_attention_stores():
    """Queries, keys and values, the output and its log-sum-exp."""
    shapes = (B, L // 2, H, K), (B, L // 2, 2, K + V), (B, L // 2, H, V), (B, L // 2, H)

    def local(q, kv):
        def run(q, kv):
            call = ContextCall(q, kv, KeyValueExpansion(K), (), CAUSAL, Operands())
            return attention_over_context(call, ContextStrategy("ring"))[0]

        out, pull = jax.vjp(run, q, kv)
        found = sorted(x.shape for x in jax.tree.leaves(pull) if x.ndim > 2)
        assert found == sorted(shapes)
        return out

    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"context": 2}, jax.devices()[:2])
    cut = P(None, CONTEXT_AXES)
    jax.eval_shape(spmd(local, mesh, (cut, cut), cut), *inputs("causal")[:2])
