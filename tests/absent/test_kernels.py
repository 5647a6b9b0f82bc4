"""The flash attention kernels compiled for an H100 that is not here: memory, registers, spills."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from maxmeg.kernels.attention import TUNED_SHAPES, has_gradient

from maxmeg.runtime.absent_environment import absent_environment

REPOSITORY = Path(__file__).parents[2]
SHARED_MEMORY = 232_448  # bytes a program can have on an H100
# Every mask and head dim once, and the shortest and the longest of one of them.
FORWARD_ONLY = ["deepseek-4k", "gemma-4k-softcap"]
NAMES = [
    *("gpt-2k", "llama-2k", "llama-16k", "llama-8k-packed", "mistral-16k-window"),
    *("llama4-16k-chunks", "bert-512-full", "phi-2k", "phi3-4k", *FORWARD_ONLY),
]
MIB = 2**20
LOCAL_MASKS, SPILLED = 3, 48  # of NAMES with a head dim of 128; bytes a thread

COMPILE = """
import dataclasses, json, sys
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxmeg.kernels import attention
from maxmeg.planning.absent import absent_gpus

mesh = Mesh(absent_gpus("h100", 1), ("one",))

def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

for name in sys.argv[1:]:
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

    function = gradients if attention.has_gradient(K, V) else attend
    lowered = jax.jit(function).trace(*qkv, *ids).lower(lowering_platforms=("cuda",))
    memory = lowered.compile().memory_analysis()
    print(json.dumps({"name": name, "temporaries": memory.temp_size_in_bytes}), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the assembler and the compiler report of one kernel."""

    name: str
    spilled: int  # bytes
    serialised: bool  # products that could not run in the background
    shared: int  # bytes


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[dict[str, int], list[Kernel]]:
    """(temporaries in bytes of each shape, kernels), one process for all of them."""
    folder = tmp_path_factory.mktemp("kernels")
    flags = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *NAMES],
        env={**absent_environment(), **flags},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: row["temporaries"] for row in rows}, kernels_in(folder)


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


def test_every_shape_compiles_within_its_program(compiled):
    temporaries, kernels = compiled
    assert list(temporaries) == NAMES
    names = [kernel.name for kernel in kernels]
    assert names.count("flash_forward") == len(NAMES)
    with_gradients = len(NAMES) - len(FORWARD_ONLY)
    assert names.count("flash_query_gradient") == names.count("flash_key_gradients")
    assert names.count("flash_key_gradients") == with_gradients
    assert [kernel for kernel in kernels if kernel.shared > SHARED_MEMORY] == []


def test_no_product_waits_and_no_kernel_spills_but_where_both_sides_are_cut(compiled):
    """A few registers of the keys' gradients, only in blocks that a local mask cuts."""
    kernels = compiled[1]
    assert [kernel for kernel in kernels if kernel.serialised] == []
    spilling = [kernel for kernel in kernels if kernel.spilled]
    assert {kernel.name for kernel in spilling} <= {"flash_key_gradients"}
    assert len(spilling) <= LOCAL_MASKS and max(k.spilled for k in kernels) <= SPILLED


@pytest.mark.parametrize("name", NAMES)
def test_nothing_grows_with_the_square_of_the_length(compiled, name: str):
    """Backward keeps the output and, in float32, three numbers a query and head."""
    case = TUNED_SHAPES[name]
    rows = case.batch * case.length * case.heads
    head_dims = (case.head_dim, case.value_dim or case.head_dim)
    arrays = 2 * rows * (sum(head_dims) if has_gradient(*head_dims) else 0)
    assert compiled[0][name] <= arrays + 8 * 4 * rows + MIB
