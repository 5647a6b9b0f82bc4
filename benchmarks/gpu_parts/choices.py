"""The file of measured backends that maxmeg/ops/choices.py reads, from the rows of a run."""

import json
import statistics
from pathlib import Path

FILE = Path(__file__).parents[2] / "maxmeg" / "ops" / "choices.json"
RATES = {  # of a part: its op in the file, and what stands around a backend's name in its rates
    "attention": ("attention", "both ", " tflops"),
    "decode": ("decode attention", "", " tb_per_s"),
    "scan": ("chunk_scan", "both ", " tflops"),
    "delta-scan": ("delta_scan", "both ", " tflops"),
    "block-matmul": ("block_matmul", "both ", " tflops"),
    "grouped": ("grouped_matmul", "both ", " tflops"),
}


def write(path: Path, capability: str, rows: list[dict]) -> None:
    """Set the choices for GPUs of a compute capability; those for others stay.

    ValueError without a GPU, and if no op has two backends that were timed and are right.
    """
    ranked = {op: ranking(part, rows) for part, (op, _, _) in RATES.items()}
    compared = {op: names for op, names in ranked.items() if len(names) > 1}
    if not capability or not compared:
        raise ValueError(
            f"--choices needs a GPU and two backends of an op that passed their checks and were "
            f"timed, but compute capability {capability or 'none'} has {ranked}: run all parts"
        )
    choices = json.loads(path.read_text(encoding="utf-8"))
    choices[capability] = choices.get(capability, {}) | compared
    path.write_text(json.dumps(choices, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def ranking(part: str, rows: list[dict]) -> list[str]:
    """Backends by their mean share of a row's best rate; of kernels those that are right."""
    _, begin, end = RATES[part]
    checked = [row for row in rows if row["part"].startswith("check-") and row.get("ok")]
    names = ["xla", *(r["item"].split()[1] for r in checked if r["item"].split()[0] == part)]
    shares: dict[str, list[float]] = {name: [] for name in names}
    for row in (row for row in rows if row["part"] == part):
        rates = {name: row[key] for name in shares if (key := f"{begin}{name}{end}") in row}
        for name, rate in rates.items():
            shares[name].append(rate / max(rates.values()))
    means = {name: statistics.mean(values) for name, values in shares.items() if values}
    return sorted(means, key=lambda name: -means[name])
