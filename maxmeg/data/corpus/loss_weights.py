"""Weights in the loss: the field `weight` of rows, and PREFIX.weights.npy beside a corpus.

The file holds a float32 weight for each document, as numpy.save writes it. A corpus without the
file has weights 1.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FIELD, SUFFIX = "weight", ".weights.npy"
LEAST, MOST = 1e-6, 1e3  # bounds of all weights but 0, which means no loss
_RULE = f"must be 0, or a number from {LEAST:g} to {MOST:g}"
_SHOWN = 80  # characters of a value in an error
logger = logging.getLogger("maxmeg")


def weight_of(fields: Mapping[str, Any], name: str = FIELD) -> float:
    """The factor of the loss of a row or a message, which is 1 if its fields hold none; ValueError,
    with the field's name, for what is not 0 or a number in [LEAST, MOST]."""
    weight = fields.get(FIELD)
    if weight is None:
        return 1
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not (weight == 0 or LEAST <= weight <= MOST):
        raise ValueError(
            f"{name}={repr(weight)[:_SHOWN]} {_RULE}: only ratios of weights count, so scale all "
            "of them"
        )
    return weight


def read_weights(path: Path, count: int, check: bool = True) -> np.ndarray | None:
    """The memory-mapped weights of `count` documents; None without a file. ValueError for a file of
    another corpus, and with `check` for a number that is no weight."""
    if not path.is_file():
        return None
    remedy = "prepare the corpus again, or delete this file, which gives all documents weight 1"
    try:
        weights = np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is no array of NumPy ({error}): {remedy}") from error
    if weights.dtype != np.float32 or weights.shape != (count,):
        raise ValueError(
            f"{path} holds {weights.dtype} {[*weights.shape]}, not float32 [{count}], one weight "
            f"for each document: {remedy}"
        )
    if check:
        is_weight = (weights == 0) | ((weights >= LEAST) & (weights <= MOST))
        if not is_weight.all():
            document = int(np.argmin(is_weight))
            raise ValueError(f"{path}, document {document}: {weights[document]} {_RULE}: {remedy}")
    return weights


def report_no_loss(split: str, prefixes: Sequence[str]) -> None:
    """ValueError for a train split in which all documents have weight 0; a warning for another."""
    message = (
        f"all documents of the {split} split of {', '.join(prefixes)} have weight 0 "
        f"(PREFIX{SUFFIX}), so that no token has a loss: give documents other weights, or change "
        "data.split"
    )
    if split == "train":
        raise ValueError(message)
    logger.warning(message)


def written_files(prefix: str) -> str:
    """Say which files of a corpus were written."""
    has_weights = Path(prefix + SUFFIX).is_file()
    return f"wrote {prefix}.bin" + (f", .idx and {SUFFIX}" if has_weights else " and .idx")
