"""Softmax attention: one call, several backends, and the choice between them.

A backend is a module with SUPPORTS (a line for error messages), `refuses(q, k, v, spec, operands,
device)`, why it cannot run a call, and `attend(q, k, v, spec, operands)`, output and log-sum-exp.
"""

import dataclasses
import functools
import logging
import typing

import jax
from jaxtyping import Array, Float

from maxmeg.ops import attention_cudnn, attention_xla
from maxmeg.ops.attention_spec import AttentionDropout, Device, Operands, ScoreSpec, check_shapes
from maxmeg.ops.attention_xla import NEGATIVE, QUERY_BLOCK

__all__ = ["NEGATIVE", "QUERY_BLOCK", "AttentionDropout", "Operands", "ScoreSpec", "attention"]

CAUSAL, NOTHING_ELSE = ScoreSpec(), Operands()
BACKENDS = {"cudnn": attention_cudnn, "xla": attention_xla}


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
    if backend == "auto":
        backend = choose(*call)
    elif backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is none of auto, {', '.join(BACKENDS)}")
    elif reason := BACKENDS[backend].refuses(*call, target_device()):
        others = [name for name in BACKENDS if name != backend]
        raise ValueError(
            f"attention backend {backend} cannot run: {reason}; use auto or {' or '.join(others)}"
        )
    out_BLHV, lse_BLH = BACKENDS[backend].attend(*call)
    return (out_BLHV, lse_BLH) if with_lse else out_BLHV


def choose(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands) -> str:
    """The backend for a call; logs each new choice once."""
    device, reasons = target_device(), {}
    fits = (c for c in CHOICES if c.cuda == device.is_cuda and q_BLHK.shape[-1] <= c.head_dim)
    for name in next(fits).order:
        reason = BACKENDS[name].refuses(q_BLHK, k_BMGK, v_BMGV, spec, operands, device)
        if not reason:
            log_choice(name, "; ".join(f"{other}: {why}" for other, why in reasons.items()))
            return name
        reasons[name] = reason
    raise ValueError(
        "no attention backend can run this: "
        + "; ".join(f"{name}: {why}" for name, why in reasons.items())
        + ". Supported are: "
        + "; ".join(f"by {name}: {module.SUPPORTS}" for name, module in BACKENDS.items())
    )


def target_device() -> Device:
    """What the program will run on; the capability is that of a GPU of this process."""
    platform = target_platform()
    if jax.default_backend() != "gpu" or platform not in ("cuda", "gpu"):
        return Device(platform)
    major, minor = jax.local_devices()[0].compute_capability.split(".")
    return Device(platform, (int(major), int(minor)))


def target_platform() -> str:
    """Platform of the mesh in force, real or compiled for ahead of time, else the default's."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = getattr(device, "platform", None)
    return kind or jax.default_backend()


@functools.cache
def log_choice(backend: str, reason: str) -> None:
    because = f" ({reason})" if reason else ""
    logging.getLogger("maxmeg").info("attention backend: %s%s", backend, because)
