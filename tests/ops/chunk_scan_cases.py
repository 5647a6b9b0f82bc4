"""The recurrence of the chunked scan and its reverse in NumPy, and random inputs for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from maxmeg.ops.chunk_scan import ScanSpec, chunk_scan


@dataclasses.dataclass(frozen=True)
class Case:
    """kind: "mamba" (no beta), "delta" (beta), "kda" (beta and a decay for each channel) or
    "channels" (the decays without beta)."""

    kind: str = "mamba"
    rows: int = 2
    length: int = 21
    groups: int = 2
    heads: int = 4
    state: int = 6
    value: int = 5
    chunk: int = 4
    documents: bool = True
    initial: bool = True
    decay: float = 0.5
    seed: int = 0


# For benchmarks/gpu.py, in sizes that kernels take.
KERNEL = {"rows": 1, "state": 128, "value": 64, "chunk": 64}
CASES = {
    "documents": Case(**KERNEL | {"rows": 2}, length=333),
    "one document": Case(**KERNEL, length=512, heads=6, documents=False, initial=False),
    "fast decays": Case(**KERNEL, length=300, groups=1, decay=20.0),
    "slow decays": Case(**KERNEL, length=700, groups=4, documents=False, decay=0.01),
    "wide states": Case(**KERNEL | {"state": 256}, length=290),
    "wide heads": Case(**KERNEL | {"value": 128}, length=290),
    "less than a chunk": Case(**KERNEL, length=37, heads=2),
}
DELTA_CASES = {
    "documents": Case("delta", **KERNEL | {"rows": 2, "value": 128}, length=333),
    "slow decays": Case("delta", **KERNEL, length=400, groups=4, decay=0.01, documents=False),
    "less than a chunk": Case("delta", **KERNEL, length=37, heads=2, initial=False),
    "many heads": Case("delta", **KERNEL | {"value": 128}, length=90, groups=24, heads=72),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # of the largest value
NAMES = ("q", "k", "v", "log_decay", "beta", "state")


def inputs_of(case: Case) -> tuple[dict, np.ndarray | None]:
    """(arrays of float64 by name, segment ids or None). Keys have length 1 with the delta rule."""
    rng = np.random.default_rng(case.seed)
    B, L, G, H, N, P = (
        *(case.rows, case.length, case.groups, case.heads),
        *(case.state, case.value),
    )
    by_channel = (N,) if case.kind in ("kda", "channels") else ()
    arrays = {
        "q": rng.normal(size=(B, L, G, N)),
        "k": rng.normal(size=(B, L, G, N)),
        "v": rng.normal(size=(B, L, H, P)),
        "log_decay": -rng.exponential(case.decay, size=(B, L, H, *by_channel)),
    }
    if case.kind in ("delta", "kda"):
        arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
        arrays["beta"] = rng.uniform(size=(B, L, H))
    if case.initial:
        arrays["state"] = rng.normal(size=(B, H, N, P))
    segments = np.sort(rng.integers(0, 4, size=(B, L)), axis=1) if case.documents else None
    return {name: np.float32(x).astype(np.float64) for name, x in arrays.items()}, segments


def slopes_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of a loss with respect to y and the last state."""
    rng, B = np.random.default_rng(case.seed + 1), case.rows
    sizes = (B, case.length, case.heads, case.value), (B, case.heads, case.state, case.value)
    d_y, d_state = (np.float32(rng.normal(size=size)).astype(np.float64) for size in sizes)
    return d_y, d_state


def arrays_of(case: Case, dtype: str) -> tuple[dict, np.ndarray | None]:
    """(arrays by name, queries, keys and values in dtype, decays and beta of any sign; segment
    ids)."""
    arrays, segments = inputs_of(case)
    kinds = {name: dtype if name in ("q", "k", "v") else "float32" for name in arrays}
    return {name: np.asarray(x, jnp.dtype(kinds[name])) for name, x in arrays.items()}, segments


SIGNS = {"log_decay": -1, "beta": 1}  # of what is passed on


def signed(arrays: dict) -> dict:
    return arrays | {name: SIGNS[name] * abs(arrays[name]) for name in SIGNS if name in arrays}


