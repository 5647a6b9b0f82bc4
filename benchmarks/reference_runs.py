"""Record short training runs bit for bit, and compiled programs, to compare two commits.

    python benchmarks/reference_runs.py record OUT.json [NUMBER ...]
    python benchmarks/reference_runs.py compile OUT.json [CASE ...]
    python benchmarks/reference_runs.py compare BEFORE.json AFTER.json

record: train the models of reference_configurations.py for 5 steps on 8 virtual CPU devices; write
losses and gradient norms as hexadecimal floats. Two recordings of one commit are bitwise equal on
one kind of processor with one version of jax. compile: compile four programs for absent H100s
(`pip install -e '.[plan]'`); write memory, collectives by kind, and CPU-seconds. compare: exit with
1 unless everything but seconds is equal.
"""

import collections
import contextlib
import json
import logging
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import absent_gpus
import jax
import numpy as np
from reference_configurations import BASE, CONFIGURATIONS, FEATURES, layers_of

from maxmeg import train
from maxmeg.config import files
from maxmeg.config.schema import Config
from maxmeg.planning.compile import compile_here
from maxmeg.runtime.gpu_environment import absent_environment

# Without LLVM's optimizations compiling is faster and products are never contracted with sums.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600 "
    "--xla_cpu_collective_timeout_seconds=600"
) + " --xla_cpu_use_fusion_emitters=false" * jax.__version__.startswith("0.10.")
METRICS = ("loss", "grad_norm", "mtp_loss/1")
PROGRAMS = ("8b-16", "8b-16-pipe", "mixtral-64", "deepseek-v3-1024")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


def settings_of(features: str) -> dict:
    """Dotted settings of a configuration, "gqa window tensor"; ValueError for unknown features."""
    known = {name: settings for group in FEATURES.values() for name, settings in group.items()}
    if unknown := set(features.split()) - set(known):
        raise ValueError(f"unknown features {sorted(unknown)}: choose from {sorted(known)}")
    settings = dict(BASE)
    for name in features.split():
        settings |= known[name]
    return layers_of(settings)


def make_config(settings: dict) -> Config:
    """The config of dotted settings, {"model.num_layers": 4}."""
    nested: dict = {}
    for path, value in settings.items():
        *sections, field = path.split(".")
        section = nested
        for name in sections:
            section = section.setdefault(name, {})
        section[field] = value
    return files.from_dict(nested)


def write_data(folder: Path, chats: bool) -> dict:
    """Write a corpus of random text; returns the settings that name it."""
    rng = np.random.default_rng(0)
    if chats:
        rows = []
        for lengths in rng.integers(2, 40, (400, 2)).tolist():
            texts = [bytes(rng.integers(97, 105, n, dtype=np.uint8)).decode() for n in lengths]
            turns = zip(("user", "assistant"), texts, strict=True)
            rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
        (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "template.jinja").write_text(TEMPLATE)
        template = str(folder / "template.jinja")
        return {"data.paths": [str(folder / "chats.jsonl")], "data.chat_template": template}
    lengths = rng.integers(5, 81, 400, dtype="<i4")
    ends = np.cumsum(lengths, dtype="<i8")
    tokens = rng.integers(97, 105, ends[-1]).astype("<u2")
    tokens[ends - 1] = 256  # the tokenizer's end of a document
    tokens.tofile(folder / "text.bin")
    arrays = (lengths, (ends - lengths) * 2, np.arange(len(lengths) + 1, dtype="<i8"))
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
    (folder / "text.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return {"data.paths": [str(folder / "text")]}


def record_run(features: str) -> dict:
    """Train one configuration; returns its metrics, and how often the step was compiled."""
    settings = settings_of(features)
    with tempfile.TemporaryDirectory() as folder, Compiles() as compiles:
        settings |= write_data(Path(folder), settings.get("data.objective") == "sft")
        settings["run_dir"] = folder + "/run"
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train.main(make_config(settings))
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
    jax.clear_caches()
    if len(rows) < settings["train.num_steps"]:  # training ends early, in order, on SIGINT
        raise KeyboardInterrupt
    metrics = {name: [row[name].hex() for row in rows] for name in METRICS if name in rows[0]}
    return {"features": features, **metrics, "compiles": compiles.counts["train_step"]}


class Compiles:
    """Within the context: compiles of each function, and CPU-seconds at their last events."""

    def __enter__(self) -> "Compiles":
        self.counts, self.ended = collections.Counter(), {}
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *exception) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs) -> None:
        name = event.rsplit("/", 1)[-1].removesuffix("_duration")
        self.ended[name] = time.process_time()
        if name == "backend_compile":
            self.counts[kwargs["fun_name"].removeprefix("jit(").removesuffix(")")] += 1


