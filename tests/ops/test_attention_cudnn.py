"""What cuDNN is given and what it refuses; no kernel runs here."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ops.attention_cases import CASES, NAMES, TOLERANCE, arrays_of, error, expected, run

import maxmeg.ops.attention.cudnn as cudnn
import maxmeg.ops.attention.xla as xla
from maxmeg.ops import backend as choice
from maxmeg.ops.attention.call import Operands, ScoreSpec, attention, attention_with_lse
from maxmeg.ops.backend import Device

AMPERE, HOPPER, BLACKWELL = (Device("cuda", (major, 0)) for major in (8, 9, 10))
ABSENT = Device("cuda")
FULL = ScoreSpec(causal=False)
HALF = ("bfloat16", "float16")


def refusal(
    sizes=(64, 64), lengths=(4, 4), dtype="bfloat16", spec=None, device=HOPPER, **operands
) -> str:
    """sizes: head dims of keys and values; lengths: of queries and keys."""
    (K, V), (L, M) = sizes, lengths
    shapes = ((1, L, 2, K), (1, M, 2, K), (1, M, 2, V))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return cudnn.refuses(*arrays, spec or ScoreSpec(), Operands(**operands), device)


GIVEN = np.zeros(1)  # any array: refused before its shape is read
REFUSED = {  # what the reason says: the call
    "the device is cpu": {"device": Device("cpu")},
    "dtype float32": {"dtype": "float32"},
    "head dim 12 is not a multiple of 8": {"sizes": (12, 12)},
    "head dim 264 is not a multiple of 8 up to 256": {"sizes": (264, 264)},
    "head dim 136 is not a multiple of 8 up to 128": {"sizes": (136, 136), "device": AMPERE},
    "head dim 256 is not a multiple of 8 up to 128": {"sizes": (256, 256), "device": BLACKWELL},
    "head dim 192 is not a multiple of 8 up to 128": {"sizes": (192, 192), "device": ABSENT},
    "head dim 128 of values is more than 64 of keys": {"sizes": (64, 128)},
    "192 is not a multiple of 8 up to 128": {"sizes": (192, 128), "device": AMPERE},
    "dropout is not supported: cuDNN draws from a seed": {"dropout": GIVEN},
    "softcap=30.0": {"spec": ScoreSpec(softcap=30.0)},
    "need queries that are also the keys": {"segments_BL": GIVEN, "key_segments_BM": GIVEN},
    "also the keys, from position 0": {"spec": FULL, "lengths": (2, 4), "segments_BL": GIVEN},
    "documents and chunks need": {"spec": ScoreSpec(causal=False, chunk=2), "offset": 2},
    "untested on GPUs of compute capability 10.x": {"segments_BL": GIVEN, "device": BLACKWELL},
    "head dim 192 > 128": {"sizes": (192, 128), "segments_BL": GIVEN},
    "head dim 256 > 128": {"sizes": (256, 256), "spec": ScoreSpec(chunk=2)},
    "one length": {"lengths": (2, 4), "offset": 2},
    "from position 0": {"offset": 2},
    "queries and keys of one length, from position 0": {"offset": np.int32(0)},
    "5 queries and 5 keys: backward needs even": {"lengths": (5, 5)},
    "4 queries and 7 keys": {"lengths": (4, 7), "spec": FULL},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_each_reason_against_a_backend_is_reported_on_a_gpu(reason):
    assert reason in refusal(**REFUSED[reason])


@pytest.mark.parametrize(
    ("dtype", "size", "device"),
    itertools.product(HALF, (64, 80, 96, 128), (ABSENT, AMPERE, HOPPER, BLACKWELL)),
)
def test_nothing_against_the_usual_shapes_on_a_gpu(dtype, size, device):
    call = {"dtype": dtype, "sizes": (size, size), "device": device}
    assert refusal(**call) == ""
    assert refusal(**call, spec=ScoreSpec(window=3, scale=0.1)) == ""
    assert refusal(**call, spec=FULL, lengths=(2, 6), offset=np.int32(3)) == ""
    assert refusal(**call, sinks_H=GIVEN) == ""
    masks = ({"segments_BL": GIVEN}, {"spec": ScoreSpec(chunk=2)})
    masks += ({"spec": ScoreSpec(causal=False, window=2)}, {"segments_BL": GIVEN, "spec": FULL})
    for mask in masks:
        assert bool(refusal(**call, **mask)) == (device == BLACKWELL)


def test_rules_with_settings_that_are_not_known_are_not_called(monkeypatch):
    def rule(query, key, value, temperature):
        pass

    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_fwd_rule", rule)
    for operand in ("segments_BL", "sinks_H"):
        assert "with unknown settings temperature" in refusal(**{operand: GIVEN})
    assert refusal() == ""


def test_nothing_against_large_heads_on_hopper(monkeypatch):
    assert refusal(sizes=(256, 256)) == ""
    assert refusal(sizes=(96, 64), device=AMPERE) == ""  # values are padded
    for version, reason in ((91000, ""), (90900, "head dim 192 is not")):
        monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda version=version: version)
        assert refusal(sizes=(192, 128)) == ""
        actual = refusal(sizes=(192, 128), device=BLACKWELL)
        assert reason in actual and bool(reason) == bool(actual)


LOWERED = {  # head dims, queries and keys, spec, operands
    "causal": ((128, 128), (64, 64), ScoreSpec()),
    "all keys": ((64, 64), (32, 64), FULL),
    "window": ((80, 80), (64, 64), ScoreSpec(window=16, scale=0.5)),
    "large heads": ((256, 256), (64, 64), ScoreSpec(window=16)),
    "smaller values": ((192, 128), (64, 64), ScoreSpec()),
    "padded values": ((96, 64), (64, 64), ScoreSpec()),
    "sinks": ((64, 64), (64, 64), ScoreSpec(window=16), "sinks_H"),
    "documents": ((128, 128), (64, 64), ScoreSpec(), "segments_BL"),
    "documents, window, sinks": (
        *((64, 64), (64, 64), ScoreSpec(window=16)),
        *("segments_BL", "sinks_H"),
    ),
    "documents, all keys": ((64, 64), (64, 64), FULL, "segments_BL"),
}
OPERANDS = {
    "segments_BL": jax.ShapeDtypeStruct((2, 64), "int32"),
    "sinks_H": jax.ShapeDtypeStruct((4,), "float32"),
}


@pytest.mark.parametrize("name", LOWERED)
def test_what_is_not_refused_lowers_for_cuda(name, monkeypatch):
    """jax's own checks, as on a Hopper, and cuDNN's call with our mask, window and scale."""
    (K, V), (L, M), spec, *names = LOWERED[name]
    monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda: 92800)
    for user in (choice, cudnn):
        monkeypatch.setattr(user, "target_device", lambda: HOPPER)
    shapes = ((2, L, 4, K), (2, M, 2, K), (2, M, 2, V))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def gradient(operands, *qkv):
        def loss(*qkv):
            out, lse = attention_with_lse(*qkv, spec, operands, backend="cudnn")
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

        return jax.grad(loss, (0, 1, 2))(*qkv)

    operands = Operands(0, **{name: OPERANDS[name] for name in names})
    traced = jax.jit(lambda some, *qkv: gradient(some._replace(offset=0), *qkv)).trace(
        operands._replace(offset=None), *arrays
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    biased = "segments_BL" in names
    kind = "ScaleBiasSoftmax" if biased else "Softmax"
    assert f"__cudnn$fmha{kind}(" in text and f"__cudnn$fmha{kind}Backward(" in text
    assert f"__cudnn$fmha{'Softmax' if biased else 'ScaleBiasSoftmax'}" not in text
    mask = "CAUSAL" if spec.causal else "NO_MASK"
    scale, window = spec.scale or K**-0.5, 0 if biased else spec.window
    for setting in (f'"mask_type": "{mask}"', f'"sliding_window_length": {window}'):
        assert setting in text.replace("\\22", '"')
    assert f'"fmha_scale": {scale}' in text.replace("\\22", '"')


def pretended(query, key, value, *, scale, mask_type, sliding_window_length, return_residual):
    """cuDNN's function by XLA; like it, backward drops the cotangent of the log-sum-exp."""
    assert return_residual and value.shape[-1] == key.shape[-1]
    spec = ScoreSpec(
        mask_type is cudnn.fused.MaskType.CAUSAL, sliding_window_length or 0, 0, 0, scale
    )
    out, lse = xla.attend(query, key, value, spec, Operands())
    return out, lax.stop_gradient(jnp.swapaxes(lse, 1, 2))


