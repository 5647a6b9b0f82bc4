"""Output projection and cross entropy in one: one call, several backends, the choice between them.

A backend (ops/backend.py) has `refuses(h, w, targets, weights, spec, device)`, why it cannot run a
call, and `linear_cross_entropy(h, w, targets, weights, spec)`, differentiable by h and w.
"""

import dataclasses

from jaxtyping import Array, Float, Int

from maxmeg.ops.backend import Device, pick, target_device
from maxmeg.ops.cross_entropy import mosaic as cross_entropy_mosaic
from maxmeg.ops.cross_entropy import tiled as cross_entropy_tiled
from maxmeg.ops.cross_entropy import xla as cross_entropy_xla
from maxmeg.ops.cross_entropy.spec import MASKED, CrossEntropySpec, check_shapes, softcapped

__all__ = ["MASKED", "CrossEntropySpec", "choice", "linear_cross_entropy", "softcapped"]

BACKENDS = {
    "xla": cross_entropy_xla,
    "tiled": cross_entropy_tiled,
    "mosaic": cross_entropy_mosaic,
}
FLOAT32 = 4  # bytes of a logit


@dataclasses.dataclass(frozen=True)
class Choice:
    """Backends in the order to try while a chunk's logits take at most so many bytes; `because`:
    who measured it, or what else decides."""

    cuda: bool
    logits: int
    order: tuple[str, ...]
    because: str


MIB = 2**20
# The first row that fits rules. CPU: CPU time of tiled over xla's (benchmarks/NOTES.md). CUDA: not
# timed; by what the compiled programs compute and move, tiled costs 5 % of a step of Llama 3 8B.
CHOICES = (
    Choice(True, 1024 * MIB, ("xla", "tiled"), "three products for four, and half the traffic"),
    Choice(True, 2**63, ("tiled", "xla"), "for memory, 60 MiB for some GiB"),
    Choice(False, 512 * MIB, ("xla", "tiled"), "0.93 (logits of 250 MiB) to 1.23 (8 MiB)"),
    Choice(False, 2**63, ("tiled", "xla"), "as fast, and for memory"),
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
    """Sum of weights * loss (label smoothing and z-loss in it), and each token's cross entropy.

    w_VD is this device's part of the vocabulary (over pipe and tensor); tokens are the same on
    every device of those axes, and so are the results. Only the sum has a gradient, with respect
    to h (partial sums over the vocabulary's axes) and w; float32 inside. A target outside the
    vocabulary is no word: its logit counts as 0 and has no gradient. A token of weight 0 adds
    nothing to the sum and gets no gradient; it must be finite all the same.

    backend: a key of BACKENDS, or "auto" for the first of CHOICES that takes the call. ValueError
    where shapes or dtypes do not fit, or the named backend, or every one, cannot run it.
    """
    check_shapes(h_TD, w_VD, targets_T, weights_T)
    call = (h_TD, w_VD, targets_T, weights_T, spec)
    order = preference(h_TD.shape[0], w_VD.shape[0], spec.chunk, target_device())
    name = pick("linear + cross entropy", BACKENDS, order, backend, call)
    return BACKENDS[name].linear_cross_entropy(*call)


def preference(tokens: int, words: int, chunk: int, device: Device) -> tuple[str, ...]:
    """Backends in the order that "auto" tries."""
    size = FLOAT32 * min(tokens, chunk) * words
    return next(c.order for c in CHOICES if c.cuda == device.is_cuda and size <= c.logits)


def choice(named: str, tokens: int, words: int, chunk: int, device: Device) -> str:
    """The backend of a call that every backend can run; for planning."""
    return preference(tokens, words, chunk, device)[0] if named == "auto" else named
