"""Checkpoints of Megatron import to models with its logits."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import megatron_model
import numpy as np
import pytest

from maxmeg.hf.megatron import import_megatron
from maxmeg.inference.load import load_run

LOGITS = 1e-4  # largest error over the scale of the logits
MAKER = Path(megatron_model.__file__)


def logits_of(run: Path, ids: np.ndarray) -> np.ndarray:
    model = load_run(str(run)).model
    quick = {"xla_backend_optimization_level": 0}
    forward = jax.jit(lambda model, ids: model(ids), compiler_options=quick)
    return np.asarray(forward(model, jnp.asarray(ids)))


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that megatron_model.py fills."""
    if not importlib.util.find_spec("megatron") or not importlib.util.find_spec("megatron.core"):
        pytest.skip("megatron-core is not installed: pip install -e '.[oracle]'")
    folder = tmp_path_factory.mktemp("megatron")
    commands = [[sys.executable, str(MAKER), str(folder), str(rank)] for rank in (0, 1)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
    errors = [process.communicate(timeout=300)[1].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    return folder


@pytest.mark.parametrize("name", megatron_model.MODELS)
def test_megatrons_own_checkpoints_give_its_logits(name: str, megatron: Path, tmp_path: Path):
    expected = np.load(megatron / f"{name}.npy")
    found = []
    for naming in megatron_model.MODELS[name][2]:
        report = import_megatron(megatron / f"{name}_{naming}", tmp_path / naming)
        assert report.tokenizer == f"null:{megatron_model.VOCAB}"
        found.append(logits_of(tmp_path / naming, megatron_model.tokens()))
    assert np.abs(found[0] - expected).max() <= LOGITS * np.abs(expected).max()
    assert all((other == found[0]).all() for other in found)
