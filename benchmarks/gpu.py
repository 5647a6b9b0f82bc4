"""Everything that needs a GPU, in one call of at most eight minutes: `python benchmarks/gpu.py`.

    python benchmarks/gpu.py [--quick] [--only=context,check-attention,train] [--readme] [--choices]

Needs jax, flax, optax and numpy. Each part runs in a process of its own with its share of
the time; what failed is recorded with its traceback, what did not fit as skipped, and the rest
goes on. A kernel that crashed or hung when it was checked is not timed. Results: after every part
benchmarks/results/DEVICE-DATE.json, and a table beside it and at the end (--readme: also in the
README). --choices writes maxmeg/ops/choices.json, the order in which "auto" tries backends on this
GPU. On a CPU the shapes are tiny and the numbers mean nothing. The exit code is 1 if an item
failed, a result was wrong, or a check was skipped.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu_parts import checks, choices, experts, kernels, precision, serving, steps
from gpu_parts.timing import Item, Sizes, sizes

FOLDER = Path(__file__).parent
SECONDS = 470
MARKS = ("<!-- gpu: written by benchmarks/gpu.py --readme -->", "<!-- end of gpu -->")
HIDDEN = ("part", "item", "losses", "failed", "took_s", "seed", "why")  # of the table


@dataclasses.dataclass(frozen=True)
class Part:
    """Items to measure, the seconds after which a hang is assumed, and flags for XLA."""

    items: Callable[[Sizes], Iterator[Item]]
    seconds: float
    flags: str = ""


def checking(op: str, *backends: str) -> Callable[[Sizes], Iterator[Item]]:
    return functools.partial(checks.checks, op, backends)


PARTS = {
    "context": Part(kernels.context, 40),
    "check-attention": Part(checking("attention", "cudnn", "mosaic"), 75),
    "check-triton": Part(checking("attention", "triton"), 45),
    "check-loss": Part(checking("loss", "tiled", "mosaic"), 45),
    "check-grouped": Part(checking("grouped", "mosaic"), 45),
    "check-block-matmul": Part(checking("block-matmul", "mosaic"), 30),
    "check-decode": Part(checking("decode", "mosaic"), 45),
    "check-scan": Part(checking("scan", "mosaic", "xla"), 45),
    "check-delta-scan": Part(checking("delta-scan", "mosaic", "xla"), 45),
    "check-norm": Part(checking("norm", "xla"), 30),
    "attention": Part(kernels.attention, 90),
    "rounds": Part(kernels.rounds, 60),
    "train": Part(steps.train, 200),
    "loss": Part(kernels.loss, 60),
    "grouped": Part(kernels.grouped, 60),
    "fp8": Part(precision.fp8, 150, "--xla_gpu_enable_triton_gemm=false"),
    "block-matmul": Part(kernels.block_matmul, 40),
    "moe": Part(experts.moe, 60),
    "decode": Part(kernels.decode, 40),
    "scan": Part(kernels.scan, 40),
    "delta-scan": Part(kernels.delta_scan, 40),
    "serving": Part(serving.serving, 150),
    "serving-no-graphs": Part(serving.serving, 60, "--xla_gpu_enable_command_buffer="),
    "memory-bound": Part(kernels.memory_bound, 40),
    "split": Part(steps.split, 90),
    "optimizer": Part(precision.optimizer, 150),
}


def run_parts(names: list[str], size: Sizes, seconds: float) -> None:
    """The child: runs the items of parts, a line of JSON each."""
    started = time.time()
    for name in names:
        for item, function in PARTS[name].items(size):
            begun = time.time()
            print(json.dumps({"begins": name, "item": item}), flush=True)
            if begun - started > seconds:
                found = {"skipped": f"out of time after {begun - started:.0f} s"}
            else:
                try:
                    found = function()
                except Exception:
                    found = {"error": traceback.format_exc()[-4000:]}
                found["took_s"] = round(time.time() - begun, 1)
            print(json.dumps({"part": name, "item": item} | found), flush=True)


def prepare(quick: bool, skipped: tuple[str, ...]) -> Sizes:
    """The child: makes maxmeg, its kernels and the tests' tables importable; says the device."""
    sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "tests")]
    if importlib.util.find_spec("maxmeg.kernels") is None:  # not installed
        place = FOLDER.parent / "kernels"
        spec = importlib.util.spec_from_file_location(
            "maxmeg.kernels", place / "__init__.py", submodule_search_locations=[str(place)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    from maxmeg.runtime.gpu_environment import set_gpu_environment

    set_gpu_environment()
    import jax

    device = jax.local_devices()[0]
    about = {"jax": jax.__version__, "python": sys.version.split()[0]}
    about["capability"] = getattr(device, "compute_capability", "")  # "9.0"; no GPU: empty
    print(json.dumps({"device": device.device_kind, **about}), flush=True)
    return dataclasses.replace(sizes(quick, device.platform == "gpu"), skipped=skipped)


def child(names: list[str], quick: bool, skipped: list[str], seconds: float) -> list[dict]:
    """Rows of parts with the same flags from a process of their own; a crash or a timeout is a row
    as well."""
    command = [sys.executable, __file__, f"--only={','.join(names)}", "--child"]
    command += [f"--seconds={seconds:.0f}", f"--skip={','.join(skipped)}"] + ["--quick"] * quick
    flags = f"{os.environ.get('XLA_FLAGS', '')} {PARTS[names[0]].flags}".strip()
    environment = os.environ | ({"XLA_FLAGS": flags} if flags else {})
    problem = ""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=seconds + 15)
        out, err = done.stdout, done.stderr
        problem = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        out, err = error.stdout or b"", error.stderr or b""
        problem = f"ended after {seconds + 15:.0f} s"
    lines = [line for line in out.decode().splitlines() if line.startswith("{")]
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    begun = [row for row in rows if "begins" in row]
    rows = [row for row in rows if "begins" not in row]
    if problem:
        tail = err.decode(errors="replace")[-3000:]
        last = begun[-1] if begun else {"begins": ",".join(names), "item": "process"}
        where = {"part": last["begins"], "item": last["item"]}
        rows.append(where | {"error": f"{problem}\n{tail}"})
    return rows


def broken(rows: list[dict]) -> list[str]:
    """ "op:backend" of checks that did not come to an end."""
    names = [row["item"] for row in rows if row["part"].startswith("check-") and "error" in row]
    return sorted({":".join(name.split()[:2]) for name in names})


def is_failure(row: dict) -> bool:
    """Whether an item failed, gave a wrong result, or is a check for which no time was left."""
    left_out = row["part"].startswith("check-") and "skipped" in row
    return "error" in row or row.get("ok") is False or left_out


def table(rows: list[dict]) -> str:
    """Markdown, a line an item: every number that it has."""
    lines = ["| part | item | result |", "|---|---|---|"]
    for row in rows:
        cells = []
        for key, value in row.items():
            if key in HIDDEN:
                continue
            if key.endswith("error"):
                value = value.strip().splitlines()[-1][:160].replace("|", "/")
            cells.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
        lines.append(f"| {row['part']} | {row['item']} | {', '.join(cells)} |")
    return "\n".join(lines)


def write_readme(path: Path, text: str) -> None:
    """Put `text` between the README's marks; ValueError where it has none."""
    whole = path.read_text(encoding="utf-8")
    if any(whole.count(mark) != 1 for mark in MARKS):
        raise ValueError(f"{path} needs each of {MARKS} once, around the table")
    before, rest = whole.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    path.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


def measure(names: list[str], given: argparse.Namespace) -> list[dict]:
    """Run parts one after the other, writing the results after each."""
    started = time.time()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    groups = [[name] for name in names]
    if given.quick:
        flags = dict.fromkeys(PARTS[name].flags for name in names)
        groups = [[name for name in names if PARTS[name].flags == one] for one in flags]
    rows: list[dict] = []
    device: dict = {}
    for group in groups:
        left = given.seconds - (time.time() - started)
        if left < 10:
            rows += [{"part": name, "item": "all", "skipped": "out of time"} for name in group]
            continue
        limit = min(left, sum(PARTS[name].seconds for name in group))
        for row in child(group, given.quick, broken(rows), limit):
            if "part" in row:
                rows.append(row)
            else:
                device = row
        name = re.sub(r"\W+", "-", device.get("device", "unknown")).strip("-").lower()
        given.results.mkdir(parents=True, exist_ok=True)
        path = given.results / f"{name}-{stamp}.json"
        whole = {**device, "date": stamp, "quick": given.quick, "rows": rows}
        path.write_text(json.dumps(whole, indent=1) + "\n")
        title = f"{device.get('device')}, jax {device.get('jax')}, {stamp[:8]}"
        text = f"{title}: `python benchmarks/gpu.py`\n\n{table(rows)}\n"
        path.with_suffix(".md").write_text(text)
    print(f"{text}\n{time.time() - started:.0f} s")
    if given.readme:
        write_readme(FOLDER.parent / "README.md", text)
    if given.choices:
        choices.write(choices.FILE, device.get("capability", ""), rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and processes")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, in this order, with commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="budget of the whole call")
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--readme", action="store_true", help="show the table in the README")
    parser.add_argument("--choices", action="store_true", help='write what "auto" chooses')
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"{sorted(unknown)} are no parts: choose from {list(PARTS)}")
    if given.child:
        skipped = tuple(filter(None, given.skip.split(",")))
        run_parts(names, prepare(given.quick, skipped), given.seconds)
        return
    if any(map(is_failure, measure(names, given))):
        sys.exit(1)


if __name__ == "__main__":
    main()
