"""The chunked scan over sequences that are cut over context equals the recurrence."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ops.chunk_scan_cases import TOLERANCE, Case, arrays_of, error, expected, slopes_of

from maxmeg.distributed.chunk_context import chunk_scan_over_context
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
    return arrays_of(case, "float32")[0], segments_of(case), np.float32(slopes_of(case)[0])


def over_context(context: int, case: Case):
    order = context_order(case.length, context)
    placed = jax.tree.map(lambda x: x[:, order], given(case))
    back = np.argsort(order)
    return jax.tree.map(lambda x: np.asarray(x)[:, back], program(context)(*placed))


@pytest.mark.parametrize(("context", "kind", "documents"), CASES)
def test_values_and_gradients_are_those_of_the_recurrence(context, kind, documents):
    case = case_of(kind, documents)
    arrays, segments, slope = given(case)
    y, slopes = over_context(context, case)
    wanted = expected(case, arrays, segments, (slope, 0 * slopes_of(case)[1]))
    actual = {"y": y} | {f"gradient of {name}": array for name, array in slopes.items()}
    errors = {name: error(array, wanted[name]) for name, array in actual.items()}
    assert all(e <= TOLERANCE["float32"] for e in errors.values()), errors
