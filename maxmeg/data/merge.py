"""Several .bin/.idx datasets as one: their documents one dataset after the other."""

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxmeg.data.checksum import SUFFIX
from maxmeg.data.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.storage import is_remote

_PARTITION = re.compile(r"(.*)_(\d{5})-of-(\d{5})_(.*)")  # as `prepare` names partitions


@dataclasses.dataclass
class Merged:
    """What was written; verified: how many of the inputs had checksums."""

    datasets: int = 0
    verified: int = 0
    documents: int = 0
    tokens: int = 0


def find_prefixes(names: Sequence[str]) -> list[str]:
    """Prefixes of datasets: each name is a prefix, a .bin or .idx file, or a folder.

    A folder stands for all datasets in it, by name, as in Megatron-LM's merge_datasets.py.
    """
    prefixes = []
    for name in names:
        if is_remote(name):
            raise ValueError(
                f"{name} is in object storage, which runs read (data.paths): copy its .bin, .idx "
                "and .sums to a folder first"
            )
        if not os.path.isdir(name):
            prefixes.append(name.removesuffix(".idx").removesuffix(".bin"))
            continue
        found = {p.with_suffix("") for p in Path(name).iterdir() if p.suffix in (".bin", ".idx")}
        if not found:
            raise ValueError(f"{name} holds no .bin and .idx files: name a folder that does")
        prefixes += [str(prefix) for prefix in sorted(found)]
    return prefixes


def merge(names: Sequence[str], output: str, checksums: bool = True) -> Merged:
    """Writes the datasets as `output`.bin and .idx, byte for byte as Megatron-LM merges them.

    Everything is checked before anything is written. Inputs that have checksums are verified:
    damage would otherwise be copied under fresh ones. ValueError for damage, for datasets of
    different kinds, for partitions of a corpus that are not all there and in order, and for an
    output that is one of the inputs.
    """
    prefixes = find_prefixes(names)
    _check_partitions(prefixes)
    if not prefixes:
        raise ValueError("nothing to merge: name prefixes of .bin and .idx files, or their folder")
    report, tokens = Merged(len(prefixes)), 0
    kinds: dict[tuple[np.dtype, bool], str] = {}
    for prefix in prefixes:
        if os.path.realpath(prefix + ".bin") == os.path.realpath(output + ".bin"):
            raise ValueError(f"{output} is an input as well: write to another prefix")
        dataset = IndexedDataset(prefix, may_be_empty=True)
        tokens += dataset.num_tokens
        if len(dataset):  # without sequences nothing tells whether there would have been modes
            kinds.setdefault((dataset.dtype, dataset.modes is not None), prefix)
        if os.path.exists(prefix + SUFFIX):
            dataset.verify()
            report.verified += 1
    if len(kinds) > 1:
        shown = ", ".join(
            f"{prefix} {dtype}{' with modes' * modes}" for (dtype, modes), prefix in kinds.items()
        )
        raise ValueError(f"datasets of different kinds: {shown}; prepare all with one tokenizer")
    if not tokens:
        raise ValueError(f"{', '.join(prefixes[:8])} hold no tokens: nothing is written")
    ((dtype, multimodal),) = kinds
    # A dataset is open only while it is copied: a map holds a file, and there may be thousands.
    with IndexedWriter(output, dtype=dtype, multimodal=multimodal, checksums=checksums) as writer:
        for prefix in prefixes:
            dataset = IndexedDataset(prefix, check=False, may_be_empty=True)
            writer.add_dataset(dataset)
            report.documents += dataset.num_documents
            report.tokens += dataset.num_tokens
    return report


def _check_partitions(prefixes: Sequence[str]) -> None:
    """ValueError where a partition of a corpus is missing, comes twice or in another order."""
    found: dict[tuple[str, int, str], list[int]] = {}
    for prefix in prefixes:
        if match := _PARTITION.fullmatch(prefix):
            found.setdefault((match[1], int(match[3]), match[4]), []).append(int(match[2]))
    for (output, count, key), numbers in found.items():
        if numbers == list(range(count)):
            continue
        missing = sorted(set(range(count)) - set(numbers))
        wrong = f"{missing[:8]} are missing" if missing else f"they come as {numbers[:8]}"
        raise ValueError(
            f"of the {count} partitions {output}_*_{key} {wrong}: prepare those, and name each "
            f"once, as {output}_*-of-{count:05d}_{key}.idx"
        )
