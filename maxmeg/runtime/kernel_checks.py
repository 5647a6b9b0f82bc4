"""Every backend of every op on this device against a reference, and the file of what was found.

The reference of a call is its backend xla on the same numbers in float32, with products of full
precision. Compared are results and, where an op has them, gradients, by their norms.
"""

import collections
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxmeg.checkpoint.processes import Processes
from maxmeg.ops import choices
from maxmeg.ops.attention import call as attention_call
from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.ops.backend import SETTINGS
from maxmeg.ops.block_matmul import BACKENDS as BLOCK_BACKENDS
from maxmeg.ops.chunk_scan import BACKENDS as SCAN_BACKENDS
from maxmeg.ops.chunk_scan import ScanSpec, chunk_scan
from maxmeg.ops.cross_entropy import call as loss_call
from maxmeg.ops.decode_attention import call as decode_call
from maxmeg.ops.experts import grouped_matmul as grouped_call
from maxmeg.ops.quantized import BLOCK, Recipe, matmul

TOLERANCE = 2e-2  # of the norm, of bfloat16 inputs and float32 sums
ROUNDS = 3  # that are timed, after one that is not
XLA = "xla"
PLAIN = (XLA, "tiled")  # backends without kernels of their own
# A process that compiles for itself must not wait for the tuning of others.
ALONE = {"xla_gpu_shard_autotuning": False}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an op. arrays: its bfloat16 inputs that have gradients, made by a key. run(backend,
    *arrays) -> (results that have gradients, other results). is_rounded: whether the op rounds its
    inputs, so that the reference must have the same ones, not float32."""

    op: str
    words: str
    backends: Collection[str]
    arrays: Callable[[jax.Array], tuple[jax.Array, ...]]
    run: Callable[..., tuple[Any, Any]]
    is_rounded: bool = False


@dataclasses.dataclass(frozen=True)
class Check:
    """What a backend gave in a case. error: the largest, relative by norm. seconds: of a call with
    gradients. problem: what is wrong. refused: why the backend cannot run the case. Either is
    empty if it does not apply."""

    op: str
    words: str
    backend: str
    error: float = 0.0
    seconds: float = 0.0
    problem: str = ""
    refused: str = ""


def normal(shapes: Sequence[tuple[int, ...]], key: jax.Array) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return tuple(jax.random.normal(one, shape, jnp.bfloat16) for one, shape in pairs)


def attention_cases(scale: int) -> Iterator[Case]:
    """Causal with grouped heads, packed documents in a window, and heads of 192 and 128."""
    length = 64 * scale
    documents_BL = jnp.broadcast_to(jnp.arange(length) * 3 // length, (2, length))
    packed = Operands(segments_BL=documents_BL)
    for words, sizes, spec, operands in (
        ("causal, 8 heads of 128, 2 of keys", (8, 2, 128, 128), ScoreSpec(), Operands()),
        ("3 documents, window", (4, 4, 64, 64), ScoreSpec(window=length // 4), packed),
        ("heads of 192 and 128", (4, 4, 192, 128), ScoreSpec(), Operands()),
    ):
        heads, groups, size, value_size = sizes
        shapes = [(2, length, heads, size), (2, length, groups, size)]
        shapes.append((2, length, groups, value_size))

        def run(backend, q, k, v, spec=spec, operands=operands):
            results = attention_call.attention_with_lse(q, k, v, spec, operands, backend=backend)
            return results[:1], results[1:]

        arrays = functools.partial(normal, shapes)
        words = f"{length} tokens, {words}"
        yield Case("attention", words, attention_call.BACKENDS, arrays, run)


def loss_cases(scale: int) -> Iterator[Case]:
    """Plain, with z-loss and smoothing, and with a soft cap and words that no token has."""
    tokens, width, words = 40 * scale, 32 * scale, 100 * scale
    for text, options in (
        ("plain", {}),
        ("z-loss, label smoothing", {"z_loss": 0.1, "label_smoothing": 0.1}),
        ("soft cap, padded vocabulary", {"softcap": 3.0, "vocab_size": words - 7}),
    ):
        spec = loss_call.CrossEntropySpec(**{"vocab_size": words, "chunk": tokens, **options})

        def run(backend, h_TD, w_VD, spec=spec):
            targets_T = jnp.arange(tokens) * 7 % spec.vocab_size
            weights_T = jnp.where(targets_T % 5 == 0, 0.0, 1.0 / tokens)
            call = (h_TD, w_VD, targets_T, weights_T, spec)
            total, losses_T = loss_call.linear_cross_entropy(*call, backend=backend)
            return total, losses_T

        def arrays(key):
            h_TD, w_VD = normal([(tokens, width), (words, width)], key)
            return h_TD, w_VD * width**-0.5

        sizes = f"{tokens} x {width} x {words}, {text}"
        yield Case("linear + cross entropy", sizes, loss_call.BACKENDS, arrays, run)


def grouped_cases(scale: int) -> Iterator[Case]:
    """Equal groups, uneven ones with one that is empty, and rows after the last group."""
    rows, width, columns = 64 * scale, 32 * scale, 48 * scale
    for text, sizes in (
        ("equal groups", (rows // 4,) * 4),
        ("uneven groups", (rows // 2, 0, rows // 4 + 3, rows // 4 - 3)),
        ("rows without a group", (5, rows // 4, 7, rows // 4)),
    ):

        def run(backend, x_TD, w_EDF, sizes=sizes):
            sizes_E = jnp.asarray(sizes)
            return grouped_call.grouped_matmul(x_TD, w_EDF, sizes_E, backend=backend), ()

        arrays = functools.partial(normal, [(rows, width), (4, width, columns)])
        words = f"{rows} x {width} x {columns}, {text}"
        yield Case("grouped_matmul", words, grouped_call.BACKENDS, arrays, run)


def scan_cases(scale: int) -> Iterator[Case]:
    """Mamba's scan and the delta rule, one and several heads a group, and documents."""
    length = 64 * scale
    for op, text, groups, documents in (
        ("chunk_scan", "a group", 1, 1),
        ("chunk_scan", "2 groups, 3 documents", 2, 3),
        ("chunk_scan", "4 groups", 4, 1),
        ("delta_scan", "4 groups", 4, 1),
        ("delta_scan", "2 groups", 2, 1),
        ("delta_scan", "4 groups, 3 documents", 4, 3),
    ):

        def run(backend, q, k, v, decay, beta, op=op, documents=documents):
            segments_BL = jnp.broadcast_to(jnp.arange(length) * documents // length, (2, length))
            k = k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True).astype(k.dtype)
            decay = -jax.nn.softplus(decay).astype(jnp.float32)
            beta = jax.nn.sigmoid(beta).astype(jnp.float32) if op == "delta_scan" else None
            segments_BL = segments_BL if documents > 1 else None
            spec = ScanSpec(64, backend)
            return chunk_scan(q, k, v, decay, beta, segments_BL, None, spec), ()

        vectors, numbers = (2, length, groups, 64), (2, length, 4)
        shapes = [vectors, vectors, (2, length, 4, 64), numbers, numbers]
        arrays = functools.partial(normal, shapes)
        yield Case(op, f"{length} tokens, {text}", SCAN_BACKENDS, arrays, run)


