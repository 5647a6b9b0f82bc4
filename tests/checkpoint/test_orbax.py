"""Saves and restores beside Orbax itself, a process that is lost, and kills."""

import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.checkpoint import storage
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.places import steps_in

REPOSITORY = Path(__file__).parents[2]


def test_orbax_alone_restores_a_checkpoint_as_the_documentation_says(tmp_path):
    checkpointer, w = Checkpointer(tmp_path), jnp.arange(6.0).reshape(2, 3)
    for step in (1, 2):
        assert checkpointer.save(step, {"model": {"w": w * step}, "step": jnp.int32(step)}, {})
    assert checkpointer.wait()
    text = (REPOSITORY / "docs/checkpoints.md").read_text()
    code = re.search(r"```python\n(import orbax.*?)```", text, re.DOTALL)
    assert code
    names: dict = {}
    exec(code[1].replace("/data/runs/gpt/checkpoints", str(tmp_path)), names)
    assert set(names["arrays"]) == {"model", "step"} and names["arrays"]["step"] == 2
    np.testing.assert_array_equal(names["arrays"]["model"]["w"], 2 * w)


def test_the_host_holds_a_replicated_array_once():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    values = np.zeros((512, 8, 1024), np.float32)  # 16 MiB
    arrays = {
        name: jax.device_put(values, NamedSharding(mesh, spec))
        for name, spec in {"all": P(), "half": P(None, "y"), "whole": P(("x", "y"))}.items()
    }
    snapshot = storage.take_snapshot(arrays, {"half": range(512)})
    for name in arrays:
        pieces = [piece.data for piece in snapshot.pieces if piece.path == name]
        assert sum(piece.nbytes for piece in pieces) == values.nbytes
        assert {piece.nbytes for piece in pieces} == {values.nbytes // 8}


TWO_PROCESSES = """
    import os, sys, threading, time, jax
    index, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, heartbeat_timeout_seconds=100)
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from maxmeg.checkpoint import manager
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    value = np.arange(32.0, dtype="f4")
    array = jax.make_array_from_callback((32,), NamedSharding(mesh, P("x")), lambda i: value[i])
    saver = manager.Checkpointer(folder, timeout_seconds=3)
    assert saver.save(1, {"w": array}, {}) and saver.wait()
    if index == 1:
        manager.storage.write = lambda *_, **__: os._exit(9)
    assert saver.save(2, {"w": array}, {})
    print("saved", saver.wait(), saver.last_error, saver.steps(), os.listdir(folder), flush=True)
    os._exit(0)
"""


def test_a_process_that_dies_in_a_save_is_named(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", textwrap.dedent(TWO_PROCESSES)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    children = [
        subprocess.Popen([*command, str(i), port, tmp_path], env=environment, **pipes)
        for i in range(2)
    ]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert children[1].returncode == 9
    named = "saved False process 1: no answer to 'written' in 3 s [1] ['step_00000001']"
    assert named in outputs[0], outputs[0]


SAVES = """
    import sys, jax, jax.numpy as jnp
    from maxmeg.checkpoint.manager import Checkpointer
    saver = Checkpointer(sys.argv[1], keep_last=1)
    step = (saver.steps() or [0])[-1]
    if step:
        wanted = {"w": jax.ShapeDtypeStruct((64, 1024), jnp.float32)}
        tree, _ = saver.latest(lambda step, _: saver.restore(step, wanted))
        assert (tree["w"] == step).all()
    print("begun", flush=True)
    while True:
        step += 1
        assert saver.save(step, {"w": jnp.full((64, 1024), step, jnp.float32)}, {}) and saver.wait()
"""


@pytest.mark.slow
def test_kills_in_every_phase_of_a_save_leave_a_checkpoint(folder):
    """The delays reach every phase of a save, which takes about 30 ms on a disk."""
    place = str(folder)
    for kill in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVES), place],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )
        assert child.stdout and child.stdout.readline() == b"begun\n"
        before = (steps_in(folder) or [0])[-1]
        while (steps_in(folder) or [0])[-1] < before + 2:
            time.sleep(0.01)
        time.sleep(kill * 0.006)
        child.kill()
        child.wait()
        child.stdout.close()
    wanted = {"w": jax.ShapeDtypeStruct((64, 1024), jnp.float32)}
    checkpointer = Checkpointer(folder)
    last = checkpointer.steps()[-1]
    tree, _ = checkpointer.restore(last, wanted)
    assert (np.asarray(tree["w"]) == last).all()
