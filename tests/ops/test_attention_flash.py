"""What stands between an op's call and the flash kernels: masks and sinks.

The kernels' place takes plain attention with their interface.
"""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.attention_cases import CASES, TOLERANCE, arrays_of, error, expected, run
from tables import thinned

import maxmeg.ops.attention.call as module
from maxmeg.config.recompute import POLICIES
from maxmeg.kernels.intervals import FlashSpec, visible_intervals
from maxmeg.ops import backend
from maxmeg.ops.attention import mosaic as attention_mosaic
from maxmeg.ops.attention.flash import flash
from maxmeg.ops.attention.spec import AttentionDropout, Operands, ScoreSpec
from maxmeg.ops.backend import Device
from maxmeg.parallel.collectives import keeps

HOPPER = Device("cuda", (9, 0))
# Masks, documents, sinks, lengths and offsets; the heads' sizes are the kernels' own concern.
NAMES = [
    *("grouped", "continued", "before the keys", "cross", "window continued", "chunks continued"),
    *("window on both sides", "documents", "documents, all keys", "documents of queries and keys"),
    *("soft cap", "sinks", "sinks alone", "everything"),
]


def plain_flash(
    q_BLHK, k_BMGK, v_BMGV, spec: FlashSpec, *, offset, query_segments_BL, key_segments_BM
):
    """The interface of kernels/attention.py: a query that sees nothing gives 0 and -inf."""
    (L, H, K), (M, G) = q_BLHK.shape[1:], k_BMGK.shape[1:3]
    if query_segments_BL is not None and key_segments_BM is None:
        key_segments_BM = query_segments_BL
    bounds = visible_intervals(spec, L, M, offset, query_segments_BL, key_segments_BM)
    lower_AL, upper_AL = bounds
    keys_M = jnp.arange(M)
    seen_ALM = (keys_M >= lower_AL[..., None]) & (keys_M < upper_AL[..., None])
    k_BMHK, v_BMHV = (jnp.repeat(x, H // G, axis=2) for x in (k_BMGK, v_BMGV))
    scores = jnp.einsum("BLHK,BMHK->BHLM", q_BLHK, k_BMHK) * (spec.scale or K**-0.5)
    scores = spec.softcap * jnp.tanh(scores / spec.softcap) if spec.softcap else scores
    seen = seen_ALM[:, None]
    largest = jnp.max(jnp.where(seen, scores, -1e30), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - largest, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    alive = total > 0
    safe = jnp.where(alive, total, 1)
    out_BLHV = jnp.einsum("BHLM,BMHV->BLHV", weights / safe, v_BMHV)
    lse = jnp.where(alive, jnp.log(safe) + largest, -jnp.inf)
    return out_BLHV, jnp.moveaxis(lse[..., 0], 1, 2)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    attend = functools.partial(flash, plain_flash)
    stand_in = types.SimpleNamespace(attend=attend, refuses=lambda *_: "", SUPPORTS="")
    monkeypatch.setitem(module.BACKENDS, "plain", stand_in)


def whole_blocks(q_BLHK, k_BMGK, *others, **options):
    """The Mosaic kernel is given multiples of 8 rows, whatever the lengths."""
    assert q_BLHK.shape[1] % 8 == 0 and k_BMGK.shape[1] % 8 == 0
    return plain_flash(q_BLHK, k_BMGK, *others, **options)


@pytest.mark.parametrize(
    ("in_blocks", "name"),
    [(True, "blocks"), *thinned(itertools.product((False, True), NAMES), 3)],
)
def test_every_mask_and_sink_reaches_the_kernel(in_blocks, name, monkeypatch):
    if in_blocks:
        kernels = types.SimpleNamespace(flash_attention=whole_blocks)
        monkeypatch.setattr(attention_mosaic, "kernel_module", lambda name: kernels)
        monkeypatch.setattr(module.BACKENDS["plain"], "attend", attention_mosaic.attend)
    case, (arrays, operands) = CASES[name], arrays_of(CASES[name], "float32")
    wanted, actual = expected(case, arrays, operands), run(case, arrays, operands, "plain")
    errors = {key: error(actual[key], wanted[key]) for key in actual}
    assert all(e <= TOLERANCE["float32"] for e in errors.values()), errors


def test_documents_that_return_make_their_row_nan_and_no_other():
    case, (arrays, _) = CASES["documents"], arrays_of(CASES["documents"], "float32")
    segments = np.array([[7] * 6 + [1] * 6, [1] * 3 + [0] * 6 + [1] * 3])
    actual = run(case, arrays, Operands(segments_BL=segments), "plain")
    assert np.isnan(actual["out"][1]).all() and np.isfinite(actual["out"][0]).all()


REFUSED = {
    "cuda GPU": (Device("cpu"), "bfloat16", 64, Operands()),
    r"needs a Hopper GPU \(compute capability 9.0\), found 8.0": (
        *(Device("cuda", (8, 0)), "bfloat16", 64, Operands()),
    ),
    "found 10.0": (Device("cuda", (10, 0)), "bfloat16", 64, Operands()),
    "dtypes .'float32'. are not all bfloat16": (HOPPER, "float32", 64, Operands()),
    r"head dims .* \(72, 72\) are none of": (HOPPER, "bfloat16", 72, Operands()),
    "dropout is not supported": (
        *(HOPPER, "bfloat16", 64),
        Operands(dropout=AttentionDropout(jax.random.key(0), jnp.zeros(1), 0, 0.1)),
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_named_mosaic_says_why_it_cannot_run(reason, monkeypatch):
    device, dtype, head_dim, operands = REFUSED[reason]
    monkeypatch.setattr(backend, "target_device", lambda: device)
    x = jax.ShapeDtypeStruct((1, 4, 2, head_dim), dtype)
    with pytest.raises(ValueError, match=f"(?i)mosaic cannot run: .*{reason}.*; use auto or"):
        jax.eval_shape(
            lambda x: module.attention(x, x, x, ScoreSpec(), operands, backend="mosaic"), x
        )


@pytest.mark.parametrize("recompute", ["minimal", "selective"])
def test_recompute_minimal_runs_the_kernel_once_and_selective_again(recompute):
    q, k = (jax.ShapeDtypeStruct((1, 128, heads, 64), jnp.bfloat16) for heads in (4, 2))

    def loss(*qkv):
        attend = functools.partial(attention_mosaic.attend, spec=ScoreSpec(), operands=Operands())
        attend = jax.checkpoint(attend, policy=keeps(POLICIES[recompute]))
        return jnp.sum(attend(*qkv)[0].astype(jnp.float32))

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, k))
    assert text.count("flash_key_gradients") == 1
    assert (text.count("flash_forward") == 1) == (recompute == "minimal")
