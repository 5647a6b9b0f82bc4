"""Softmax attention: one call, several backends, and the choice between them.

A backend (ops/backend.py) has `refuses(q, k, v, spec, operands, device)`, why it cannot run a call,
and `attend(q, k, v, spec, operands)`, output and log-sum-exp.
"""

import dataclasses
import typing

from jaxtyping import Array, Float

from maxmeg.ops.attention import cudnn as attention_cudnn
from maxmeg.ops.attention import mosaic as attention_mosaic
from maxmeg.ops.attention import triton as attention_triton
from maxmeg.ops.attention import xla as attention_xla
from maxmeg.ops.attention.spec import (
    NEGATIVE,
    AttentionDropout,
    Operands,
    ScoreSpec,
    check_shapes,
)
from maxmeg.ops.attention.xla import QUERY_BLOCK
from maxmeg.ops.backend import Device, pick, target_device

__all__ = ["NEGATIVE", "QUERY_BLOCK", "AttentionDropout", "Operands", "ScoreSpec", "attention"]

CAUSAL, NOTHING_ELSE = ScoreSpec(), Operands()
BACKENDS = {
    "cudnn": attention_cudnn,
    "mosaic": attention_mosaic,
    "triton": attention_triton,
    "xla": attention_xla,
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """Backends in the order to try, up to a head dim of queries; `because`: who measured it."""

    cuda: bool
    head_dim: int
    order: tuple[str, ...]
    because: str


# The first row that fits rules. TFLOP/s are of one H200, bf16, causal (DESIGN.md, section 6).
CHOICES = (
    Choice(True, 128, ("cudnn", "xla"), "cuDNN at 128: 484-673 forward, 370-579 backward, 2k-16k"),
    Choice(True, 256, ("cudnn", "xla"), "not measured; XLA writes its scores to memory"),
    Choice(True, 2**31, ("xla",), "no other backend takes such heads"),
    Choice(False, 2**31, ("xla",), "no other backend runs there"),
)


@typing.overload
def attention(
    q_BLHK: Array,
    k_BMGK: Array,
    v_BMGV: Array,
    spec: ScoreSpec = ...,
    operands: Operands = ...,
    *,
    with_lse: typing.Literal[False] = False,
    backend: str = ...,
) -> Array: ...


@typing.overload
def attention(
    q_BLHK: Array,
    k_BMGK: Array,
    v_BMGV: Array,
    spec: ScoreSpec = ...,
    operands: Operands = ...,
    *,
    with_lse: bool,
    backend: str = ...,
) -> tuple[Array, Array]: ...


def attention(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGV: Float[Array, "B M G V"],
    spec: ScoreSpec = CAUSAL,
    operands: Operands = NOTHING_ELSE,
    *,
    with_lse: bool = False,
    backend: str = "auto",
) -> Float[Array, "B L H V"] | tuple[Float[Array, "B L H V"], Float[Array, "B L H"]]:
    """Attention with grouped key/value heads, softmax in float32.

    with_lse: also the log-sum-exp of each query's scores (and sink), float32. backend: a key of
    BACKENDS, or "auto" for the first of CHOICES that takes the call. ValueError where shapes do
    not fit, or the named backend, or every one, cannot run it: then it says why.
    """
    check_shapes(q_BLHK, k_BMGK, v_BMGV, operands)
    call = (q_BLHK, k_BMGK, v_BMGV, spec, operands)
    order = preference(q_BLHK.shape[-1], target_device())
    out_BLHV, lse_BLH = BACKENDS[pick("attention", BACKENDS, order, backend, call)].attend(*call)
    return (out_BLHV, lse_BLH) if with_lse else out_BLHV


def preference(head_dim: int, device: Device) -> tuple[str, ...]:
    """Backends in the order that "auto" tries."""
    return next(c.order for c in CHOICES if c.cuda == device.is_cuda and head_dim <= c.head_dim)
