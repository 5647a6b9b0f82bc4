"""Output projection fused with cross entropy: one call, several backends, and the choice.

A backend (ops/backend.py) has `refuses(h, w, targets, weights, spec, device)`, the reason why it
cannot run a call, and `linear_cross_entropy(h, w, targets, weights, spec)`, differentiable in h, w.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmeg.ops.backend import Device, pick, target_device
from maxmeg.ops.cross_entropy import mosaic as cross_entropy_mosaic
from maxmeg.ops.cross_entropy import tiled as cross_entropy_tiled
from maxmeg.ops.cross_entropy import xla as cross_entropy_xla
from maxmeg.ops.cross_entropy.spec import MASKED, CrossEntropySpec, check_shapes, softcapped

__all__ = ["MASKED", "CrossEntropySpec", "choice", "linear_cross_entropy", "softcapped"]
__all__ += ["token_log_probs"]

BACKENDS = {
    "xla": cross_entropy_xla,
    "tiled": cross_entropy_tiled,
    "mosaic": cross_entropy_mosaic,
}
FLOAT32 = 4  # bytes of a logit


@dataclasses.dataclass(frozen=True)
class Choice:
    """Backends in the order to try if a chunk's logits take up to `logits` bytes; because: why."""

    cuda: bool
    logits: int
    order: tuple[str, ...]
    because: str


MIB = 2**20
# The first matching row decides. CPU: CPU time of tiled over xla's (benchmarks/NOTES.md). CUDA: not
# timed; by the compiled programs' FLOPs and bytes, tiled costs 5 % of a step of Llama 3 8B.
CHOICES = (
    Choice(True, 1024 * MIB, ("xla", "tiled"), "three products, not four; half the traffic"),
    Choice(True, 2**63, ("tiled", "xla"), "memory: 60 MiB instead of some GiB"),
    Choice(False, 512 * MIB, ("xla", "tiled"), "0.93 (logits of 250 MiB) to 1.23 (8 MiB)"),
    Choice(False, 2**63, ("tiled", "xla"), "as fast, and less memory"),
)


def linear_cross_entropy(
    h_TD: Float[Array, "T D"],
    w_VD: Float[Array, "V D"],
    targets_T: Int[Array, " T"],
    weights_T: Float[Array, " T"],
    spec: CrossEntropySpec,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, ""], Float[Array, " T"]]:
    """(sum of weights * loss with label smoothing and z-loss, cross entropy of each token).

    w_VD is this device's part of the vocabulary, which is sharded over pipe and tensor; tokens and
    results are the same on all devices along these axes. Only the sum has gradients: with respect
    to h (partial sums over these axes) and w. Arithmetic is float32. The logit of a target outside
    of the vocabulary counts as 0. A token of weight 0 adds nothing and gets no gradient, but must
    be finite.

    backend: a key of BACKENDS, or "auto" for the first of CHOICES that supports the call.
    ValueError if shapes or dtypes do not fit, or if no backend (or the named one) supports it.
    """
    check_shapes(h_TD, w_VD, targets_T, weights_T)
    call = (h_TD, w_VD, targets_T, weights_T, spec)
    order = preference(h_TD.shape[0], w_VD.shape[0], spec.chunk, target_device())
    name = pick("linear + cross entropy", BACKENDS, order, backend, call)
    return BACKENDS[name].linear_cross_entropy(*call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_log_probs(
    h_TD: Float[Array, "T D"],
    w_VD: Float[Array, "V D"],
    targets_T: Int[Array, " T"],
    spec: CrossEntropySpec,
    backend: str = "auto",
) -> Float[Array, " T"]:
    """Log-probability of each target, differentiable with respect to h and w.

    The arguments are those of `linear_cross_entropy`, and so is the memory: the gradient of any
    function f of the log-probabilities is that of the cross entropy with weights -df/dlog_probs,
    which backward computes. Beside its products there is one more, of forward.
    """
    weights_T = jnp.zeros(targets_T.shape, jnp.float32)
    return -linear_cross_entropy(h_TD, w_VD, targets_T, weights_T, spec, backend=backend)[1]


def log_probs_forward(h_TD, w_VD, targets_T, spec: CrossEntropySpec, backend: str):
    return token_log_probs(h_TD, w_VD, targets_T, spec, backend), (h_TD, w_VD, targets_T)


def log_probs_backward(spec: CrossEntropySpec, backend: str, residuals, slope_T):
    h_TD, w_VD, targets_T = residuals

    def loss(h_TD, w_VD):
        return linear_cross_entropy(h_TD, w_VD, targets_T, -slope_T, spec, backend=backend)[0]

    return *jax.grad(loss, argnums=(0, 1))(h_TD, w_VD), None


token_log_probs.defvjp(log_probs_forward, log_probs_backward)


def preference(tokens: int, words: int, chunk: int, device: Device) -> tuple[str, ...]:
    """Backends in the order that "auto" tries."""
    size = FLOAT32 * min(tokens, chunk) * words
    return next(c.order for c in CHOICES if c.cuda == device.is_cuda and size <= c.logits)


@functools.lru_cache(maxsize=4096)
def choice(named: str, tokens: int, words: int, chunk: int, device: Device) -> str:
    """The backend that a call gets if all backends support it; for planning."""
    return preference(tokens, words, chunk, device)[0] if named == "auto" else named
