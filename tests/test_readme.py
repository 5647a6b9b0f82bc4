"""The README's Python, run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


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