def expected(
    case: Case, arrays: dict, segments: np.ndarray | None, slopes: tuple | None = None
) -> dict[str, np.ndarray]:
    """y, the last state, and each input's gradient for `slopes`, by default `rounded_slopes`: the
    recurrence in float64, token by token, and its reverse."""
    wide = signed({name: np.asarray(x, np.float64) for name, x in arrays.items()})
    heads, by_channel = case.heads // case.groups, wide["log_decay"].ndim == 4
    q, k = (np.repeat(wide[name], heads, axis=2) for name in ("q", "k"))
    v, slopes = wide["v"], slopes or rounded_slopes(case, arrays)
    d_y, d_state = (np.asarray(x, np.float64) for x in slopes)
    beta = wide["beta"][..., None] if "beta" in wide else np.ones((*v.shape[:3], 1))
    is_delta, decay = "beta" in wide, np.exp(wide["log_decay"]).reshape(*v.shape[:3], -1, 1)
    if segments is not None:
        decay[:, 1:] *= (segments[:, 1:] == segments[:, :-1])[..., None, None, None]
    states, kept, rests, ys = [wide.get("state", np.zeros_like(d_state))], [], [], []
    for t in range(v.shape[1]):
        kept.append(decay[:, t] * states[-1])
        rests.append(v[:, t] - is_delta * np.einsum("bhn,bhnp->bhp", k[:, t], kept[-1]))
        states.append(kept[-1] + k[:, t, ..., None] * (beta[:, t] * rests[-1])[:, :, None])
        ys.append(np.einsum("bhn,bhnp->bhp", q[:, t], states[-1]))
    grads: dict = {name: np.zeros_like(wide[name]) for name in wide}

    def put(name, t, state, other):
        slope = np.einsum("bhnp,bhp->bhn", state, other)
        grads[name][:, t] += slope.reshape(case.rows, case.groups, heads, -1).sum(axis=2)

    for t in reversed(range(v.shape[1])):
        put("q", t, states[t + 1], d_y[:, t])
        d_state = d_state + q[:, t, ..., None] * d_y[:, t, :, None]
        d_u = np.einsum("bhn,bhnp->bhp", k[:, t], d_state)
        put("k", t, d_state, beta[:, t] * rests[t])
        grads["v"][:, t] = d_v = beta[:, t] * d_u
        if is_delta:
            grads["beta"][:, t] = (d_u * rests[t]).sum(axis=2)
            put("k", t, kept[t], -d_v)
            d_state = d_state - k[:, t, ..., None] * d_v[:, :, None]
        d_state = decay[:, t] * d_state
        d_decay = np.einsum("bhnp,bhnp->bhn", d_state, states[t])
        grads["log_decay"][:, t] = d_decay if by_channel else d_decay.sum(axis=-1)
    for name in SIGNS.keys() & grads.keys():
        grads[name] *= SIGNS[name] * np.sign(np.asarray(arrays[name], np.float64))
    grads["state"] = d_state
    named = {f"gradient of {name}": grads[name] for name in arrays}
    return {"y": np.stack(ys, axis=1), "state": states[-1]} | named


def rounded_slopes(case: Case, arrays: dict) -> tuple:
    """Gradients of y, in its dtype, and of the last state."""
    d_y, d_state = slopes_of(case)
    return np.asarray(d_y, arrays["v"].dtype), np.float32(d_state)


def run(case: Case, arrays: dict, segments: np.ndarray | None, backend: str) -> dict:
    """As `expected`, by the op."""

    @jax.jit
    def results(arrays, segments, slopes):
        def scan(arrays):
            *inputs, state = (signed(arrays).get(name) for name in NAMES)
            return chunk_scan(*inputs, segments, state, ScanSpec(case.chunk, backend))

        (y, state), pull = jax.vjp(scan, arrays)
        return y, state, pull(slopes)[0]

    y, state, grads = results(arrays, segments, rounded_slopes(case, arrays))
    return {"y": y, "state": state} | {f"gradient of {name}": x for name, x in grads.items()}


def error(actual, wanted: np.ndarray) -> float:
    """Largest error, of the largest value."""
    return float(abs(np.asarray(actual, np.float64) - wanted).max() / abs(wanted).max())
