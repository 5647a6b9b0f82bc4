"""One table of norms, and what they should give.

Imports neither pytest nor a kernel: a machine with a GPU runs it too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from maxmeg.ops.norm import norm

NAMES = ("out", "dx", "dweight", "dbias")
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3}  # of the norm
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """LayerNorm if `centred`, else RMSNorm. scale, mean: of the inputs."""

    shape: tuple[int, ...] = (2, 3, 24)
    centred: bool = False
    scale: float = 1.0
    mean: float = 0.5


CASES = {
    "rms": Case(),
    "layer": Case(centred=True),
    "rms, wide": Case((3, 129, 4096)),
    "layer, wide": Case((3, 129, 4096), centred=True),
    "rms, large": Case(scale=1e4, mean=5e3),
    "layer, large": Case(scale=1e4, mean=5e3, centred=True),
    "rms, small": Case(scale=1e-4, mean=5e-5),
    "layer, small": Case(scale=1e-4, mean=5e-5, centred=True),
}


def arrays_of(case: Case, dtype: str) -> tuple[np.ndarray, ...]:
    """(x, weight, cotangent), and the bias of LayerNorm."""
    rng = np.random.default_rng(0)
    x = case.scale * rng.normal(size=case.shape) + case.mean
    weight, bias = rng.normal(size=(2, case.shape[-1]))
    arrays = (x, weight, rng.normal(size=case.shape), *([bias] if case.centred else []))
    return tuple(np.asarray(jnp.asarray(array, dtype)) for array in arrays)


def unit(x: np.ndarray, centred: bool) -> tuple[np.ndarray, np.ndarray]:
    """(normalized x, the factor that normalizes it)."""
    x = x - x.mean(-1, keepdims=True) if centred else x
    factor = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    return factor * x, factor


def expected(case: Case, *arrays) -> dict[str, np.ndarray]:
    """Result and gradients in float64."""
    x, weight, slope, *bias = (np.asarray(array, np.float64) for array in arrays)
    normalized, factor = unit(x, case.centred)
    d_unit, rows = slope * weight, tuple(range(x.ndim - 1))
    dx = d_unit - normalized * (d_unit * normalized).mean(-1, keepdims=True)
    dx -= d_unit.mean(-1, keepdims=True) if case.centred else 0
    wanted = {
        "out": normalized * weight + sum(bias),
        "dx": factor * dx,
        "dweight": (slope * normalized).sum(rows),
    }
    return wanted | ({"dbias": slope.sum(rows)} if case.centred else {})


def run(case: Case, *arrays_and_backend) -> dict[str, np.ndarray]:
    """What `norm` gives for `expected`; its only backend is XLA."""
    *arrays, backend = arrays_and_backend
    if backend != "xla":
        raise ValueError(f"norm backend {backend!r} must be xla")

    def both(x, weight, slope, *bias):
        def call(x, weight, *bias):
            return norm(x, weight, *(bias or [None]), EPS, centred=case.centred)

        out, pull = jax.vjp(call, x, weight, *bias)
        return out, *pull(slope)

    actual = jax.jit(both)(*arrays)
    return {name: np.asarray(array) for name, array in zip(NAMES, actual, strict=False)}


def error(actual, wanted) -> float:
    """Of the norm."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(actual - wanted) / (np.linalg.norm(wanted) or 1.0))
