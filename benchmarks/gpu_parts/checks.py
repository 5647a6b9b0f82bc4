"""Every kernel against float64 NumPy on fresh random inputs, over the tables of cases of the tests.

The small shapes of those tables are made larger where a kernel's blocks need it. One row a backend:
how many cases it ran and how many it refused, and the largest error by norm; the seed repeats it.
"""

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable, Iterator

from gpu_parts.timing import Item, Sizes

GROWTH = 7  # of lengths and masks of attention's cases: several blocks, whole in none
ATTENTION = (  # of attention_cases.CASES, those that differ on a GPU
    *("grouped", "blocks", "window in blocks", "chunks in blocks", "all keys", "cross"),
    *("blocks continued", "documents in blocks", "documents of queries and keys", "everything"),
    *("sinks in blocks", "before the keys", "heads of 80", "heads of 96", "heads of 128"),
    *("heads of 192 and 128", "heads of 256", "soft cap in blocks", "window on both sides"),
)
SECONDS = 28  # of one backend; what is left of its cases then is left out
CASES = {"mosaic": 21, "triton": 8, "cudnn": 8, "tiled": 6, "xla": 6}  # at most, of each backend


def larger(case):
    """A case of attention with longer rows and masks, and heads that tensor cores can take."""
    spec = case.spec
    grown = dataclasses.replace(spec, window=GROWTH * spec.window, chunk=GROWTH * spec.chunk)
    return dataclasses.replace(
        case,
        length=GROWTH * case.length,
        keys=GROWTH * case.keys,
        offset=GROWTH * case.offset,
        segments=tuple(GROWTH * n for n in case.segments),
        key_segments=tuple(GROWTH * n for n in case.key_segments),
        head_dim=max(64, case.head_dim),
        value_dim=case.value_dim and max(64, case.value_dim),
        spec=grown,
    )


def refreshed(given, rng):
    """Other random numbers in every matrix of floats; what is zero or not finite stays."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def one(x):
        if getattr(x, "ndim", 0) < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        x = np.asarray(x)
        wide = x.astype(np.float64)
        keep = ~np.isfinite(wide) | (wide == 0)
        spread = np.std(wide[~keep]) if (~keep).any() else 1.0
        return np.where(keep, wide, spread * rng.normal(size=x.shape)).astype(x.dtype)

    return jax.tree.map(one, given)


def attention(name: str):
    cases = importlib.import_module("ops.attention_cases")
    chosen = {n: larger(cases.CASES[n]) for n in ATTENTION}
    even = dataclasses.replace(cases.CASES["heads of 64"], sinks=True)  # cuDNN takes even lengths
    chosen = {"sinks, even": larger(even)} | chosen
    return cases, chosen, cases.expected, cases.run


def loss(name: str):
    cases = importlib.import_module("ops.cross_entropy_cases")

    def expected(case, *arrays):
        return cases.expected(case, list(arrays))

    def run(case, *arrays_and_backend):
        return cases.run(case, list(arrays_and_backend[:-1]), arrays_and_backend[-1])

    return cases, cases.CASES, expected, run


def grouped(name: str):
    cases = importlib.import_module("ops.grouped_matmul_cases")
    return cases, cases.CASES, lambda case, arrays, sizes: cases.expected(case, arrays), cases.run


def block_matmul(name: str):
    cases = importlib.import_module("ops.block_matmul_cases")
    return cases, cases.CASES, cases.expected, cases.run


def decode(name: str):
    cases = importlib.import_module("ops.decode_attention_cases")
    return cases, cases.CASES, cases.expected, cases.run


def norm(name: str):
    cases = importlib.import_module("ops.norm_cases")
    return cases, cases.CASES, cases.expected, cases.run


def scan(name: str):
    cases = importlib.import_module("ops.chunk_scan_cases")
    chosen = cases.CASES if name == "scan" else cases.DELTA_CASES
    return cases, chosen, cases.expected, cases.run


OPS: dict[str, Callable] = {
    "attention": attention,
    "loss": loss,
    "grouped": grouped,
    "block-matmul": block_matmul,
    "decode": decode,
    "norm": norm,
    "scan": scan,
    "delta-scan": scan,
}


def check(op: str, backend: str, size: Sizes) -> dict:
    import jax
    import numpy as np

    cases, chosen, expected, run = OPS[op](op)
    seed = time.time_ns() % 2**32
    rng = np.random.default_rng(seed)
    dtype = "bfloat16" if size.on_gpu else "float32"
    limit = CASES[backend] if size.on_gpu else 2
    worst, ran, refused, wrong, started = 0.0, 0, {}, {}, time.time()
    for name, case in chosen.items():
        if ran >= limit or time.time() - started > SECONDS:
            break
        given = refreshed(cases.arrays_of(case, dtype), rng)
        try:
            with jax.default_matmul_precision("highest"):
                found = run(case, *given, backend)
        except ValueError as error:
            if "cannot run" not in str(error):
                raise
            refused[name] = str(error)
            continue
        ran += 1
        for key, error in errors_of(cases, found, expected(case, *given)).items():
            worst = float(np.maximum(worst, error))  # NaN stays NaN
            if not error <= tolerance(cases, case, key, dtype):
                wrong[f"{name}: {key}"] = error
    return {
        "cases": ran,
        "worst": worst,
        "refused": len(refused),
        "why": sorted(set(refused.values())),
        "wrong": wrong,
        "seed": seed,
        "ok": ran > 0 and not wrong,
    }


def errors_of(cases, found: dict, wanted: dict) -> dict[str, float]:
    if hasattr(cases, "errors"):
        return cases.errors(found, wanted)
    return {key: cases.error(found[key], wanted[key]) for key in found}


def tolerance(cases, case, key: str, dtype: str) -> float:
    """What the tests allow: one number a dtype, or (fp8) one a case and result."""
    if hasattr(cases, "tolerance"):
        return cases.tolerance(case, key, dtype)
    return cases.TOLERANCE[dtype]


def checks(op: str, backends: tuple[str, ...], size: Sizes) -> Iterator[Item]:
    for backend in backends if size.on_gpu else ("xla",):
        yield f"{op} {backend}", functools.partial(check, op, backend, size)
