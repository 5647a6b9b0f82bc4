"""Measured orders of backends for "auto": choices.json, written by `benchmarks/gpu.py --choices`.

The file maps a GPU's compute capability to ops, and each op to its backends, fastest first:
{"9.0": {"attention": ["cudnn", "xla"]}}. What it lacks follows the op's rules. Linear + cross
entropy is not in it: that choice depends on memory.
"""

import functools
import json
from collections.abc import Collection, Sequence
from pathlib import Path

FILE = Path(__file__).with_name("choices.json")
OPS = (
    "attention",
    "block_matmul",
    "chunk_scan",
    "decode attention",
    "delta_scan",
    "grouped_matmul",
)
REMEDY = "correct the file, or write it anew: python benchmarks/gpu.py --choices"


@functools.cache
def read(path: Path) -> dict[str, dict[str, list[str]]]:
    """The contents of a file of choices; ValueError if it has another form or an unknown op."""
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
        for capability, ops in choices.items():
            if unknown := sorted(set(ops) - set(OPS)):
                raise ValueError(f"{capability}: {unknown} must be among {', '.join(OPS)}")
            if wrong := [op for op, names in ops.items() if not isinstance(names, list)]:
                raise ValueError(f"{capability}: {wrong} must be lists of backends")
    except (AttributeError, TypeError, ValueError) as error:
        form = "must map compute capabilities to ops, and these to lists of backends"
        raise ValueError(f"{path} {form}: {error}; {REMEDY}") from error
    return choices


def measured_order(
    op: str, backends: Collection[str], order: Sequence[str], capability: tuple[int, int]
) -> Sequence[str]:
    """The measured backends of `op`, fastest first, then the rest of `order`.

    ValueError if the file names one that is not in `backends`.
    """
    key = "{}.{}".format(*capability)
    measured = read(FILE).get(key, {}).get(op, [])
    if unknown := [name for name in measured if name not in backends]:
        raise ValueError(
            f"{FILE}: {op} backends for compute capability {key} must be among "
            f"{', '.join(backends)}, not {unknown}; {REMEDY}"
        )
    return [*measured, *(name for name in order if name not in measured)]
