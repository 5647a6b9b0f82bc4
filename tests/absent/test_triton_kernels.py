"""The Pallas-Triton attention kernels compiled for GPUs that are not here: memory and spills."""

import dataclasses
import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from absent.compiled_kernels import ATTENTION_SHAPES, MIB, output_of

from maxmeg.kernels.attention import TUNED_SHAPES

SHARED_MEMORY = 101_376  # bytes that a program can have on every GPU of capability 8.x and newer
ARCHITECTURE = {"a100": "sm_80", "h100": "sm_90a"}
NAMES = {"a100": ATTENTION_SHAPES[::3], "h100": ["mistral-16k-window"]}
CASES = [(gpu, name) for gpu, names in NAMES.items() for name in names]
KERNELS = [f"triton_flash_{name}" for name in ("forward", "key_gradients", "query_gradient")]
SPILLED = {("gemma-4k-softcap", KERNELS[0]): 32}  # bytes a thread at most; none elsewhere

COMPILE = """
from maxmeg.kernels.attention import TUNED_SHAPES
from maxmeg.kernels.attention_triton import flash_attention

for name in sys.argv[2:]:
    case = TUNED_SHAPES[name]
    B, L, K, V = case.batch, case.length, case.head_dim, case.value_dim or case.head_dim
    qkv = [array(B, L, case.heads, K), array(B, L, case.key_heads, K)]
    qkv += [array(B, L, case.key_heads, V)]
    ids = [array(B, L, dtype=jnp.int32)] if case.spec.segments else []

    def attend(q, k, v, ids=None):
        return flash_attention(q, k, v, case.spec, query_segments_BL=ids)

    def gradients(q, k, v, ids=None):
        (out, lse), pull = jax.vjp(lambda *qkv: attend(*qkv, ids), q, k, v)
        return out, pull((out, lse))

    lowered = jax.jit(gradients).trace(*qkv, *ids).lower(lowering_platforms=("cuda",))
    options = {"xla_dump_to": os.path.join(sys.argv[1], name)}
    memory = lowered.compile(compiler_options=options).memory_analysis()
    print(json.dumps({"name": name, "temporaries": memory.temp_size_in_bytes}), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the compiler and the assembler say of one kernel."""

    name: str
    shared: int  # bytes
    spilled: int  # bytes a thread
    tensor_cores: bool


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[tuple[str, str], tuple[int, list[Kernel]]]:
    """Of each GPU and shape the temporaries in bytes, and its kernels; a process for each GPU."""
    actual = {}
    for gpu, names in NAMES.items():
        folder = tmp_path_factory.mktemp(gpu)
        for row in output_of(COMPILE, str(folder), *names, gpu=gpu):
            kernels = kernels_in(folder / row["name"], ARCHITECTURE[gpu])
            actual[gpu, row["name"]] = (row["temporaries"], kernels)
    return actual


def kernels_in(folder: Path, architecture: str) -> list[Kernel]:
    (thunks,) = folder.glob("*thunk_sequence.txt")
    shared = dict(re.findall(r"(triton_flash_\w+) .*shared_memory: (\d+)", thunks.read_text()))
    actual = []
    for path in folder.glob("*.ptx"):
        code = path.read_text()
        if entry := re.search(r"\.entry (triton_flash_\w+)", code):
            report = assembled(path, architecture)
            spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", report)))
            products = re.search(r"mma\.sync|wgmma\.mma_async", code) is not None
            actual.append(Kernel(entry[1], int(shared[entry[1]]), spilled, products))
    return sorted(actual, key=lambda kernel: kernel.name)


def assembled(path: Path, architecture: str) -> str:
    """What the assembler reports, of registers and what did not fit into them."""
    files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    assembler = next(file.locate() for file in files if file.name == "ptxas")
    command = f"{assembler} -v --gpu-name={architecture} {path} -o {path.with_suffix('.cubin')}"
    done = subprocess.run(command.split(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(("gpu", "name"), CASES)
def test_shape_compiles_within_a_program(compiled, gpu: str, name: str):
    """Temporaries are three numbers in float32 of each query and head, and the bounds: nothing is
    copied or padded."""
    temporaries, kernels = compiled[gpu, name]
    assert [kernel.name for kernel in kernels] == KERNELS
    for kernel in kernels:
        assert kernel.shared <= SHARED_MEMORY
        assert kernel.spilled <= SPILLED.get((name, kernel.name), 0)
        assert kernel.tensor_cores
    case = TUNED_SHAPES[name]
    rows = case.batch * case.length * case.heads
    assert temporaries <= 4 * 4 * rows + MIB
