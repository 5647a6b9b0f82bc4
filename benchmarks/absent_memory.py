"""The planner's memory against the compiler's: `python benchmarks/absent_memory.py --seed=1`.

    python benchmarks/absent_memory.py [--seed=N] [--count=12] [--axes=tensor,pipe,data,expert]
        [--models=gemma2-2b,...] [--recipes=none,mxfp8] [--optimizers=adamw,muon]
        [--only=13,25] [--hlo=FOLDER]

Draws whole models without scans on H100s that are not here by a seed: GPUs, layout, recomputation,
microbatches, samples a microbatch, and, of those named, 8- or 4-bit recipe and optimizer. Hybrids
and encoders, which the seeds up to 24 did not know, only by name. Keeps draws that are valid and
take 10 to 95 % of a GPU's memory by formula. Compiles each (nothing is allocated), and prints its
number, which depends on no formula, the formula's GiB, the compiler's and the deviation.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from maxmeg.config.architectures import ARCHITECTURES, architecture, use_architecture
from maxmeg.config.parallel import ParallelConfig, Schedule
from maxmeg.config.quantization import QuantizationRecipe
from maxmeg.config.schema import Config, Optimizer, TrainConfig
from maxmeg.config.validate import validate
from maxmeg.planning.analytic import analyze
from maxmeg.planning.compile import compile_report
from maxmeg.planning.hardware import GPUS_A_NODE, parse_cluster
from maxmeg.planning.search import divisors
from maxmeg.planning.show.tables import gib

GPUS = (1, 2, 4, 8, 16, 32, 64, 128)
AXES = ("tensor", "pipe", "data", "expert")  # fsdp takes the remaining GPUs
SLOW = {"deepseek-v2", "deepseek-v3"}  # minutes to compile
LEAST, MOST = 0.10, 0.95  # of a GPU's memory


def quick_models() -> list[str]:
    """Decoders of attention, with or without experts."""
    others = ("mamba", "gated_delta", "kda", "encoder_attention")
    models = {name: architecture(name) for name in ARCHITECTURES.keys() - SLOW}
    return sorted(
        n for n, model in models.items() if model.attention.causal and not model.has(*others)
    )


def draws(
    seed: int,
    models: Sequence[str],
    axes: Sequence[str],
    recipes: Sequence[str] = ("none",),
    optimizers: Sequence[str] = ("adamw",),
) -> Iterator[tuple[int, Config, int]]:
    """(number of the draw, config, number of GPUs) of valid draws, without end."""
    for number in itertools.count():
        chance = random.Random(f"{seed} {number}")
        name, gpus = chance.choice(models), chance.choice(GPUS)
        config = drawn(chance, name, gpus, axes)
        config.train.quantization.recipe = QuantizationRecipe(chance.choice(recipes))
        config.optim.optimizer = Optimizer(chance.choice(optimizers))
        try:
            validate(config, gpus)
            report = analyze(config, parse_cluster(f"h100x{gpus}"))
        except ValueError:
            continue
        if LEAST <= report.total / report.capacity <= MOST:
            yield number, config, gpus


def drawn(chance: random.Random, name: str, gpus: int, axes: Sequence[str]) -> Config:
    """One draw, which may be invalid. Every second axis has size 1."""
    sizes, left = {}, gpus
    for axis in AXES:
        limit = min(left, GPUS_A_NODE)
        size = chance.choice([1, chance.choice(divisors(limit))])
        sizes[axis] = size if axis in axes else 1
        left //= sizes[axis]
    schedule = chance.choice([Schedule.one_f_one_b, *Schedule])
    interleaved = sizes["pipe"] > 1 and schedule is Schedule.one_f_one_b
    parallel = ParallelConfig(
        **sizes,
        schedule=schedule if sizes["pipe"] > 1 else Schedule.one_f_one_b,
        chunks=chance.choice([1, 1, 2]) if interleaved else 1,
    )
    microbatches, samples = chance.choice([1, 2, 4, 8, 16, 32]), chance.choice([1, 1, 2, 4])
    batch = microbatches * samples * gpus // (sizes["tensor"] * sizes["pipe"])
    train = TrainConfig(global_batch_size=batch, micro_batch_size=samples)
    config = use_architecture(Config(parallel=parallel, train=train), name)
    config.model.recompute = chance.choice(["minimal", "selective", "full"])
    config.parallel.pad_layers = config.model.num_units % (parallel.pipe * parallel.chunks) > 0
    config.run_dir = name
    return config


def words(config: Config, gpus: int) -> str:
    """ "qwen3-8b, 16 GPUs: tensor 2, pipe 4, zero_bubble; full, 8 x 2 samples" """
    parallel, train = config.parallel, config.train
    shards = gpus // (parallel.tensor * parallel.pipe)
    sizes = [f"{axis} {getattr(parallel, axis)}" for axis in AXES if getattr(parallel, axis) > 1]
    sizes += [parallel.schedule.value] if parallel.pipe > 1 else []
    sizes += [f"chunks {parallel.chunks}"] if parallel.chunks > 1 else []
    microbatches = train.global_batch_size // (shards * train.micro_batch_size)
    layout = ", ".join(sizes) or "fsdp alone"
    samples = f"{microbatches} x {train.micro_batch_size} samples"
    chosen = [config.train.quantization.recipe.value, config.optim.optimizer.value]
    names = [config.model.recompute, *(one for one in chosen if one not in ("none", "adamw"))]
    return f"{config.run_dir}, {gpus} GPUs: {layout}; {', '.join(names)}, {samples}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--axes", default=",".join(AXES), help="beside fsdp; others have size 1")
    parser.add_argument("--models", default="", help="names, with commas; empty: all quick ones")
    parser.add_argument("--recipes", default="none", help="of 8 and 4 bits, with commas")
    parser.add_argument("--optimizers", default="adamw", help="names, with commas")
    parser.add_argument("--only", default="", help="numbers of draws to compile, with commas")
    parser.add_argument("--hlo", default="", help="folder for the compiled texts")
    options = parser.parse_args()
    models = options.models.split(",") if options.models else quick_models()
    only = {int(number) for number in options.only.split(",") if number}
    named = (text.split(",") for text in (options.axes, options.recipes, options.optimizers))
    found = draws(options.seed, models, *named)
    chosen = (draw for draw in found if not only or draw[0] in only)
    for number, config, gpus in itertools.islice(chosen, len(only) or options.count):
        report = analyze(config, parse_cluster(f"h100x{gpus}"))
        print(f"{number:4} {words(config, gpus)}", end=" ", flush=True)
        path = str(Path(options.hlo, f"{options.seed}-{number}.txt")) if options.hlo else ""
        compiled = compile_report(config, "h100", gpus, path)
        wrong = " WRONG: does not fit" * (report.fits and not compiled.fits)
        print(
            f"| {gib(report.total)} | {gib(compiled.total)} | "
            f"{report.total / compiled.total - 1:+.1%}{wrong} | {compiled.compile_seconds:.0f} s",
            flush=True,
        )
        parts = ", ".join(f"{part} {gib(size)}" for part, size in report.memory.items() if size)
        state = gib(compiled.arguments + compiled.outputs_not_aliased)
        print(f"       {parts}; compiled: state {state}, temporaries {gib(compiled.temporaries)}")


if __name__ == "__main__":
    main()
