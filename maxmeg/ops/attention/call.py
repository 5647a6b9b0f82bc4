"""Softmax attention: one call, several backends, and the choice between them.

A backend (ops/backend.py) has `refuses(q, k, v, spec, operands, device)`, the reason why it cannot
run a call, and `attend(q, k, v, spec, operands)`, which returns output and log-sum-exp.
"""

import dataclasses

from jaxtyping import Array, Float

from maxmeg.ops.attention import cudnn as attention_cudnn
from maxmeg.ops.attention import mosaic as attention_mosaic
from maxmeg.ops.attention import triton as attention_triton
from maxmeg.ops.attention import xla as attention_xla
from maxmeg.ops.attention.spec import Operands, ScoreSpec, check_shapes
from maxmeg.ops.backend import Device, pick, target_device

CAUSAL, NOTHING_ELSE = ScoreSpec(), Operands()
BACKENDS = {
    "cudnn": attention_cudnn,
    "mosaic": attention_mosaic,
    "triton": attention_triton,
    "xla": attention_xla,
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """Backends in the order to try, for query head dims up to `head_dim`; because: the reason."""

    cuda: bool
    head_dim: int
    order: tuple[str, ...]
    because: str


# The first matching row decides. TFLOP/s are of one H200, bf16, causal (DESIGN.md, section 6).
CHOICES = (
    Choice(True, 128, ("cudnn", "xla"), "cuDNN at 128: 484-673 forward, 370-579 backward, 2k-16k"),
    Choice(True, 256, ("cudnn", "xla"), "not measured; XLA writes its scores to memory"),
    Choice(True, 2**31, ("xla",), "no other backend supports such heads"),
    Choice(False, 2**31, ("xla",), "no other backend runs there"),
)


def attention(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGV: Float[Array, "B M G V"],
    spec: ScoreSpec = CAUSAL,
    operands: Operands = NOTHING_ELSE,
    *,
    backend: str = "auto",
) -> Float[Array, "B L H V"]:
    """Attention with grouped key/value heads, softmax in float32.

    backend: a key of BACKENDS, or "auto" for the first of CHOICES that supports the call.
    ValueError if shapes do not fit, or if no backend (or the named one) supports the call.
    """
    return attention_with_lse(q_BLHK, k_BMGK, v_BMGV, spec, operands, backend=backend)[0]


def attention_with_lse(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGV: Float[Array, "B M G V"],
    spec: ScoreSpec = CAUSAL,
    operands: Operands = NOTHING_ELSE,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "B L H V"], Float[Array, "B L H"]]:
    """As `attention`, and the float32 log-sum-exp of each query's scores and sink."""
    check_shapes(q_BLHK, k_BMGK, v_BMGV, operands)
    call = (q_BLHK, k_BMGK, v_BMGV, spec, operands)
    order = preference(q_BLHK.shape[-1], target_device())
    return BACKENDS[pick("attention", BACKENDS, order, backend, call)].attend(*call)


def preference(head_dim: int, device: Device) -> tuple[str, ...]:
    """Backends in the order that "auto" tries."""
    return next(c.order for c in CHOICES if c.cuda == device.is_cuda and head_dim <= c.head_dim)
