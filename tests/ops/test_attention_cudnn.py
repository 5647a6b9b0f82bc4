"""What cuDNN is given and what it refuses; no kernel runs here."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ops.attention_cases import CASES, TOLERANCE, arrays_of, error, expected, run

import maxmeg.ops.attention.call as module
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
    "segment ids": {"segments_BL": GIVEN},
    "dropout": {"dropout": GIVEN},
    "sinks": {"sinks_H": GIVEN},
    "softcap=30.0": {"spec": ScoreSpec(softcap=30.0)},
    "chunk=2": {"spec": ScoreSpec(chunk=2)},
    "one length": {"lengths": (2, 4), "offset": 2},
    "from position 0": {"offset": 2},
    "queries and keys of one length, from position 0": {"offset": np.int32(0)},
    "window=2 needs causal": {"spec": ScoreSpec(causal=False, window=2)},
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


def test_nothing_against_large_heads_on_hopper(monkeypatch):
    assert refusal(sizes=(256, 256)) == ""
    assert refusal(sizes=(96, 64), device=AMPERE) == ""  # values are padded
    for version, reason in ((91000, ""), (90900, "head dim 192 is not")):
        monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda version=version: version)
        assert refusal(sizes=(192, 128)) == ""
        found = refusal(sizes=(192, 128), device=BLACKWELL)
        assert reason in found and bool(reason) == bool(found)


def test_auto_takes_cudnn_where_it_can(monkeypatch):
    monkeypatch.setattr(choice, "target_platform", lambda: "cuda")

    def chosen(head_dim: int, dtype: str, **options) -> str:
        x = jax.ShapeDtypeStruct((1, 4, 2, head_dim), dtype)
        order = module.preference(head_dim, choice.target_device())
        call = (x, x, x, ScoreSpec(**options), Operands())
        return choice.pick("attention", module.BACKENDS, order, "auto", call)

    assert chosen(64, "bfloat16") == "cudnn"
    assert chosen(64, "float32") == "xla"
    assert chosen(64, "bfloat16", softcap=1.0) == "xla"
    assert chosen(512, "bfloat16") == "xla"


LOWERED = {  # head dims, queries and keys, spec
    "causal": ((128, 128), (64, 64), ScoreSpec()),
    "all keys": ((64, 64), (32, 64), FULL),
    "window": ((80, 80), (64, 64), ScoreSpec(window=16, scale=0.5)),
    "large heads": ((256, 256), (64, 64), ScoreSpec(window=16)),
    "smaller values": ((192, 128), (64, 64), ScoreSpec()),
    "padded values": ((96, 64), (64, 64), ScoreSpec()),
}


@pytest.mark.parametrize("name", LOWERED)
def test_what_is_not_refused_lowers_for_cuda(name, monkeypatch):
    """jax's own checks, as on a Hopper, and cuDNN's call with our mask, window and scale."""
    (K, V), (L, M), spec = LOWERED[name]
    monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda: 92800)
    for user in (choice, cudnn):
        monkeypatch.setattr(user, "target_device", lambda: HOPPER)
    shapes = ((2, L, 4, K), (2, M, 2, K), (2, M, 2, V))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def gradient(*qkv):
        def loss(*qkv):
            out, lse = attention_with_lse(*qkv, spec, backend="cudnn")
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

        return jax.grad(loss, (0, 1, 2))(*qkv)

    text = jax.jit(gradient).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax(" in text and "__cudnn$fmhaSoftmaxBackward(" in text
    mask = "CAUSAL" if spec.causal else "NO_MASK"
    scale = spec.scale or K**-0.5
    for setting in (f'"mask_type": "{mask}"', f'"sliding_window_length": {spec.window}'):
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


CALLS = ["grouped", "multi-query", "all keys", "window", "scale", "heads of 192 and 128"]


@pytest.mark.parametrize("name", CALLS)
def test_the_log_sum_exp_has_a_gradient(name, monkeypatch):
    """Short values are padded, as by an old cuDNN."""
    monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda: 90900)
    monkeypatch.setattr(cudnn.fused, "dot_product_attention", pretended)
    monkeypatch.setattr(cudnn, "refuses", lambda *call: "")
    case = CASES[name]
    arrays, operands = arrays_of(case, "float32")
    jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    found, wanted = run(case, arrays, operands, "cudnn", jit), expected(case, arrays, operands)
    errors = {key: error(found[key], wanted[key]) for key in found}
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
