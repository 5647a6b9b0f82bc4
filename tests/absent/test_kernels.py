"""The flash attention kernels compiled for an H100 that is not here: memory, registers, spills."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from maxmeg.kernels.attention import TUNED_SHAPES

from maxmeg.runtime.absent_environment import absent_environment

REPOSITORY = Path(__file__).parents[2]
SHARED_MEMORY = 232_448  # bytes a program can have on an H100
# Every mask and head dim once, and the shortest and the longest of one of them.
NAMES = [
    *("gpt-2k", "llama-2k", "llama-16k", "llama-8k-packed", "mistral-16k-window"),
    *("llama4-16k-chunks", "bert-512-full", "phi-2k", "phi3-4k", "deepseek-4k", "gemma-4k-softcap"),
]
SPLIT = ["deepseek-4k", "gemma-4k-softcap"]  # gradients of keys and values one after the other
SPILLED = {  # bytes a thread at most, of gradients; none elsewhere
    **dict.fromkeys(("llama-8k-packed", "mistral-16k-window", "llama4-16k-chunks"), 48),
    "deepseek-4k": 16,
    "gemma-4k-softcap": 288,
}
MIB = 2**20

COMPILE = """
import json, os, sys
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxmeg.kernels import attention
from maxmeg.planning.absent import absent_gpus

mesh = Mesh(absent_gpus("h100", 1), ("one",))

def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

for name in sys.argv[2:]:
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder = os.path.join(sys.argv[1], name)
    os.mkdir(folder)
    case = attention.TUNED_SHAPES[name]
    B, L, K, V = case.batch, case.length, case.head_dim, case.value_dim or case.head_dim
    qkv = [array(B, L, case.heads, K), array(B, L, case.key_heads, K)]
    qkv += [array(B, L, case.key_heads, V)]
    ids = [array(B, L, dtype=jnp.int32)] if case.spec.segments else []

    def attend(q, k, v, ids=None):
        return attention.flash_attention(q, k, v, case.spec, query_segments_BL=ids)

    def gradients(q, k, v, ids=None):
        (out, lse), pull = jax.vjp(lambda *qkv: attend(*qkv, ids), q, k, v)
        return out, pull((out, lse))

    lowered = jax.jit(gradients).trace(*qkv, *ids).lower(lowering_platforms=("cuda",))
    memory = lowered.compile().memory_analysis()
    print(json.dumps({"name": name, "temporaries": memory.temp_size_in_bytes}), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the assembler and the compiler report of one kernel."""

    name: str
    spilled: int  # bytes a thread
    serialised: bool  # products that could not run in the background
    shared: int  # bytes


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, tuple[int, list[Kernel]]]:
    """Of each shape the temporaries in bytes, and its kernels; one process compiles all."""
    folder = tmp_path_factory.mktemp("kernels")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(folder), *NAMES],
        env={**absent_environment(), "MOSAIC_GPU_DUMP_PTXAS": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: (row["temporaries"], kernels_in(folder / row["name"])) for row in rows}


def kernels_in(folder: Path) -> list[Kernel]:
    found = []
    for path in sorted(folder.glob("*.ptxas")):
        report = path.read_text()
        passes = path.with_suffix(".mlir-passes.log").read_text()
        found.append(
            Kernel(
                name=path.stem.rpartition("_")[0],
                spilled=max(map(int, re.findall(r"(\d+) bytes spill stores", report))),
                serialised="serialized" in report,
                shared=max(map(int, re.findall(r"shared_memory_size %c(\d+)_i32", passes))),
            )
        )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_shape_compiles_within_a_program(compiled, name: str):
    _, kernels = compiled[name]
    keys = 2 if name in SPLIT else 1
    expected = ["flash_forward", *["flash_key_gradients"] * keys, "flash_query_gradient"]
    assert sorted(kernel.name for kernel in kernels) == expected
    for kernel in kernels:
        assert kernel.shared <= SHARED_MEMORY
        assert not kernel.serialised
        assert kernel.spilled <= (0 if kernel.name == "flash_forward" else SPILLED.get(name, 0))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_grows_with_the_square_of_the_length(compiled, name: str):
    """Three numbers a query and head, in float32, and what else is as long as the inputs."""
    case = TUNED_SHAPES[name]
    rows = case.batch * case.length * case.heads
    width = case.head_dim + (case.value_dim or case.head_dim)
    assert compiled[name][0] <= 2 * rows * width + 8 * 4 * rows + MIB