def decode_cases(scale: int) -> Iterator[Case]:
    """One query a row, several, and rows of any length. Its results have no gradients."""
    for queries, heads, groups in ((1, 8, 2), (4, 4, 4), (1, 8, 1)):

        def run(backend, *arrays):
            q, *pages = map(jax.lax.stop_gradient, arrays)
            table = jnp.arange(4 * scale).reshape(4, scale)[:, ::-1]
            lengths_B = jnp.asarray([32 * scale, 5, 32 * scale - 9, 17])
            cache = decode_call.PagedCache(pages[0], pages[1], table, lengths_B)
            return (), decode_call.decode_attention(q, cache, backend=backend)

        pages = (4 * scale, 32, groups, 128)
        arrays = functools.partial(normal, [(4, queries, heads, 128), pages, pages])
        words = f"{queries} queries, {heads} heads, {groups} of keys"
        yield Case("decode attention", words, decode_call.BACKENDS, arrays, run)


def block_cases(scale: int) -> Iterator[Case]:
    """8-bit products with scales of blocks: square, wide, and rows that fill no block."""
    for rows, inner, outer in ((128, 128, 128), (16 * scale + 13, 256, 128), (128, 128, 384)):

        def run(backend, x, w):
            recipe = Recipe(backward="float8_e4m3fn", block=BLOCK, square=True, backend=backend)
            codes = recipe.weights(w, None)[0]
            return matmul(x, w, codes, codes, recipe), ()

        arrays = functools.partial(normal, [(rows, inner), (inner, outer)])
        words = f"{rows} x {inner} x {outer}"
        yield Case("block_matmul", words, BLOCK_BACKENDS, arrays, run, is_rounded=True)


KINDS = (attention_cases, loss_cases, grouped_cases, scan_cases, decode_cases, block_cases)


def cases(scale: int) -> Iterator[Case]:
    """Three cases of each op. scale: 1 for tests; 16 fills a GPU."""
    for kind in KINDS:
        yield from kind(scale)


def check_chosen(chosen: Collection[tuple[str, str]]) -> None:
    """Run the kernels that a program is about to use on small cases, unless `maxmeg doctor
    --kernels` found them right here. ValueError, on all processes, if one is wrong on any.

    chosen: (op, backend), the same on all processes.
    """
    kernels = sorted(pair for pair in chosen if pair[1] not in PLAIN)
    if kernels:
        processes = Processes("kernels")
        processes.together("checked", functools.partial(require_right, kernels), ValueError)


