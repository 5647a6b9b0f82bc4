"""What a train step reads and writes beside its products: `python benchmarks/absent_traffic.py`.

    python benchmarks/absent_traffic.py [MODEL[:SAMPLES[:LAYERS]] ...] [--unrolled] [--top=N]

Compiles the step for one absent H100, nothing allocated, and counts the bytes of every kernel that
is no matrix product or attention: those that compute, and those that only copy slices into and out
of stacked arrays. Milliseconds are arithmetic, bytes over what an H200's memory reaches (DESIGN.md,
section 6), beside the model's FLOPs over what its products reach; nothing is timed. Products appear
as Triton's, which no device could tune: on a GPU cuBLAS may take some, and its epilogues biases.
"""

import argparse
import collections
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from maxmeg.config.architectures import use_architecture
from maxmeg.config.mixers import AttentionBackend
from maxmeg.config.schema import Config
from maxmeg.planning import hlo
from maxmeg.planning.compile import compile_report
from maxmeg.planning.cost.flops import training_flops

COPIED, MULTIPLIED = 4.18e12, 795e12  # bytes and FLOPs a second that an H200 reaches
CASES = ("gpt2-124m:16", "1.3b:4", "llama3-8b:1:4")
SLICES = {"dynamic-slice", "dynamic-update-slice", "slice", "parameter", "bitcast", "tuple", "copy"}
SLICES |= {"constant", "reduce-precision", "concatenate", "transpose"}
SMALL = 2**16  # bytes: indices and the like


def size(shape: str) -> int:
    return sum(hlo.array_bytes(kind, dims) for kind, dims in hlo.arrays(shape))


def operands(instruction: hlo.Instruction) -> list[str]:
    stop = hlo.matching_parenthesis("(" + instruction.attributes, 0)
    return re.findall(r"%([\w.\-]+)", instruction.attributes[: stop - 1])


class Fusion:
    """The body of one kernel."""

    def __init__(self, body: tuple[hlo.Instruction, ...]):
        self.made = {instruction.name: instruction for instruction in body}
        self.root = body[-1]

    def origin(self, name: str) -> hlo.Instruction:
        """What a chain of bitcasts began with."""
        while self.made[name].opcode == "bitcast":
            (name,) = operands(self.made[name])
        return self.made[name]

    def read(self) -> int:
        """Of an array that is only sliced, the slices; of one that is updated in place, nothing."""
        used: dict[str, int] = collections.defaultdict(int)
        for instruction in self.made.values():
            if instruction.opcode in ("bitcast", "parameter", "tuple"):
                continue
            for position, name in enumerate(operands(instruction)):
                origin = self.origin(name)
                if origin.opcode != "parameter":
                    continue
                whole = size(origin.shape)
                if position == 0 and instruction.opcode in ("dynamic-slice", "slice"):
                    whole = size(instruction.shape)
                elif position == 0 and instruction.opcode == "dynamic-update-slice":
                    whole = 0
                used[origin.name] = max(used[origin.name], whole)
        return sum(used.values())

    def written(self) -> int:
        outs = operands(self.root) if self.root.opcode == "tuple" else [self.root.name]
        total = 0
        for name in outs:
            made = self.origin(name)
            updated = made.opcode == "dynamic-update-slice"
            total += size(self.made[operands(made)[1]].shape if updated else made.shape)
        return total

    @property
    def kind(self) -> str:
        large = {i.opcode for i in self.made.values() if size(i.shape) > SMALL}
        if "dot" in large or "custom-call" in large:
            return "products"
        return "copies of slices" if large <= SLICES else "computing"


def traffic(text: str) -> tuple[dict[str, int], dict[tuple[str, str], list]]:
    """Bytes a step by kind, and (kind, kernel) -> [runs, bytes] of the kernels; loops with an
    unknown number of trips (further rounds of experts) are left out."""
    program = hlo.parse(text)
    inner = {
        found
        for instructions in program.computations.values()
        for instruction in instructions
        for found in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", instruction.attributes)
    }
    totals: dict[str, int] = collections.defaultdict(int)
    kernels: dict[tuple[str, str], list] = collections.defaultdict(lambda: [0, 0])
    for computation, instruction, runs in program.instructions():
        called = re.search(r"calls=%?([\w.\-]+)", instruction.attributes)
        skipped = computation in inner or computation in program.unbounded
        if skipped or instruction.opcode != "fusion" or not called:
            continue
        fusion = Fusion(program.computations[called[1]])
        moved = fusion.read() + fusion.written()
        totals[fusion.kind] += runs * moved
        named = re.search(r'op_name="([^"]+)"', instruction.attributes)
        label = re.sub(r"jit\(\w+\)/|closed_call/|while/body/", "", named[1] if named else "")
        row = kernels[fusion.kind, f"{label[-50:]} {moved / 1e6:.1f} MB"]
        row[0] += runs
        row[1] += runs * moved
    return totals, kernels


def config_of(case: str, unrolled: bool) -> Config:
    given = case.split(":")
    name, samples, layers = (*given, *("1", "0")[len(given) - 1 :])
    config = use_architecture(Config(), name)
    config.train.global_batch_size = int(samples)
    config.model.attention.backend = AttentionBackend.cudnn
    config.model.num_layers = int(layers) or config.model.num_layers
    config.model.scan_layers = not unrolled
    return config


def report(case: str, unrolled: bool, top: int) -> None:
    config = config_of(case, unrolled)
    with tempfile.NamedTemporaryFile() as file:
        compiled = compile_report(config, "h100", 1, file.name)
        totals, kernels = traffic(Path(file.name).read_text())
    batch, length = config.train.global_batch_size, config.data.sequence_length
    flops = training_flops(config.model, length, batch)
    print(
        f"{case}{', unrolled' * unrolled}: {batch} x {length} tokens, {config.model.num_layers} "
        f"layers; model {flops / 1e12:.1f} TFLOP ({flops / MULTIPLIED * 1e3:.1f} ms); temporary "
        f"{compiled.temporaries / 2**30:.2f} GiB; compiled in {compiled.compile_seconds:.0f} s"
    )
    for kind, moved in sorted(totals.items()):
        print(f"  {kind:17s} {moved / 1e9:8.1f} GB  {moved / COPIED * 1e3:6.1f} ms")
    largest = sorted(kernels.items(), key=lambda item: -item[1][1])
    for (kind, name), (runs, moved) in [k for k in largest if k[0][0] != "products"][:top]:
        print(f"    {moved / 1e9:7.1f} GB in {runs:4d} runs, {kind}: {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES, help="model:samples:layers")
    parser.add_argument("--unrolled", action="store_true", help="model.scan_layers=false")
    parser.add_argument("--top", type=int, default=0, help="list so many kernels")
    given = parser.parse_args()
    for case in given.cases:
        report(case, given.unrolled, given.top)


if __name__ == "__main__":
    main()
