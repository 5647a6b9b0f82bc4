"""Loss after 300 steps with every recipe of train.quantization, beside bfloat16.

    python benchmarks/recipes.py train FOLDER --seeds=8 [--first=0] [--recipes=tensorwise,nvfp4]
    python benchmarks/recipes.py table FOLDER

train: run the gpt configuration with one layer (hidden 128, 8 samples of 64 tokens, bytes of
Python's standard library) from each seed with each recipe (default: all), unless FOLDER has that
run. "none" is bfloat16 without a recipe; "float32" and "float16" have none either.
FOLDER/RECIPE.jsonl gets a line for each run: seed, losses of all steps, validation loss.
table: how much the loss (mean of the last 20 steps; validation) differs from that in bfloat16 with
the same seed, in percent: mean over seeds with its standard error, and standard deviation. curve:
mean over seeds of the losses of 20 steps, up to step 50, 100, ... 300.
"""

import argparse
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from maxmeg.config.model import DType
from maxmeg.config.quantization import QuantizationRecipe
from maxmeg.config.schema import Config
from maxmeg.configs import gpt

STEPS, LAST = 300, 20
POINTS = range(50, STEPS + 1, 50)
DTYPES = {"float32": DType.float32, "float16": DType.float16}
BFLOAT16 = "none"
NAMES = [*DTYPES, *(recipe.value for recipe in QuantizationRecipe)]


def config_of(name: str, seed: int, folder: str) -> Config:
    config = gpt.get_config()
    config.model.num_layers, config.data.sequence_length = 1, 64
    config.model.dtype = DTYPES.get(name, DType.bfloat16)
    if config.model.dtype is DType.float16:
        config.optim.loss_scale.initial = 2.0**14  # no step is skipped
    if name not in DTYPES:
        config.train.quantization.recipe = QuantizationRecipe(name)
    config.train.num_steps, config.run_dir, config.seed = STEPS, folder, seed
    return config


def train(folder: Path, seeds: range, names: list[str]) -> None:
    """Train; all seeds of a recipe run one compiled step."""
    from maxmeg.checkpoint.initialize import create_state
    from maxmeg.train import Run

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        program = None
        for seed in [seed for seed in seeds if seed not in runs_of(folder, name)]:
            with tempfile.TemporaryDirectory() as run_dir:
                run = Run(config_of(name, seed, run_dir))
                program = run.program = program or run.program
                run.open_data(0, {})
                state = create_state(run.config, program.optimizer, program.abstract)
                losses, validation = [], {}
                with run.batches(0) as batches:
                    for step, batch in batches:
                        controls = run.controls(step, False, state)
                        state, metrics = program.train_step(state, run.place(step, batch), controls)
                        losses.append(metrics["loss"])
                        if step + 1 == STEPS:
                            break
                run.validate(state, STEPS, validation, SimpleNamespace(requested=False))
            line = {"seed": seed, "loss": [round(float(x), 5) for x in losses]}
            line["validation"] = validation["validation_loss"]
            with (folder / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, seed, np.mean(line["loss"][-LAST:]), line["validation"], flush=True)


def runs_of(folder: Path, name: str) -> dict[int, np.ndarray]:
    """{seed: [mean losses of the last steps before each of POINTS, validation loss]}"""
    path = folder / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["seed"]: np.array([*curve(row["loss"]), row["validation"]]) for row in rows}


def curve(losses: list[float]) -> list[float]:
    return [float(np.mean(losses[point - LAST : point])) for point in POINTS]


def differences(folder: Path, name: str) -> np.ndarray:
    """How much losses exceed those in bfloat16 with the same seed, in percent.

    [seeds, POINTS + 1]: the mean losses before each of POINTS, and the validation loss.
    """
    runs, base = runs_of(folder, name), runs_of(folder, BFLOAT16)
    seeds = sorted(runs.keys() & base.keys())
    found, wanted = (np.array([each[seed] for seed in seeds]) for each in (runs, base))
    return 100 * (found / (wanted.mean(axis=0) if name == BFLOAT16 else wanted) - 1)


def table(folder: Path) -> None:
    print("| recipe | seeds | training loss | deviation | validation loss | deviation | curve |")
    print("|---|---|---|---|---|---|---|")
    for name in NAMES:
        percent = differences(folder, name)
        if len(percent) < 2:
            continue
        deviations = percent.std(axis=0, ddof=1)
        cells = [name, str(len(percent))]
        for column in (-2, -1):
            error = deviations[column] / len(percent) ** 0.5
            mean = percent[:, column].mean()
            cells += [f"{mean:+.2f} ± {error:.2f} %", f"{deviations[column]:.2f}"]
        losses = np.mean([*runs_of(folder, name).values()], axis=0)
        cells.append(", ".join(f"{loss:.3f}" for loss in losses[:-1]))
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["train", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--recipes", default=",".join(NAMES))
    given = parser.parse_args()
    if given.command == "table":
        table(given.folder)
    else:
        seeds = range(given.first, given.first + given.seeds)
        train(given.folder, seeds, given.recipes.split(","))
