"""Measured orders of backends for "auto": choices.json, written by `benchmarks/gpu.py --choices`.

The file maps a GPU's compute capability to ops, and each op to its backends, fastest first:
{"9.0": {"attention": ["cudnn", "xla"]}}. What it lacks follows the op's rules. Linear + cross
entropy is not in it: that choice depends on memory.

LOCAL is what `maxmeg doctor --kernels` found on this machine's GPU: an order that comes before the
file's, and backends that gave wrong results, which nothing uses.
"""

import functools
import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax

FILE = Path(__file__).with_name("choices.json")
LOCAL = Path.home() / ".cache" / "maxmeg" / "kernels.json"
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


def this_device() -> dict[str, str]:
    """What kernels depend on: the GPU and JAX."""
    return {"device": jax.local_devices()[0].device_kind, "jax": jax.__version__}


@functools.cache
def local_results(path: Path) -> dict[str, Any]:
    """What `maxmeg doctor --kernels` wrote on this GPU; empty, with a line in the log, if the file
    is of another GPU or JAX, or damaged."""
    if jax.default_backend() != "gpu" or not path.exists():
        return {}
    here = this_device()
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        is_here = all(results[name] == here[name] for name in here) and bool(results["order"])
    except (KeyError, TypeError, ValueError):  # damaged
        results, is_here = {}, False
    if is_here:
        return results
    words = "%s is not of %s with jax %s and is ignored: maxmeg doctor --kernels writes it"
    logging.getLogger("maxmeg").warning(words, path, here["device"], here["jax"])
    return {}


def wrong_here(op: str) -> dict[str, str]:
    """The backends of `op` that gave wrong results on this GPU, and in which case."""
    return local_results(LOCAL).get("wrong", {}).get(op, {})


def measured_order(
    op: str, backends: Collection[str], order: Sequence[str], capability: tuple[int, int]
) -> Sequence[str]:
    """The measured backends of `op`, fastest first, then the rest of `order`; none that was found
    wrong on this GPU.

    ValueError if a file names one that is not in `backends`.
    """
    key = "{}.{}".format(*capability)
    local = local_results(LOCAL).get("order", {}).get(op, [])
    measured = [*local, *(n for n in read(FILE).get(key, {}).get(op, []) if n not in local)]
    if unknown := [name for name in measured if name not in backends]:
        raise ValueError(
            f"{FILE}: {op} backends for compute capability {key} must be among "
            f"{', '.join(backends)}, not {unknown}; {REMEDY}"
        )
    every = [*measured, *(name for name in order if name not in measured)]
    return [name for name in every if name not in wrong_here(op)]
