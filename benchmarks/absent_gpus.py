"""What the train step compiles to on H100s that are not here: `python benchmarks/absent_gpus.py`.

    python benchmarks/absent_gpus.py [CASE ...] [--recompute=full] [--hlo=FOLDER] [--hardware=h100]

Compiles the real train step, nothing allocated, and prints for each case as JSON: the memory of a
device, the collectives by mesh axes, the kernels, the seconds that it took, and the most memory
that a case has taken here so far. Works on any CPU with `pip install -e '.[plan]'`. GEMMs are not
tuned: no speed can be read from it.
"""

import argparse
import dataclasses
import json
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from absent_cases import Case

from maxmeg.config.schema import Config
from maxmeg.planning.compile import compile_report
from maxmeg.planning.cost import experts
from maxmeg.planning.cost.communication import traffic
from maxmeg.planning.cost.flops import training_flops
from maxmeg.planning.cost.memory import device_memory
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.report import Compiled
from maxmeg.planning.show.text import verdict

GIB = 2**30


STAGES = {"pipe": 8, "tensor": 2, "expert": 64, "pad_layers": True}
CASES = {
    "gpt2-124m": Case("gpt2-124m", micro_batch=16),
    "1.3b": Case("1.3b", micro_batch=4),
    "8b-8": Case("llama3-8b", 8, {"data": 2, "fsdp": 2, "tensor": 2}, 1, 4),
    "8b-16": Case("llama3-8b", 16, {"fsdp": 16}, 1, 1),
    "8b-16-accumulated": Case("llama3-8b", 16, {"fsdp": 16}, 1, 4),
    "8b-16-pipe": Case("llama3-8b", 16, {"pipe": 4, "fsdp": 2, "tensor": 2}, 1, 16),
    "175b-1024": Case("175b", 1024, {"pipe": 16, "fsdp": 8, "tensor": 8}, 1, 64),
    "nemotron-h-8b-16": Case("nemotron-h-8b", 16, {"fsdp": 8, "tensor": 2}),
    "nemotron-h-56b-64": Case(
        "nemotron-h-56b", 64, {"fsdp": 32, "tensor": 2}, 1, 2, recompute="selective"
    ),
    "qwen3-next-64": Case(
        "qwen3-next-80b-a3b", 64, {"fsdp": 8, "expert": 8}, recompute="selective"
    ),
    "mixtral-64": Case("mixtral-8x7b", 64, {"expert": 8, "fsdp": 8}, length=4096),
    "deepseek-v3-1024": Case("deepseek-v3", 1024, STAGES, 1, 16, 4096, "full"),
    "deepseek-v3-1024-whole": Case(
        "deepseek-v3", 1024, STAGES | {"expert_tensor": 1}, 1, 16, 4096, "full"
    ),
}


def report(name: str, recompute: str, hardware: str, folder: str) -> dict:
    """Everything that is known of one case."""
    case = CASES[name]
    case = dataclasses.replace(case, recompute=recompute or case.recompute)
    config = case.config()
    recompute = config.model.recompute
    path = str(Path(folder, f"{name}-{recompute}.hlo.txt")) if folder else ""
    compiled = compile_report(config, hardware, case.gpus, path)
    parts = config.parallel.tensor * config.parallel.pipe
    size, length = config.train.global_batch_size, config.data.sequence_length
    model = training_flops(config.model, length, size, tensor=parts) / case.gpus
    formulas = device_memory(workload(config, case.gpus))
    seconds = ("lower_seconds", "compile_seconds")
    return {
        "case": name,
        "recompute": recompute,
        "hardware": f"{hardware}x{case.gpus}",
        "verdict": verdict(compiled),
        "arguments_gib": round(compiled.arguments / GIB, 2),
        "temporary_gib": round(compiled.temporaries / GIB, 2),
        "formulas_gib": {part: round(size / GIB, 2) for part, size in formulas.items()},
        "exchanged_gb": exchanged(config, case.gpus, compiled),
        "collectives": [dataclasses.asdict(row) for row in compiled.collectives],
        "kernels": compiled.kernels,
        "tflops": round(compiled.flops / 1e12, 2),
        "flops_over_model": round(compiled.flops / model, 4),
        **{name: round(getattr(compiled, name), 1) for name in seconds},
        "peak_gib_here": round(
            resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / GIB, 2
        ),
    }


def exchanged(config: Config, gpus: int, compiled: Compiled) -> dict[str, float]:
    """What experts receive, by the compiled step without further rounds, by the formulas, and the
    least there is: every copy there and back, and its gradients."""
    if not config.model.has("moe"):
        return {}
    work = workload(config, gpus)
    rows = [row for row in compiled.collectives if row.kind.endswith("all-to-all")]
    sent = experts.dispatch_of(work)
    cluster = parse_cluster(f"h100x{gpus}")
    planned = [row for row in traffic(work, cluster) if row.kind.endswith("all-to-all")]
    whole = sent.devices / (sent.devices - 1)
    layers = sum(u.sparse * runs for u, runs in zip(work.units, work.unit_runs, strict=True))
    found = {
        "compiled": sum(row.volume for row in rows if not row.unbounded),
        "formulas": sum(row.volume for row in planned) * whole,
        "least": 4 * work.lanes.forward * layers * sent.vectors,
    }
    return {name: round(size / 1e9, 3) for name, size in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles for absent GPUs.")
    parser.add_argument("cases", nargs="*", help=f"of {list(CASES)}; none: all")
    parser.add_argument("--recompute", default="", help="minimal, selective, full; with commas")
    parser.add_argument("--hlo", default="", help="folder for the compiled text")
    parser.add_argument("--hardware", default="h100", help="a100, b200, h100, h200")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"{sorted(unknown)} are no cases: choose from {list(CASES)}")
    for name in given.cases or CASES:
        for recompute in given.recompute.split(","):
            print(
                json.dumps(report(name, recompute, given.hardware, given.hlo), indent=1), flush=True
            )


if __name__ == "__main__":
    main()