def compile_program(case: str) -> dict:
    """Compile one case of absent_gpus.py; this process has the environment of absent GPUs."""
    config = absent_gpus.config_of(absent_gpus.CASES[case], "")
    start = time.process_time()
    with Compiles() as compiles:
        report, text = compile_here(config, "h100", absent_gpus.CASES[case].gpus)
    kinds: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for row in report.collectives:
        counts = {"instructions": row.instructions, "runs": row.runs, "bytes": row.volume}
        kinds[row.kind].update({**counts, "synchronous": row.runs * (not row.asynchronous)})
    lowered = compiles.ended["jaxpr_to_mlir_module"]
    return {
        "state": report.arguments,
        "temporaries": report.temporaries,
        "outputs": report.outputs_not_aliased,
        "collectives": {kind: dict(counts) for kind, counts in sorted(kinds.items())},
        "kernels": report.kernels,
        "flops": report.flops,
        "compiles": compiles.counts["train_step"],
        "instructions": text.count(" = "),
        "lower_cpu_seconds": round(lowered - start, 1),
        "compile_cpu_seconds": round(compiles.ended["backend_compile"] - lowered, 1),
    }


def in_child(case: str) -> dict:
    """compile_program in a process whose environment is that of absent GPUs."""
    child = [sys.executable, __file__, "compile-here", case]
    done = subprocess.run(child, env=absent_environment(), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def record(command: str, out: str, names: list[str]) -> None:
    """Write what `command` records of the named runs or programs, by default of all of them."""
    every = list(map(str, range(len(CONFIGURATIONS)))) if command == "record" else PROGRAMS
    recorded: dict = {}
    for name in names or every:
        start = time.monotonic()
        recorded[name] = (
            record_run(" ".join(CONFIGURATIONS[int(name)]))
            if command == "record"
            else in_child(name)
        )
        print(f"{name}: {time.monotonic() - start:.1f} s", recorded[name], flush=True)
        header = {"jax": jax.__version__, "processor": processor()}
        Path(out).write_text(json.dumps({**header, command: recorded}, indent=1) + "\n")


def processor() -> str:
    names = [row for row in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in row]
    return names[0].split(": ")[-1]


def compare(before: str, after: str) -> bool:
    """Print how two recordings differ; returns whether all but seconds is equal."""
    one, other = (json.loads(Path(path).read_text()) for path in (before, after))
    for name in ("jax", "processor"):
        if one[name] != other[name]:
            print(f"{name}: {one[name]} and {other[name]}: bitwise equality is not to be expected")
    same = True
    for command in {"record", "compile"} & one.keys() & other.keys():
        for name, values in one[command].items():
            found = [*differences("", values, other[command].get(name, {}))]
            same &= all("seconds" in line for line in found)
            print(f"{name}: {'; '.join(found) or 'equal'}")
    return same


def differences(path: str, one, other) -> Iterator[str]:
    """A text for every value that differs; of lists of floats the largest relative difference."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            yield from differences(f"{path} {name}".strip(), one.get(name), other.get(name))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(one, other, strict=True)]
        far = [abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b]
        if far:
            yield f"{path} differs in {len(far)} of {len(pairs)} steps, by {max(far):.1e} at most"
    elif one != other:
        change = ""
        if isinstance(one, int | float) and isinstance(other, int | float) and one:
            change = f" ({other / one - 1:+.2%})"
        yield f"{path} {one} -> {other}{change}"


def main(arguments: list[str]) -> None:
    command, *rest = arguments or [""]
    if command == "compare" and len(rest) == 2:
        sys.exit(not compare(*rest))
    if command == "compile-here":
        print(json.dumps(compile_program(*rest)))
    elif command in ("record", "compile") and rest:
        if command == "record":
            os.environ["XLA_FLAGS"] = XLA_FLAGS
            jax.config.update("jax_platforms", "cpu")
            logging.disable(logging.INFO)
        record(command, rest[0], rest[1:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
