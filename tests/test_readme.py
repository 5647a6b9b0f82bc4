"""The Python of the README and of docs/, run as it stands, and the lines that docs/ quote."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ADDING = (REPOSITORY / "docs/adding.md").read_text()


@pytest.mark.slow
def test_python_block_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    assert len(blocks) == 1
    check = """
assert logits_BLV.shape == (1, 16, 50257) and jnp.isfinite(logits_BLV).all()
assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
assert not mlp.out.weight[...][3].any() and mlp.out.weight[...][2].any()
edited_BLV = jax.jit(lambda model, ids: model(ids))(model, jnp.ones((1, 16), jnp.int32))
assert abs(edited_BLV - logits_BLV).max() > 0
"""
    command = [sys.executable, "-c", blocks[0] + check]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_dataset_and_a_loss_of_docs_train(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", ADDING, re.S)
    command = [sys.executable, "-c", block, str(tmp_path / "run")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3


def test_quoted_lines_are_in_the_files_that_docs_name():
    blocks = re.findall(r"```diff\n\+\+\+ (\S+)\n(.*?)```", ADDING, re.S)
    assert len(blocks) == ADDING.count("```diff")
    for path, lines in blocks:
        there = (REPOSITORY / path).read_text().splitlines()
        missing = [line for line in lines.splitlines() if line.removeprefix("+") not in there]
        assert not missing, path