def scores_of(query, key, bias, scale, mask_type, window):
    """float32 scores [B, G, J, L, M] of cuDNN's call, -inf where its own mask is."""
    (B, L, H, K), (M, G) = query.shape, key.shape[1:3]
    grouped = query.reshape(B, L, G, H // G, K)
    scores = scale * jnp.einsum("BLGJK,BMGK->BGJLM", grouped, key)
    scores += bias[:, :, None] if bias.size else 0
    behind_LM = jnp.arange(L)[:, None] - jnp.arange(M)
    seen_LM = (behind_LM >= 0) | (mask_type is cudnn.fused.MaskType.NO_MASK)
    seen_LM &= behind_LM < (window or M)
    return jnp.where(seen_LM, scores, -jnp.inf)


def pretended_forward(
    query, key, value, bias, scale, variadic_args, mask_type, sliding_window_length
):
    assert variadic_args == (bias.size > 0, False)
    scores = scores_of(query, key, bias, scale, mask_type, sliding_window_length)
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("BGJLM,BMGV->BLGJV", jnp.exp(scores - lse[..., None]), value)
    out = out.reshape(*query.shape[:3], -1)
    lse = lse.reshape(query.shape[0], -1, query.shape[1])
    return (out, lse), (query, key, value, bias, lse, out)


def pretended_backward(
    scale, variadic_args, mask_type, sliding_window_length, return_residual, res, grad_output
):
    """FlashAttention's backward, from the output and the log-sum-exp that it is given."""
    assert not return_residual
    query, key, value, bias, lse, out = res
    scores = scores_of(query, key, bias, scale, mask_type, sliding_window_length)
    B, G, J, L, _ = scores.shape
    weights = jnp.exp(scores - lse.reshape(B, G, J, L, 1))
    slope, out = (x.reshape(B, L, G, J, -1) for x in (grad_output, out))
    inner = jnp.moveaxis(jnp.sum(slope * out, axis=-1), 1, 3)[..., None]
    slope_of_scores = jnp.einsum("BLGJV,BMGV->BGJLM", slope, value) - inner
    slope_of_scores *= scale * weights
    dq = jnp.einsum("BGJLM,BMGK->BLGJK", slope_of_scores, key).reshape(query.shape)
    dk = jnp.einsum("BGJLM,BLGJK->BMGK", slope_of_scores, query.reshape(B, L, G, J, -1))
    return dq, dk, jnp.einsum("BGJLM,BLGJV->BMGV", weights, slope), None


CALLS = {
    name: CASES[name]
    for name in (
        *("grouped", "multi-query", "all keys", "window", "scale", "heads of 192 and 128"),
        *("documents", "documents, all keys", "documents, window", "window on both sides"),
        *("chunks of all keys", "window and chunks", "sinks", "sinks, window"),
    )
} | {
    "documents, window, sinks": dataclasses.replace(CASES["documents, window"], sinks=True),
    "sinks, all keys": dataclasses.replace(CASES["all keys"], sinks=True),
    "padded values, documents": dataclasses.replace(CASES["documents"], head_dim=12, value_dim=8),
}


def pretend(monkeypatch) -> None:
    """cuDNN's functions by formulas. Short values are padded, as by an old cuDNN."""
    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_fwd_rule", pretended_forward)
    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_bwd_rule", pretended_backward)
    monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda: 90900)
    monkeypatch.setattr(cudnn.fused, "dot_product_attention", pretended)
    monkeypatch.setattr(cudnn.fused, "get_large_negative_number", lambda dtype: -(2.0**41))
    monkeypatch.setattr(cudnn, "refuses", lambda *call: "")


