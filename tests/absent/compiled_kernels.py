"""Our kernels compiled in a process of their own, for a GPU that is not here."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

from maxmeg.kernels.attention import TUNED_SHAPES
from maxmeg.planning import hlo
from maxmeg.runtime.gpu_environment import absent_environment

REPOSITORY = Path(__file__).parents[2]
SHARED_MEMORY = 232_448  # bytes a program can have on an H100
MIB = 2**20
# Of a model with several lengths the longest: the others compile to the same kernels. Packed Llama
# has the heads of the plain one, chunks are bounds like a window, and 80 is tiled like 96.
SHORTER = {f"{model}-{length}k" for model in ("gpt", "llama", "mha") for length in (2, 4, 8)}
SIMILAR = {"llama-16k", "llama4-16k-chunks", "phi3-4k"}
ATTENTION_SHAPES = [name for name in TUNED_SHAPES if name not in SHORTER | SIMILAR]

CONTROL = {"while", "call", "conditional", "async-start"}  # what they call runs by itself
NO_KERNEL = CONTROL | {"async-done", "async-update", "bitcast", "constant", "copy-done"}
NO_KERNEL |= {"get-tuple-element", "parameter", "tuple"}

# What programs for `output_of` begin with, after GPU = "..."; their first argument is the folder of
# the reports.
HEADER = """
import json, os, pathlib, sys
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxmeg.planning.absent import absent_gpus

mesh = Mesh(absent_gpus(GPU, 1), ("one",))

def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

def report_to(name):
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder = os.path.join(sys.argv[1], name)
    os.mkdir(folder)

def compiled(function, *arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).compile()

def tell(name, program):
    # What is read of them is a line of 100 MB.
    for log in pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"]).glob("*.mlir-passes.log"):
        lines = log.read_text().splitlines()
        log.write_text(" ".join(line for line in lines if "shared_memory_size" in line))
    temporaries = program.memory_analysis().temp_size_in_bytes
    print(json.dumps({"name": name, "temporaries": temporaries}), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the assembler and the compiler report of one kernel."""

    name: str
    spilled: int  # bytes a thread
    serialised: bool  # products that could not run in the background
    shared: int  # bytes


def output_of(program: str, *arguments: str, gpu: str = "h100") -> list:
    """The lines of JSON that HEADER and `program` print."""
    done = subprocess.run(
        [sys.executable, "-c", f"GPU = {gpu!r}\n{HEADER}{program}", *arguments],
        env={**absent_environment(), "MOSAIC_GPU_DUMP_PTXAS": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in ("{", "[")]


def selected(request) -> list[str]:
    """Names of the rows of this module that run: no others are compiled."""
    items = [item for item in request.session.items if item.module is request.module]
    names = (item.callspec.params.get("name") for item in items if hasattr(item, "callspec"))
    return list(dict.fromkeys(name for name in names if name))


def compiled_shapes(program: str, folder: Path, names: list[str]) -> dict:
    """Of each name the temporaries in bytes, and its kernels; one process compiles all."""
    rows = output_of(program, str(folder), *names)
    return {row["name"]: (row["temporaries"], kernels_in(folder / row["name"])) for row in rows}


def kernels_in(folder: Path) -> list[Kernel]:
    actual = []
    for path in sorted(folder.glob("*.ptxas")):
        report = path.read_text()
        passes = path.with_suffix(".mlir-passes.log").read_text()
        actual.append(
            Kernel(
                name=path.stem.rpartition("_")[0],
                spilled=max(map(int, re.findall(r"(\d+) bytes spill stores", report))),
                serialised="serialized" in report,
                shared=max(map(int, re.findall(r"shared_memory_size %c(\d+)_i32", passes))),
            )
        )
    return actual


def num_launches(text: str) -> int:
    """Kernels that a compiled program starts, each trip of its loops counted."""
    program, fused, total = hlo.parse(text), set(), 0
    for _, instruction, _ in program.instructions():
        if instruction.opcode not in CONTROL:
            fused.update(hlo.callees(instruction))
    for name, instruction, runs in program.instructions():
        is_kernel = name not in fused and instruction.opcode not in NO_KERNEL
        total += runs * (is_kernel and "AllocateBuffer" not in instruction.attributes)
    return total
