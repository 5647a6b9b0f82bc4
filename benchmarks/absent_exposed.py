"""What products of a train step hide of its collectives: `python benchmarks/absent_exposed.py`.

    python benchmarks/absent_exposed.py MODEL[:LAYERS[:MICROBATCHES]] GPUS [AXIS=SIZE ...]
        [--recompute=minimal] [--length=8192] [--overlap] [--flags="--xla_..."] [--top=N]

Compiles the step for absent H100s, nothing allocated, with one sequence per device and microbatch.
A collective takes the bytes that a device sends over the rate of its mesh axis. It is exposed for
as long as the matrix products between its start and its end do not last: all of it if it is
synchronous. All milliseconds are arithmetic over stated rates; nothing is timed. The estimated step
is the sum of products, of exposed collectives and of the bytes that kernels other than products
read and write. Every tick of a pipeline is in the program, so the bubble counts as products.
"""

import argparse
import collections
import dataclasses
import math
import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from absent_traffic import traffic

from maxmeg.config.mixers import AttentionBackend, TensorOverlap
from maxmeg.config.schema import Config, ParallelConfig, TrainConfig
from maxmeg.config.validate import axis_sizes
from maxmeg.models.registry import use_architecture
from maxmeg.planning import hlo
from maxmeg.planning.compile import compile_report
from maxmeg.planning.cost.flops import training_flops

GIB = 2**30
PRODUCTS, PEAK = 791e12, 989.4e12  # FLOPs a second that products reach; of the data sheet
MEMORY = 2.91e12  # bytes a second
RATES = {"tensor": 370e9, "pipe": 45e9}  # bytes a second that a GPU sends over an axis
OTHERS = 320e9  # over fsdp, expert, data, context


def sent_bytes(instruction: hlo.Instruction, kind: str, members: int) -> float:
    """Bytes that one device sends: a permute the array, others the whole array less its part."""
    size = sum(hlo.array_bytes(*array) for array in hlo.arrays(hlo.result_shape(instruction)))
    if kind == "collective-permute":
        return size
    whole = size * members if kind == "reduce-scatter" else size
    return (2 if kind == "all-reduce" else 1) * whole * (members - 1) / members


@dataclasses.dataclass
class Row:
    """Collectives in a step. beside: FLOPs between their starts and ends."""

    runs: int = 0
    sent: float = 0.0
    beside: float = 0.0
    exposed: float = 0.0  # seconds

    def add(self, runs: int, sent: float, beside: float, seconds: float) -> None:
        self.runs += runs
        self.sent += runs * sent
        self.beside += runs * beside
        self.exposed += runs * max(0.0, seconds - beside / PRODUCTS)


def exposure(program: hlo.Program, mesh: dict[str, int]) -> tuple[dict, dict]:
    """Rows by (axes, kind), and rows by (axes, kind, name and shape) of single instructions.

    mesh: as for `hlo.collectives`. Loops of unknown length count as one trip.
    """
    beside = hlo.flops_beside(program)
    totals: dict[tuple, Row] = collections.defaultdict(Row)
    single: dict[tuple, Row] = collections.defaultdict(Row)
    for name, instruction, runs in program.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in hlo.KINDS:
            continue
        axes = hlo.axes_along(instruction, mesh)
        sent = sent_bytes(instruction, kind, math.prod(mesh.get(axis, 1) for axis in axes))
        flops = beside.get(instruction.name, beside.get(name, 0.0))
        shape = re.sub(r"\{[^}]*\}", "", hlo.result_shape(instruction))
        for row in (totals[axes, kind], single[axes, kind, f"{instruction.name} {shape[:60]}"]):
            row.add(runs, sent, flops, sent / min(RATES.get(axis, OTHERS) for axis in axes))
    return totals, single


def config_of(given: argparse.Namespace) -> Config:
    name, *counts = given.model.split(":")
    layers, microbatches = (int(count) for count in (counts + ["0", "1"][len(counts) :]))
    parallel = ParallelConfig(**{axis: int(size) for axis, size in given.axes})
    parallel.tensor_overlap = TensorOverlap.on if given.overlap else TensorOverlap.auto
    shards = given.gpus // (parallel.pipe * parallel.tensor * parallel.context)
    train = TrainConfig(global_batch_size=microbatches * shards, micro_batch_size=1)
    config = use_architecture(Config(parallel=parallel, train=train), name)
    config.model.num_layers = layers or config.model.num_layers
    config.model.recompute = given.recompute
    config.model.attention.backend = AttentionBackend.cudnn
    config.data.sequence_length = given.length or config.data.sequence_length
    return config


def report(given: argparse.Namespace) -> None:
    config, gpus = config_of(given), given.gpus
    sizes = axis_sizes(config.parallel, gpus)
    with tempfile.NamedTemporaryFile() as file:
        compiled = compile_report(config, "h100", gpus, file.name)
        text = Path(file.name).read_text()
    totals, single = exposure(hlo.parse(text), sizes)
    moved = sum(size for kind, size in traffic(text)[0].items() if kind != "products")
    products, exposed = compiled.flops / PRODUCTS, sum(row.exposed for row in totals.values())
    step = products + exposed + moved / MEMORY
    length, batch = config.data.sequence_length, config.train.global_batch_size
    mfu = training_flops(config.model, length, batch) / gpus / step / PEAK
    print(
        f"{given.model} on {gpus}, {dict(given.axes)}, {given.recompute}: "
        f"state {compiled.arguments / GIB:.2f} GiB, temporaries {compiled.temporaries / GIB:.2f}; "
        f"products {compiled.flops / 1e12:.1f} TFLOP ({products * 1e3:.1f} ms), exposed "
        f"{exposed * 1e3:.1f} ms, moved beside products {moved / 1e9:.1f} GB "
        f"({moved / MEMORY * 1e3:.1f} ms); step {step * 1e3:.0f} ms, "
        f"MFU {mfu * 100:.1f} %; compiled in {compiled.compile_seconds:.0f} s"
    )
    rows = sorted(single.items(), key=lambda item: -item[1].exposed)[: given.top]
    for (axes, *words), row in [*sorted(totals.items()), *rows]:
        print(
            f"  {'+'.join(axes):12s} {' '.join(words):18s} {row.runs:6d} runs, "
            f"{row.sent / 1e9:8.2f} GB sent, {row.beside / 1e12:8.2f} TFLOP beside, "
            f"{row.exposed * 1e3:7.2f} ms exposed"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="MODEL[:LAYERS[:MICROBATCHES]]")
    parser.add_argument("gpus", type=int)
    parser.add_argument("axes", nargs="*", type=lambda text: text.split("="), help="fsdp=16 ...")
    parser.add_argument("--recompute", default="minimal", help="minimal, selective, full")
    parser.add_argument("--length", type=int, default=0, help="tokens of a sequence")
    parser.add_argument("--overlap", action="store_true", help="parallel.tensor_overlap=on")
    parser.add_argument("--flags", default="", help="further XLA_FLAGS")
    parser.add_argument("--top", type=int, default=0, help="list so many collectives")
    given = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {given.flags}".strip()
    report(given)


if __name__ == "__main__":
    main()