def test_the_bound_of_the_largest_score_does_not_count_the_sinks(monkeypatch):
    pretend(monkeypatch)
    case = CASES["sinks"]
    spec = dataclasses.replace(case.spec, largest=True)
    arrays, operands = arrays_of(case, "float32")
    arrays, sinks_H = [jnp.asarray(x) for x in arrays[:3]], 100 + jnp.asarray(operands.sinks_H)
    bound, exact = (
        attention_with_lse(*arrays, spec, operands._replace(sinks_H=sinks_H), backend=backend)[2]
        for backend in ("cudnn", "xla")
    )
    assert (bound >= exact - TOLERANCE["float32"]).all()
    assert (bound <= exact + np.log(arrays[1].shape[1]) + TOLERANCE["float32"]).all()


@pytest.mark.parametrize("name", CALLS)
def test_masks_sinks_and_gradients_around_cudnn_are_those_of_the_reference(name, monkeypatch):
    """Output, log-sum-exp and all gradients."""
    pretend(monkeypatch)
    case = CALLS[name]
    arrays, operands = arrays_of(case, "float32")
    actual, wanted = run(case, arrays, operands, "cudnn"), expected(case, arrays, operands)
    errors = {key: error(actual[key], wanted[key]) for key in actual}
    assert set(errors) == set(NAMES) - (set() if case.sinks else {"dsinks"})
    assert all(e <= TOLERANCE["float32"] for e in errors.values()), errors


def test_a_log_sum_exp_that_nothing_reads_costs_nothing(monkeypatch):
    monkeypatch.setattr(cudnn.fused, "dot_product_attention", pretended)
    monkeypatch.setattr(cudnn, "refuses", lambda *call: "")
    x = jnp.ones((1, 4, 2, 8))

    def products(with_lse: bool) -> int:
        def loss(x):
            if with_lse:
                return jnp.sum(attention_with_lse(x, x, x, backend="cudnn")[0])
            return jnp.sum(attention(x, x, x, backend="cudnn"))

        return str(jax.make_jaxpr(jax.grad(loss))(x)).count("dot_general")

    assert products(True) == products(False) > 0
