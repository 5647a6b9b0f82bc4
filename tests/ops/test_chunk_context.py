"""The chunked scan over sequences that are cut over context equals the recurrence."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ops.chunk_scan_cases import Case, derivative, float32, inputs_of, recurrence, slopes_of
from ops.test_chunk_scan import check, check_slope

from maxmeg.ops.chunk_context import chunk_scan_over_context
from maxmeg.ops.chunk_scan import ScanSpec
from maxmeg.parallel.mesh import AXES, CONTEXT_AXES, make_mesh
from maxmeg.parallel.sequence import context_order
from maxmeg.parallel.spmd import spmd

NAMES = ("q", "k", "v", "log_decay", "beta")
KINDS = ("mamba", "delta", "kda", "channels")
QUICK = [(2, "mamba", True)]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for context in (2, 3, 4)
    for kind in KINDS
    for documents in (True, False)
    for case in [(context, kind, documents)]
]


def case_of(kind: str, documents: bool) -> Case:
    return Case(
        kind, length=48, groups=2, documents=documents, initial=False, chunk=4, decay=0.1, seed=3
    )


def segments_of(case: Case) -> np.ndarray | None:
    """Documents that end within halves, at their ends, and cover several."""
    ends = np.array([[3, 20, 30], [6, 8, 12]])
    places = np.arange(case.length)[None, :, None]
    return (places >= ends[:, None]).sum(-1).astype(np.int32) if case.documents else None


def program(context: int):
    """Jitted (arrays, segments, slope) -> (y, gradients) over pieces in the order of context."""
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"context": context}, jax.devices()[:context])

    def local(arrays, segments, d_y):
        def scan(arrays):
            inputs = [arrays.get(name) for name in NAMES]
            return chunk_scan_over_context(*inputs, segments, spec=ScanSpec(4))

        y, pull = jax.vjp(scan, arrays)
        return y, pull(d_y)[0]

    cut = P(None, CONTEXT_AXES)
    return jax.jit(spmd(local, mesh, (cut, cut, cut), (cut, cut)))


def given(case: Case):
    arrays, _ = inputs_of(case)
    return float32(arrays), segments_of(case), np.float32(slopes_of(case)[0])


def over_context(context: int, case: Case):
    order = context_order(case.length, context)
    placed = jax.tree.map(lambda x: x[:, order], given(case))
    back = np.argsort(order)
    return jax.tree.map(lambda x: np.asarray(x)[:, back], program(context)(*placed))


@pytest.mark.parametrize(("context", "kind", "documents"), CASES)
def test_values_and_gradients_are_those_of_the_recurrence(context, kind, documents):
    case, rng = case_of(kind, documents), np.random.default_rng(7)
    arrays, segments = inputs_of(case)[0], segments_of(case)
    y, slopes = over_context(context, case)
    check(y, recurrence(**arrays, segments=segments)[0])
    for name, slope in slopes.items():
        for _ in range(3):
            direction = rng.normal(size=slope.shape)
            wanted = derivative(name, direction, arrays, segments, (slopes_of(case)[0], 0))
            check_slope(slope, direction, wanted)


@pytest.mark.parametrize("kind", ["mamba", pytest.param("delta", marks=pytest.mark.slow)])
def test_bytes_are_those_of_the_formula(kind):
    """Two gathers, of the states and of their gradients, and nothing else."""
    context, case = 4, case_of(kind, documents=False)
    text = program(context).lower(*given(case)).as_text()
    kinds = re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)", text)
    assert kinds == ["all_gather"] * 2
    results = re.findall(r"all_gather.*-> tensor<([\dx]+)xf32>", text)
    sizes = [4 * int(np.prod([int(n) for n in shape.split("x")])) for shape in results]
    through = case.state if kind == "delta" else 0
    state = case.heads * (case.state * (case.value + through) + (not through)) * 4
    received = case.rows * (2 * context - 2) * state
    assert [size * (context - 1) // context for size in sizes] == [received] * 2