def require_right(kernels: Sequence[tuple[str, str]]) -> None:
    """ValueError if one of (op, backend) is wrong in the first case of its op that it can run."""
    right = choices.local_results(choices.LOCAL).get("order", {})
    scale = 32 if jax.default_backend() == "gpu" else 1
    for op, backend in kernels:
        if backend in right.get(op, ()):
            continue
        outcomes = (
            check
            for case in cases(scale)
            if case.op == op
            for check in checks(dataclasses.replace(case, backends=(backend,)))
        )
        check = next((each for each in outcomes if not each.refused), None)
        if check and check.problem:
            raise ValueError(
                f"{op} backend {backend} is wrong on {choices.this_device()['device']} "
                f"({check.words}: {check.problem}, more than {TOLERANCE}): set "
                f"{SETTINGS.get(op, op)}=xla; maxmeg doctor --kernels checks all backends"
            )


def checks(case: Case, announce: Callable[[Check], None] = lambda check: None) -> Iterator[Check]:
    """A check of each backend of the case. announce: gets it before the backend runs, so that what
    ends the process is known."""
    key, slope_key = jax.random.split(jax.random.key(0))
    arrays = case.arrays(key)
    exact = arrays if case.is_rounded else [array.astype(jnp.float32) for array in arrays]
    with jax.default_matmul_precision("highest"):
        jit = functools.partial(jax.jit, compiler_options=ALONE)
        reference = jit(functools.partial(gradients, case, XLA))(slope_key, *exact)
    for backend in case.backends:
        check = Check(case.op, case.words, backend)
        announce(check)
        run = jit(functools.partial(gradients, case, backend))
        yield compared(check, functools.partial(run, slope_key, *arrays), reference)


def gradients(case: Case, backend: str, slope_key: jax.Array, *arrays: jax.Array) -> tuple:
    """(results that have gradients, other results, gradients of the arrays)."""
    run = functools.partial(case.run, backend)
    results, pull, others = jax.vjp(run, *arrays, has_aux=True)
    leaves, structure = jax.tree.flatten(results)
    slopes = [
        jax.random.normal(slope_key, leaf.shape, jnp.bfloat16).astype(leaf.dtype) for leaf in leaves
    ]
    return results, others, pull(jax.tree.unflatten(structure, slopes))


def compared(check: Check, run: Callable[[], Any], reference) -> Check:
    """The check with what a backend gives and how long it takes, or why it does not run."""
    try:
        arrays, times = jax.block_until_ready(run()), []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
    except Exception as error:  # of a compiler or a driver, of any kind: the next backend may run
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        is_refused = isinstance(error, ValueError) and "cannot run" in line
        return dataclasses.replace(check, **{"refused" if is_refused else "problem": line})
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(reference), strict=True)
    error = max(relative_error(*pair) for pair in pairs)
    problem = "" if error <= TOLERANCE else f"differs from the reference by {error:.2g}"
    seconds = statistics.median(times)
    return dataclasses.replace(check, error=error, seconds=seconds, problem=problem)


def relative_error(array, reference) -> float:
    """Of the norm; infinite where anything is not finite."""
    array, reference = (np.asarray(each, np.float64) for each in (array, reference))
    scale = np.linalg.norm(reference)
    error = np.linalg.norm(array - reference) / (scale if scale else 1.0)
    return float(error) if np.isfinite(error) else float("inf")


def results(outcomes: Collection[Check]) -> dict[str, Any]:
    """What ops/choices.py reads of the checks: this GPU and its JAX, the backends that are wrong
    and why, and the order of the others of each op, fastest first."""
    wrong: dict[str, dict[str, str]] = collections.defaultdict(dict)
    ratios: dict[str, dict[str, list[float]]] = collections.defaultdict(dict)
    base = {(check.op, check.words): check.seconds for check in outcomes if check.backend == XLA}
    for check in outcomes:
        if check.problem:
            wrong[check.op][check.backend] = f"{check.words}: {check.problem}"
        elif not check.refused:
            ratio = check.seconds / base.get((check.op, check.words), check.seconds)
            ratios[check.op].setdefault(check.backend, []).append(ratio)
    order = {
        op: sorted(backends.keys() - wrong[op].keys(), key=lambda name: np.mean(backends[name]))
        for op, backends in ratios.items()
        if op in choices.OPS
    }
    wrong = {op: backends for op, backends in wrong.items() if backends}
    return {**choices.this_device(), "wrong": wrong, "order": order}


def write(outcomes: Collection[Check]) -> Path:
    """Write what was found for "auto" to read. Returns the file."""
    choices.LOCAL.parent.mkdir(parents=True, exist_ok=True)
    choices.LOCAL.write_text(json.dumps(results(outcomes), indent=1) + "\n", encoding="utf-8")
    return choices.LOCAL


def line(check: Check) -> str:
    """The check in one line for the terminal."""
    words = f"{check.op:22s} {check.backend:7s} {check.words:48s} "
    if check.refused:
        return words + f"not here: {check.refused.partition(': ')[2].partition(';')[0]}"
    if check.problem:
        return words + f"WRONG: {check.problem}"
    return words + f"ok, error {check.error:.1e}, {1e3 * check.seconds:.3g} ms"
