"""What products of a train step hide of its collectives: `python benchmarks/absent_exposed.py`.

    python benchmarks/absent_exposed.py MODEL[:LAYERS[:MICROBATCHES]] GPUS [AXIS=SIZE ...]
        [--recompute=minimal] [--length=8192] [--flags="--xla_..."] [--top=N]
    python benchmarks/absent_exposed.py --table [--cases=NAME,...] [--checkout=FOLDER]
        [--hlo=FOLDER]

Compiles the step for absent H100s, nothing allocated, with one sequence per device and microbatch.
A collective takes the bytes that a device sends over the rate of its group, as the planner has it.
Collectives within a node have one queue, those between nodes another: each begins when its link is
free, and is exposed for as long as products wait for its end. Products hide nothing twice. All
milliseconds are arithmetic over stated rates; nothing is timed. The estimated step is the sum of
products, of exposed collectives and of the bytes that kernels other than products read and write.
Every tick of a pipeline is in the program, so the bubble counts as products; where stages hold
different layers, a stage with those of the most frequent unit counts. FLOPs of Mosaic's grouped
products, which the text does not tell, are those of the mean load of a device: the rows of the
buffer over `parallel.expert_buffer`. Further rounds of experts do not run.

--table prints a row of Markdown for each of CASES. --checkout: the folder of another commit, whose
package compiles; this one reads the text. --hlo: a folder that keeps the compiled texts; one that
exists is not compiled again.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from absent_cases import Case, compiled
from absent_traffic import traffic

from maxmeg.config.parallel import GPUS_A_NODE
from maxmeg.config.validate import axis_sizes
from maxmeg.planning import hlo
from maxmeg.planning.cost.flops import training_flops
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.report import ALL_TO_ALL

GIB = 2**30
PRODUCTS, PEAK = 791e12, 989.4e12  # FLOPs a second that products reach; of the data sheet
MEMORY = 2.91e12  # bytes a second
PERMUTE = "collective-permute"
CLUSTER = parse_cluster("h100x8")
STAGES = {"pipe": 8, "tensor": 2, "expert": 64, "pad_layers": True}
CASES = {
    "8b-fsdp8": Case("llama3-8b", 8, {"fsdp": 8}),
    "8b-fsdp16": Case("llama3-8b", 16, {"fsdp": 16}),
    "8b-tensor4": Case("llama3-8b", 8, {"tensor": 4, "fsdp": 2}),
    "8b-pipe4": Case("llama3-8b", 16, {"pipe": 4, "tensor": 2, "fsdp": 2}, microbatches=8),
    "1.3b": Case("1.3b", micro_batch=4),
    "mixtral": Case("mixtral-8x7b", 64, {"expert": 8, "fsdp": 8}, 4, 1, 4096, "full"),
    "deepseek-v3": Case("deepseek-v3", 1024, STAGES, 1, 16, 4096, "full"),
    "deepseek-v3-whole": Case(
        "deepseek-v3", 1024, STAGES | {"expert_tensor": 1}, 1, 16, 4096, "full"
    ),
}


def sent_bytes(instruction: hlo.Instruction, kind: str, members: int) -> float:
    """Bytes that one device sends: a permute the array, others the whole array less its part."""
    size = sum(hlo.array_bytes(*array) for array in hlo.arrays(hlo.result_shape(instruction)))
    if kind == PERMUTE:
        return size
    whole = size * members if kind == "reduce-scatter" else size
    return (2 if kind == "all-reduce" else 1) * whole * (members - 1) / members


def span(instruction: hlo.Instruction, kind: str, gpus: int) -> tuple[int, int]:
    """(members of a collective's group, nodes that it spans); a permute's are two."""
    text = hlo.groups_text(instruction)
    if kind == PERMUTE:
        ends = np.array(hlo.numbers(text)).reshape(-1, 2) // GPUS_A_NODE
        return 2, 1 + int((ends[:, 0] != ends[:, 1]).any())
    table = hlo.groups_table(text, gpus)
    assert table is not None, text
    return table.shape[1], len(set(table[0] // GPUS_A_NODE))


def seconds(kind: str, sent: float, members: int, nodes: int) -> float:
    """How long a device sends, by the planner's rates. Between nodes, permutes and exchanges go
    through one adapter per GPU; the part of an exchange that stays in the node costs nothing."""
    one_adapter = kind in (PERMUTE, ALL_TO_ALL)
    if kind == ALL_TO_ALL and nodes > 1:
        sent *= (members - members / nodes) / (members - 1)
    return sent / CLUSTER.link_rate(nodes, 1 if one_adapter else members // nodes)


@dataclasses.dataclass
class Row:
    """Collectives in a step. beside: FLOPs between their starts and ends."""

    runs: int = 0
    sent: float = 0.0
    beside: float = 0.0
    exposed: float = 0.0  # seconds

    def add(self, runs: int, sent: float, beside: float, exposed: float) -> None:
        self.runs += runs
        self.sent += runs * sent
        self.beside += runs * beside
        self.exposed += runs * exposed


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective: seconds on its link, which spans so many nodes."""

    axes: tuple[str, ...]
    kind: str
    sent: float
    nodes: int
    seconds: float


def transfer(instruction: hlo.Instruction, mesh: dict[str, int]) -> Transfer | None:
    """The collective that an instruction is or starts; None: another instruction."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in hlo.KINDS:
        return None
    members, nodes = span(instruction, kind, math.prod(mesh.values()))
    sent, axes = sent_bytes(instruction, kind, members), hlo.axes_along(instruction, mesh)
    return Transfer(axes, kind, sent, nodes, seconds(kind, sent, members, nodes))


def waits(program: hlo.Program, transfers: dict[str, Transfer]) -> dict[str, float]:
    """Seconds for which products wait, in one run of each computation, for each transfer; both by
    the names of their instructions. Loops within a computation count as their products."""
    waiting: dict[str, float] = {}
    for name, instructions in program.computations.items():
        if not program.runs[name] or name in program.overlapped:
            continue
        now, free, shapes = 0.0, collections.defaultdict(float), {}
        ends: dict[str, tuple[str, float]] = {}
        for each in instructions:
            shapes[each.name] = each.shape
            inside = [i.name for callee in hlo.callees(each) for i in program.computations[callee]]
            carried = [n for n in (each.name, *inside) if n in transfers and hlo.starts(each)]
            carried += [each.name] * (each.name in transfers and not carried)
            if carried:
                key, link = carried[0], transfers[carried[0]].nodes > 1
                free[link] = end = max(now, free[link]) + transfers[key].seconds
                if hlo.starts(each):
                    ends[each.name] = key, end
                else:
                    waiting[key], now = end - now, end
            elif (started := hlo.started(each)) in ends:
                key, end = ends.pop(started)
                waiting[key], now = max(0.0, end - now), max(now, end)
            else:
                now += hlo.flops_within(program, each, shapes) / PRODUCTS
    return waiting


def exposure(program: hlo.Program, mesh: dict[str, int]) -> tuple[dict, dict]:
    """Rows by (axes, kind), and rows by (axes, kind, name and shape) of single instructions.

    mesh: as for `hlo.collectives`. Loops with an unknown number of trips are left out.
    """
    beside = hlo.flops_beside(program)
    totals: dict[tuple, Row] = collections.defaultdict(Row)
    single: dict[tuple, Row] = collections.defaultdict(Row)
    found = [(name, i, runs, transfer(i, mesh)) for name, i, runs in program.instructions()]
    found = [(*others, sent) for *others, sent in found if sent is not None]
    waiting = waits(program, {each.name: sent for _, each, _, sent in found})
    for name, instruction, runs, sent in found:
        if name in program.unbounded:
            continue
        flops = beside.get(instruction.name, beside.get(name, 0.0))
        shape = re.sub(r"\{[^}]*\}", "", hlo.result_shape(instruction))
        key = sent.axes, sent.kind
        for row in (totals[key], single[*key, f"{instruction.name} {shape[:60]}"]):
            row.add(runs, sent.sent, flops, waiting[instruction.name])
    return totals, single


def grouped_products(program: hlo.Program, buffer: float) -> dict[str, float]:
    """FLOPs of each of Mosaic's products of rows [N, K] with experts [E, K, F], or of the weights'
    gradient, for a mean load of N / buffer rows."""
    flops = {}
    for _, instruction, _ in program.instructions():
        if 'custom_call_target="mosaic' in instruction.attributes:
            arrays = hlo.arrays(instruction.shape + instruction.attributes.partition("api_v")[0])
            floats = [dims for kind, dims in arrays if kind == "bf16"]
            experts = [dims for dims in floats if len(dims) == 3]
            rows = [dims[0] for dims in floats if len(dims) == 2]
            if experts and rows:
                flops[instruction.name] = 2.0 * max(rows) / buffer * math.prod(experts[0][1:])
    return flops


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step, read. report: `Compiled` as a dict. moved: bytes beside products."""

    case: Case
    report: dict
    flops: float
    moved: float
    totals: dict[tuple, Row]
    single: dict[tuple, Row]

    @property
    def exposed(self) -> float:
        return sum(row.exposed for row in self.totals.values())

    @property
    def seconds(self) -> float:
        return self.flops / PRODUCTS + self.exposed + self.moved / MEMORY

    @property
    def mfu(self) -> float:
        config = self.case.config()
        length, batch = config.data.sequence_length, config.train.global_batch_size
        return training_flops(config.model, length, batch) / self.case.gpus / self.seconds / PEAK

    def along(self, value: str, of: int) -> str:
        """Sums of a value of the rows by mesh axes (0) or kind (1), largest first, in words."""
        sums: dict[str, float] = collections.defaultdict(float)
        for key, row in self.totals.items():
            name = key[of] if of else "+".join(key[of])
            sums[name] += getattr(row, value)
        scale = {"sent": 1e-9, "beside": 1e-12, "exposed": 1e3}[value]
        largest = sorted(((size * scale, name) for name, size in sums.items()), reverse=True)
        return ", ".join(f"{name} {size:.1f}" for size, name in largest if size >= 0.05) or "none"


def without_short_loops(text: str) -> str:
    """The text without conditionals in loops over fewer places than others: of layers that only
    some stages hold, those of the most frequent unit remain."""
    program = hlo.parse(text)
    loops = [each for _, each, _ in program.instructions() if each.opcode == "while"]
    trips = {callee: hlo.num_trips(loop) for loop in loops for callee in hlo.callees(loop)}
    places = {
        each.name: trips[name] or 1
        for name, each, _ in program.instructions()
        if each.opcode == "conditional" and name in trips
    }
    short = {f"%{name}" for name, number in places.items() if number < max(places.values())}
    return "\n".join(
        line for line in text.splitlines() if line.split(" = ", 1)[0].split(" ")[-1] not in short
    )


def read(case: Case, name: str, checkout: str = "", folder: str = "") -> Step:
    """Compile a case, unless its text is in `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        text = Path(folder or temporary, f"{name}.hlo.txt")
        told = text.with_name(f"{name}.json")
        if not told.exists():
            told.write_text(json.dumps(compiled(case, text, checkout)))
        report, words = json.loads(told.read_text()), text.read_text()
    config = case.config()
    words = without_short_loops(words) if config.parallel.pipe > 1 else words
    program = hlo.parse(words)
    kernels = grouped_products(program, config.parallel.expert_buffer)
    program = dataclasses.replace(program, kernel_flops=kernels)
    moved = sum(size for kind, size in traffic(words)[0].items() if kind != "products")
    rows = exposure(program, axis_sizes(config.parallel, case.gpus))
    return Step(case, report, hlo.matrix_flops(program), moved, *rows)


def print_step(step: Step, title: str, top: int) -> None:
    exposed, moved, report = step.exposed, step.moved, step.report
    print(
        f"{title}: state {report['arguments'] / GIB:.2f} GiB, "
        f"temporaries {report['temporaries'] / GIB:.2f}; "
        f"products {step.flops / 1e12:.1f} TFLOP ({step.flops / PRODUCTS * 1e3:.1f} ms), exposed "
        f"{exposed * 1e3:.1f} ms, moved beside products {moved / 1e9:.1f} GB "
        f"({moved / MEMORY * 1e3:.1f} ms); step {step.seconds * 1e3:.0f} ms, "
        f"MFU {step.mfu * 100:.1f} %; compiled in {report['compile_seconds']:.0f} s"
    )
    rows = sorted(step.single.items(), key=lambda item: -item[1].exposed)[:top]
    for (axes, *words), row in [*sorted(step.totals.items()), *rows]:
        print(
            f"  {'+'.join(axes):12s} {' '.join(words):18s} {row.runs:6d} runs, "
            f"{row.sent / 1e9:8.2f} GB sent, {row.beside / 1e12:8.2f} TFLOP beside, "
            f"{row.exposed * 1e3:7.2f} ms exposed"
        )


COLUMNS = (
    "model, layout",
    "state, temporaries (GiB)",
    "sent (GB)",
    "beside collectives (TFLOP)",
    "exposed (ms)",
    "moved (GB)",
    "products (TFLOP)",
    "step (ms)",
    "MFU (%)",
)


def table_row(step: Step) -> str:
    """A line of Markdown."""
    case, report = step.case, step.report
    sizes = [(axis, size) for axis, size in case.parallel.items() if axis != "pad_layers"]
    layout = " x ".join(f"{axis} {size}" for axis, size in sizes)
    tokens = case.micro_batch * case.config().data.sequence_length
    cells = (
        f"{case.model}, {layout or 'one GPU'}, {case.recompute}, {case.microbatches} x {tokens:,}",
        f"{report['arguments'] / GIB:.2f}, {report['temporaries'] / GIB:.2f}",
        step.along("sent", 0),
        step.along("beside", 1),
        f"**{step.exposed * 1e3:.1f}**: {step.along('exposed', 0)}",
        f"{step.moved / 1e9:.1f}",
        f"{step.flops / 1e12:.1f}",
        f"{step.seconds * 1e3:.0f}",
        f"{step.mfu * 100:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="MODEL[:LAYERS[:MICROBATCHES]]")
    parser.add_argument("gpus", nargs="?", type=int)
    parser.add_argument("axes", nargs="*", type=lambda text: text.split("="), help="fsdp=16 ...")
    parser.add_argument("--recompute", default="minimal", help="minimal, selective, full")
    parser.add_argument("--length", type=int, default=0, help="tokens of a sequence")
    parser.add_argument("--flags", default="", help="further XLA_FLAGS")
    parser.add_argument("--top", type=int, default=0, help="list so many collectives")
    parser.add_argument("--table", action="store_true", help="a row of Markdown for each case")
    parser.add_argument("--cases", default=",".join(CASES), help="of the table")
    parser.add_argument("--checkout", default="", help="folder whose package compiles the table")
    parser.add_argument("--hlo", default="", help="folder for the compiled texts")
    given = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {given.flags}".strip()
    if given.table:
        print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
        for name in given.cases.split(","):
            print(table_row(read(CASES[name], name, given.checkout, given.hlo)), flush=True)
        return
    if not given.gpus:
        parser.error("name a model and a number of GPUs, or --table")
    name, *counts = given.model.split(":")
    layers, microbatches = (int(count) for count in (counts + ["0", "1"][len(counts) :]))
    axes = {axis: int(size) if size.isdigit() else size for axis, size in given.axes}
    sizes = 1, microbatches, given.length
    case = Case(name, given.gpus, axes, *sizes, given.recompute, layers)
    title = f"{given.model} on {given.gpus}, {axes}, {given.recompute}"
    print_step(read(case, "step", given.checkout, given.hlo), title, given.top)


if __name__ == "__main__":
    main()
