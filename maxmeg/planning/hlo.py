"""Parses the text of a compiled program (HLO): loops, collectives, kernels, matrix products.

Input is `compiled.as_text()` for CPUs and GPUs. No JAX.
"""

import dataclasses
import functools
import graphlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from maxmeg.planning.report import Collective

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
UNKNOWN_AXES = ("?",)  # the groups are no product of mesh axes
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # of fused attention: backward recomputes the scores

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # else the first number in the type's name: bf16
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_NAME = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|called_computations|branch_computations|true_computation"
    r"|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_SYNCHRONOUS = re.compile(r'"is_sync":\s*true')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(\{[\d,{}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[[^\]]*\][^{]*\{[^}]*\})"
)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}")
_CONTRACTING = re.compile(r"lhs_contracting_dim(?:s=|ensions\":\s*)[\[{]([\d,\" ]*)[\]}]")
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([\d", ]+)\]')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+?_(\w+?)->")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = shape opcode(attributes`; the attributes begin with the operands."""

    name: str
    shape: str
    opcode: str
    attributes: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed program.

    runs: executions of each computation per step; a loop counts by its known number of trips, else
    once; every branch of a conditional counts as taken, also the layers of other pipeline stages
    where stages hold different ones. overlapped: computations called by an
    asynchronous start. unbounded: computations in loops whose number of trips is not known.
    kernel_flops: FLOPs of one run of instructions, by name, where the text does not tell them.
    """

    computations: dict[str, tuple[Instruction, ...]]
    runs: dict[str, int]
    overlapped: frozenset[str]
    unbounded: frozenset[str] = frozenset()
    kernel_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def instructions(self) -> Iterator[tuple[str, Instruction, int]]:
        """(computation, instruction, runs per step) of every instruction that runs."""
        for name, instructions in self.computations.items():
            if self.runs[name]:
                for instruction in instructions:
                    yield name, instruction, self.runs[name]


def parse(text: str) -> Program:
    """The program in the text of a compiled module; ValueError if it is not such a text."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line[:1] in ("%", "E"):
            if header := _COMPUTATION.match(line):
                current = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
        elif line[:1] == "}":
            current = None
        elif current is not None and (instruction := parse_instruction(line)):
            current.append(instruction)
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled module")
    frozen = {name: tuple(instructions) for name, instructions in computations.items()}
    return Program(frozen, *count_runs(frozen, entry))


def parse_instruction(line: str) -> Instruction | None:
    """The instruction on a line; None if there is none."""
    name = _NAME.match(line)
    if not name:
        return None
    start = name.end()
    stop = matching_parenthesis(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, stop)
    if not opcode:
        return None
    return Instruction(name[1], line[start:stop], opcode[1], line[opcode.end() :])


def matching_parenthesis(text: str, start: int) -> int:
    """One past the parenthesis that closes the one at `start`."""
    depth = 0
    for parenthesis in re.compile(r"[()]").finditer(text, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.end()
    return len(text)


def count_runs(
    computations: dict[str, tuple[Instruction, ...]], entry: str
) -> tuple[dict[str, int], frozenset[str], frozenset[str]]:
    """(runs of each computation per step, computations called asynchronously, computations in loops
    with an unknown number of trips)."""
    callers: dict[str, list[tuple[str, int]]] = {name: [] for name in computations}
    overlapped, unbounded = set(), set()
    for name, instructions in computations.items():
        for instruction in instructions:
            trips = num_trips(instruction)
            for callee in callees(instruction):
                if callee in callers:
                    callers[callee].append((name, trips or 1))
                    if starts(instruction):
                        overlapped.add(callee)
                    if trips is None:
                        unbounded.add(callee)
    graph = {name: {caller for caller, _ in of} for name, of in callers.items()}
    runs = dict.fromkeys(computations, 0)
    for name in graphlib.TopologicalSorter(graph).static_order():
        runs[name] = sum(runs[caller] * trips for caller, trips in callers[name])
        runs[name] += name == entry
        if any(caller in unbounded for caller, _ in callers[name]):
            unbounded.add(name)
    return runs, frozenset(overlapped), frozenset(unbounded)


def callees(instruction: Instruction) -> list[str]:
    """Names of the computations that an instruction calls."""
    calls = _CALLED.finditer(instruction.attributes)
    return [callee for call in calls for callee in re.findall(r"[\w.\-]+", call[2])]


def num_trips(instruction: Instruction) -> int | None:
    """Number of trips of a loop, None if unknown; 1 for other instructions."""
    if instruction.opcode != "while":
        return 1
    match = _TRIPS.search(instruction.attributes)
    return int(match[1]) if match else None


def starts(instruction: Instruction) -> bool:
    """Whether an instruction starts work that can overlap with the following ones."""
    asynchronous = instruction.opcode.endswith("-start")
    return asynchronous and not _SYNCHRONOUS.search(instruction.attributes)


def started(instruction: Instruction) -> str:
    """The name of the start whose end an instruction is; empty if it is no end."""
    operand = _OPERAND.search(instruction.attributes)
    return operand[1] if operand and instruction.opcode.endswith("-done") else ""


def collectives(program: Program, mesh: dict[str, int]) -> tuple[Collective, ...]:
    """All collectives, summed by kind, mesh axes, runs, asynchrony and boundedness.

    mesh: size of every axis, slowest first, devices in rank order. Collectives of scalars have
    entries of their own.
    """
    rows: dict[tuple, Collective] = {}
    flops = flops_beside(program)
    for name, instruction, runs in program.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        axes = axes_along(instruction, mesh)
        synchronous = _SYNCHRONOUS.search(instruction.attributes)
        asynchronous = starts(instruction) or (name in program.overlapped and not synchronous)
        results = arrays(result_shape(instruction))
        unbounded = name in program.unbounded
        key = (kind, axes, runs, asynchronous, unbounded, all(not dims for _, dims in results))
        row = rows.get(key) or Collective(kind, axes, 0, 0, 0, asynchronous, unbounded)
        rows[key] = dataclasses.replace(
            row,
            instructions=row.instructions + 1,
            runs=row.runs + runs,
            volume=row.volume + runs * sum(array_bytes(*array) for array in results),
            exposed=row.exposed + (0 if flops.get(instruction.name, flops.get(name)) else runs),
        )
    return tuple(sorted(rows.values(), key=lambda row: (row.axes, row.kind, -row.volume)))


def axes_along(instruction: Instruction, mesh: dict[str, int]) -> tuple[str, ...]:
    """Mesh axes of a collective; `mesh` as in `collectives`."""
    kind = instruction.opcode.removesuffix("-start")
    return axes_of(groups_text(instruction), kind, tuple(mesh.items()))


def groups_text(instruction: Instruction) -> str:
    """The groups of a collective's devices, or its pairs, as HLO writes them."""
    groups = _GROUPS.search(instruction.attributes)
    return groups[1] if groups else ""


def result_shape(instruction: Instruction) -> str:
    """Shape of a collective's result. The shape of a start is (operands, results, ...), except for
    an all-reduce."""
    shape = instruction.shape
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return shape
    parts = elements(shape)
    return parts[1] if len(parts) > 1 else shape


def elements(shape: str) -> list[str]:
    """The outermost elements of a tuple's shape."""
    parts, depth, start = [], 0, 1
    for mark in re.finditer(r"[(){}\[\],]", shape):
        depth += mark[0] in "({["
        if (mark[0] == "," and depth == 1) or (mark[0] == ")" and depth == 1):
            parts.append(shape[start : mark.start()])
            start = mark.end()
        depth -= mark[0] in ")}]"
    return parts


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(element type, dimensions) of every array in a shape."""
    matches = _ARRAY.findall(shape)
    return [(kind, numbers(dims.replace("<=", ""))) for kind, dims in matches]


def array_bytes(kind: str, dims: tuple[int, ...]) -> int:
    """Bytes of one array; four-bit types take half a byte an element."""
    bits = _BITS.get(kind)
    if bits is None:
        digits = re.search(r"\d+", kind)
        bits = int(digits[0]) if digits else 8
    return -(-math.prod(dims) * bits // 8)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in "1,2" or in '"1", "2"'."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


@functools.lru_cache(maxsize=4096)
def axes_of(groups: str, kind: str, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Mesh axes of a collective, from its groups or pairs as HLO writes them.

    Groups must be the sets of devices that differ along some axes, or equal parts of them, as where
    experts exchange by nodes; pairs may cross any. No groups ("{}") means all devices.
    """
    sizes = tuple(size for _, size in mesh)
    names = np.array([name for name, _ in mesh])
    total = math.prod(sizes)
    if kind == "collective-permute":
        ends = np.array(numbers(groups), np.int64).reshape(-1, 2)
        if not ends.size or ends.max() >= total:
            return UNKNOWN_AXES
        first, second = (np.stack(np.unravel_index(ends[:, i], sizes)) for i in (0, 1))
        return tuple(names[(first != second).any(axis=1)].tolist())
    table = groups_table(groups, total)
    if table is None or sorted(table.ravel().tolist()) != list(range(total)):
        return UNKNOWN_AXES
    table = np.sort(table, axis=1)
    coordinates = np.stack(np.unravel_index(table[0], sizes))
    crossed = (coordinates != coordinates[:, :1]).any(axis=1)
    same = (table - table[:, :1] == table[0] - table[0, 0]).all()
    return tuple(names[crossed].tolist()) if same else UNKNOWN_AXES


def groups_table(groups: str, total: int) -> np.ndarray | None:
    """[groups, members] of device numbers; None if the groups differ in size."""
    if groups == "{}":
        return np.arange(total)[None]
    if groups.startswith("["):
        ids = iota(groups)
        return None if ids is None else ids.reshape(len(ids), -1)
    if groups.startswith("mesh"):
        return mesh_groups(groups)
    rows = [numbers(row) for row in re.findall(r"\{([\d,]+)\}", groups)]
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    return np.array(rows, np.int64)


def iota(text: str) -> np.ndarray | None:
    """Device numbers from "[4,2]<=[2,4]T(1,0)": a range of shape [2,4], transposed, reshaped.

    "[2,4]T(1,0)" is the same without the reshape. None for other texts.
    """
    if text.startswith("[") and "]T(" in text and "<=" not in text:
        source, order = (numbers(part) for part in text.split("T"))
        return np.arange(math.prod(source)).reshape(source).transpose(order)
    match = _IOTA.fullmatch(text)
    dims, source, order = (numbers(part or "") for part in match.groups()) if match else ((),) * 3
    if not match or math.prod(dims) != math.prod(source):
        return None
    return np.arange(math.prod(source)).reshape(source).transpose(order or None).reshape(dims)


def mesh_groups(text: str) -> np.ndarray | None:
    """Groups along axes of a mesh of the compiler, as "mesh['a'=2,'b'=8] {'a','b':(2)4}".

    'b':(2)4 is the part of b with 4 values that has 2 slower ones before it. device_ids, if
    present, are the mesh's devices in order. None for other texts.
    """
    match = _MESH.fullmatch(text)
    if not match:
        return None
    axes = {name: int(size) for name, size in re.findall(r"([\w'.\-]+)=(\d+)", match[1])}
    ids = np.arange(math.prod(axes.values()))
    if match[2]:
        order = iota(match[2])
        ids = np.array(numbers(match[2].rpartition("]")[2])) if order is None else order.ravel()
    chosen: dict[str, list[tuple[int, int]]] = {name: [] for name in axes}
    for name, before, size in re.findall(r"([\w'.\-]+)(?::\((\d+)\)(\d+))?", match[3]):
        chosen[name].append((int(before or 1), int(size or axes[name])))
    sizes, members = [], []
    for name, total in axes.items():
        cuts = sorted({1, total} | {cut for b, s in chosen[name] for cut in (b, b * s)})
        for low, high in itertools.pairwise(cuts):
            if any(before <= low < before * size for before, size in chosen[name]):
                members.append(len(sizes))
            sizes.append(high // low)
    ids = np.moveaxis(ids.reshape(sizes), members, range(-len(members), 0))
    return ids.reshape(-1, math.prod(sizes[i] for i in members))


def kernels(program: Program) -> dict[str, int]:
    """Executions of custom calls per step, by target; without room for arrays that no kernel fills
    (`lax.empty`)."""
    counts: dict[str, int] = {}
    for _, instruction, runs in program.instructions():
        target = _TARGET.search(instruction.attributes)
        if target and target[1] != "AllocateBuffer":
            counts[target[1]] = counts.get(target[1], 0) + runs
    return dict(sorted(counts.items()))


def matrix_flops(program: Program) -> float:
    """FLOPs of matrix products per device and step, two per multiply-add, without those of loops
    whose number of trips is not known: further rounds of unevenly loaded experts.

    Counted are products (also in fusions), convolutions, cuBLAS calls and cuDNN's attention: two
    products forward and five backward, half of each if it is causal.
    """
    total, shapes, inside = 0.0, {}, ""
    for name, instruction, runs in program.instructions():
        if name != inside:
            shapes, inside = {}, name
        shapes[instruction.name] = instruction.shape
        if name not in program.unbounded:
            total += runs * instruction_flops(instruction, shapes)
            total += runs * program.kernel_flops.get(instruction.name, 0.0)
    return total


def instruction_flops(instruction: Instruction, shapes: dict[str, str]) -> float:
    """FLOPs of one run; `shapes` of what stands before it in its computation."""
    target = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    if instruction.opcode == "dot" or (target and target[1].startswith("__cublas$")):
        contracting = _CONTRACTING.search(instruction.attributes)
        dims = operand_dims(instruction, shapes, 0)
        if not contracting or dims is None:
            return 0.0
        return 2.0 * first_size(instruction) * math.prod(dims[i] for i in numbers(contracting[1]))
    if instruction.opcode == "convolution":
        labels, kernel = _KERNEL_LABELS.search(instruction.attributes), None
        if labels and (kernel := operand_dims(instruction, shapes, 1)):
            return 2.0 * first_size(instruction) * math.prod(kernel) / kernel[labels[1].index("o")]
    if target and target[1].startswith("__cudnn$fmha"):
        scores = _SCORES.search(instruction.attributes)
        products = BACKWARD_PRODUCTS if "Backward" in target[1] else FORWARD_PRODUCTS
        causal = '"CAUSAL"' in instruction.attributes or "_CAUSAL" in instruction.attributes
        head = arrays(instruction.shape)[0][1][-1]
        return products * 2.0 * math.prod(numbers(scores[1])) * head / (1 + causal) if scores else 0
    return 0.0


def flops_beside(program: Program) -> dict[str, float]:
    """FLOPs of the matrix products between start and end of each asynchronous instruction, by its
    name and by the names of the computations that it calls."""
    overlap = {}
    for name, instructions in program.computations.items():
        if not program.runs[name]:
            continue
        shapes: dict[str, str] = {}
        pending: dict[str, float] = {}
        for instruction in instructions:
            shapes[instruction.name] = instruction.shape
            if (done := started(instruction)) in pending:
                overlap[done] = pending.pop(done)
            elif starts(instruction):
                pending[instruction.name] = 0.0
            elif pending:
                flops = flops_within(program, instruction, shapes)
                pending = {key: value + flops for key, value in pending.items()}
        for instruction in instructions:
            if instruction.name in overlap:
                overlap |= dict.fromkeys(callees(instruction), overlap[instruction.name])
    return overlap


def flops_within(program: Program, instruction: Instruction, shapes: dict[str, str]) -> float:
    """FLOPs of one run of an instruction and of the computations that it calls (fusions, all trips
    of a loop)."""
    total, trips = instruction_flops(instruction, shapes), num_trips(instruction) or 0
    total += program.kernel_flops.get(instruction.name, 0.0)
    for callee in callees(instruction):
        inside: dict[str, str] = {}
        for inner in program.computations.get(callee, ()):
            inside[inner.name] = inner.shape
            total += trips * flops_within(program, inner, inside)
    return total


def first_size(instruction: Instruction) -> int:
    """Number of elements of the first array of an instruction's result."""
    return math.prod(arrays(instruction.shape)[0][1])


def operand_dims(instruction: Instruction, shapes: dict[str, str], number: int):
    """Dimensions of operand `number`, which must be one array; None if unknown."""
    end = matching_parenthesis("(" + instruction.attributes, 0) - 2
    names = _OPERAND.findall(instruction.attributes[:end])
    operands = arrays(shapes.get(names[number], "")) if number < len(names) else []
    return operands[0][1] if operands else None
