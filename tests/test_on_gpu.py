"""Ops against their references, and training with a restart, on the device that JAX finds.

`pytest -m gpu tests/test_on_gpu.py` uses a GPU if there is one, else the CPU. Cases, references and
tolerances are those of benchmarks/gpu.py.
"""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # as Python does for gpu.py

from gpu_parts import checks, steps
from gpu_parts.timing import Model, sizes

from maxmeg.checkpoint.disk import orders_of, to_tree
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.resume import restore
from maxmeg.inference.mesh import local_mesh
from maxmeg.ops import block_matmul, chunk_scan
from maxmeg.ops.attention import call as attention
from maxmeg.ops.cross_entropy import call as cross_entropy
from maxmeg.ops.decode_attention import call as decode_attention
from maxmeg.ops.experts import grouped_matmul
from maxmeg.optim.build import make_optimizer
from maxmeg.state import abstract_state

pytestmark = pytest.mark.gpu

STEPS = 20
RESTART = 10  # steps from the start to the checkpoint
BACKENDS = {
    "attention": tuple(attention.BACKENDS),
    "loss": tuple(cross_entropy.BACKENDS),
    "grouped": tuple(grouped_matmul.BACKENDS),
    "block-matmul": tuple(block_matmul.BACKENDS),
    "decode": tuple(decode_attention.BACKENDS),
    "norm": ("xla",),
    "scan": tuple(chunk_scan.BACKENDS),
    "delta-scan": tuple(chunk_scan.BACKENDS),
}
OTHER_DEVICE = r"the device is cpu|compute capability \S+ .*found"  # refusals of every call


def test_every_checked_op_is_in_the_table():
    assert set(BACKENDS) == set(checks.OPS)


@pytest.mark.parametrize(
    ("op", "backend"), [(op, backend) for op, backends in BACKENDS.items() for backend in backends]
)
def test_a_backend_equals_the_reference(op: str, backend: str):
    size = sizes(quick=True, on_gpu=jax.default_backend() == "gpu")
    result = checks.check(op, backend, size)
    if not result["cases"] and all(re.search(OTHER_DEVICE, why) for why in result["why"]):
        pytest.skip(result["why"][0])
    assert result["ok"], result


def test_training_continues_from_its_checkpoint(tmp_path: Path):
    """The same losses and the same weights, bit by bit, as without the restart."""
    config = steps.run_config(Model("tiny", 32, (), layers=2), 2, "minimal")
    step, state, batch, controls = steps.make_run(config)
    checkpointer = Checkpointer(tmp_path)

    def train(state, count: int) -> tuple:
        losses = []
        for _ in range(count):
            state, metrics = step(state, batch, controls)
            losses.append(float(metrics["loss"]))
        return state, losses

    state, first = train(state, RESTART)
    assert checkpointer.save(RESTART, to_tree(state), {}, orders_of(state))
    state, without_restart = train(state, STEPS - RESTART)
    checkpointer.check()
    abstract = abstract_state(config, make_optimizer(config.optim), local_mesh())
    restored, with_restart = train(restore(checkpointer, RESTART, abstract), STEPS - RESTART)
    assert with_restart == without_restart
    jax.tree.map(np.testing.assert_array_equal, to_tree(restored), to_tree(state))
    assert int(restored.step) == STEPS
    losses = [*first, *with_restart]
    assert np.isfinite(losses).all() and losses[-1] < losses[RESTART] < losses[0]
    assert step._cache_size() == 1
