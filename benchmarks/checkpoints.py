"""What saving and restoring costs: `python benchmarks/checkpoints.py [--megabytes=252]`.

48 float32 arrays, divided over 8 CPU devices, replicated on them, or on one device: seconds that a
save blocks and takes, seconds of a restore, each the median of three; files; what the copies of a
save hold in the host's memory. PYTHONPATH chooses the version; the files are in the page cache.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.checkpoint import storage
from maxmeg.checkpoint.manager import Checkpointer

ARRAYS, TURNS = 48, 3
LAYOUTS = {"divided": P("x"), "replicated": P(), "one device": None}


def make(layout: str, megabytes: int) -> dict[str, jax.Array]:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows = (megabytes << 20) // 4 // ARRAYS // 1024 // 8 * 8
    rng, spec = np.random.default_rng(0), LAYOUTS[layout]
    arrays = {}
    for number in range(ARRAYS):
        values = rng.standard_normal((rows, 1024), dtype=np.float32)
        place = jax.devices()[0] if spec is None else NamedSharding(mesh, spec)
        arrays[f"w{number}"] = jax.device_put(values, place)
    return arrays


def held(tree: dict[str, jax.Array]) -> int:
    """Bytes of the copies, in MB; of versions that copied chunks of shards, too."""
    snapshot: Any = storage.take_snapshot(tree, {})
    pieces = [piece.data for piece in snapshot.pieces] if hasattr(snapshot, "pieces") else [
        chunk.shard for chunk in snapshot
    ]  # fmt: skip
    return sum(array.nbytes for array in {id(array): array for array in pieces}.values()) >> 20


def measure(layout: str, megabytes: int, folder: Path) -> dict[str, Any]:
    tree, checkpointer = make(layout, megabytes), Checkpointer(folder)
    checkpointer.save(1, {"w": jnp.ones(8)}, {}), checkpointer.wait()  # imports
    blocked, saved, restored = [], [], []
    for step in range(2, 2 + TURNS):
        begin = time.perf_counter()
        checkpointer.save(step, tree, {})
        blocked.append(time.perf_counter() - begin)
        assert checkpointer.wait()
        saved.append(time.perf_counter() - begin)
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    for _ in range(TURNS):
        begin = time.perf_counter()
        jax.block_until_ready(checkpointer.restore(1 + TURNS, wanted)[0])
        restored.append(time.perf_counter() - begin)
    last = checkpointer.folder_of(1 + TURNS)
    return {
        "layout": layout,
        "blocked_s": round(median(blocked), 3),
        "saved_s": round(median(saved), 2),
        "restored_s": round(median(restored), 2),
        "files": sum(path.is_file() for path in last.rglob("*")),
        "copies_mb": held(tree),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=252)
    flags = parser.parse_args()
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(layout, flags.megabytes, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
