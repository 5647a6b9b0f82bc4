"""Merge .bin/.idx datasets, in order or with all documents shuffled."""

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from maxmeg.data.corpus.checksum import SUFFIX
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.corpus.storage import is_remote
from maxmeg.data.corpus.vocabulary import common_vocabulary, write_vocabulary
from maxmeg.data.prepare.encoding import Column, Encoded
from maxmeg.data.samples.sampling import shuffled

_PARTITION = re.compile(r"(.*)_(\d{5})-of-(\d{5})_(.*)")  # as `prepare` names partitions
_TOKENS = 1 << 22  # tokens that are written at a time when documents are shuffled
_KEY = 4  # of the permutation; the orders of samples have other keys


@dataclasses.dataclass
class Merged:
    """Counts of what was written. verified: how many of the input datasets had checksums."""

    datasets: int = 0
    verified: int = 0
    documents: int = 0
    tokens: int = 0


def find_prefixes(names: Sequence[str]) -> list[str]:
    """The prefixes of datasets: each name is a prefix, a .bin or .idx file, or a folder.

    A folder stands for all datasets in it, sorted by name, as in Megatron-LM's merge_datasets.py.
    """
    prefixes = []
    for name in names:
        if is_remote(name):
            raise ValueError(
                f"{name} is in object storage, which runs read (data.paths): copy its .bin, .idx, "
                ".sums and .weights.npy to a folder first"
            )
        if not os.path.isdir(name):
            prefixes.append(name.removesuffix(".idx").removesuffix(".bin"))
            continue
        in_folder = {
            p.with_suffix("") for p in Path(name).iterdir() if p.suffix in (".bin", ".idx")
        }
        if not in_folder:
            raise ValueError(f"{name} holds no .bin and .idx files: name a folder that does")
        prefixes += [str(prefix) for prefix in sorted(in_folder)]
    return prefixes


def merge(
    names: Sequence[str], output: str, checksums: bool = True, shuffle_seed: int | None = None
) -> Merged:
    """Write the datasets as `output`.bin and .idx, byte for byte as Megatron-LM merges them.

    shuffle_seed: seed of a random order of all documents; None keeps their order.

    Everything is checked before anything is written. Input datasets with checksums are verified,
    because damage would otherwise get new, matching checksums. ValueError for damage, for datasets
    of different kinds, for partitions of a corpus that are incomplete or out of order, and for an
    output that is also an input.
    """
    prefixes = find_prefixes(names)
    _check_partitions(prefixes)
    if not prefixes:
        raise ValueError("nothing to merge: name prefixes of .bin and .idx files, or their folder")
    report, tokens = Merged(len(prefixes)), 0
    kinds: dict[tuple[np.dtype, bool], str] = {}
    for prefix in prefixes:
        if os.path.realpath(prefix + ".bin") == os.path.realpath(output + ".bin"):
            raise ValueError(f"{output} is also an input: write to another prefix")
        dataset = IndexedDataset(prefix, may_be_empty=True)
        tokens += dataset.num_tokens
        if len(dataset):  # a dataset without sequences has no modes
            kinds.setdefault((dataset.dtype, dataset.modes is not None), prefix)
        if os.path.exists(prefix + SUFFIX):
            dataset.verify()
            report.verified += 1
    if len(kinds) > 1:
        details = ", ".join(
            f"{prefix} {dtype}{' with modes' * modes}" for (dtype, modes), prefix in kinds.items()
        )
        raise ValueError(f"datasets of different kinds: {details}; prepare all with one tokenizer")
    if not tokens:
        raise ValueError(f"{', '.join(prefixes[:8])} hold no tokens: nothing is written")
    ((dtype, multimodal),) = kinds
    if multimodal and shuffle_seed is not None:
        raise ValueError("multimodal datasets are not shuffled: leave out --shuffle_documents")
    identity = common_vocabulary(prefixes)
    # A dataset is open only while it is copied: there may be thousands of datasets.
    with IndexedWriter(output, dtype=dtype, multimodal=multimodal, checksums=checksums) as writer:
        write_vocabulary(output, "")  # of an older corpus, which is replaced
        opened = (IndexedDataset(prefix, check=False, may_be_empty=True) for prefix in prefixes)
        if shuffle_seed is None:
            for dataset in opened:
                writer.add_dataset(dataset)
                report.documents += dataset.num_documents
        else:
            for chunk in shuffled_documents([list(opened)], shuffle_seed):
                (column,) = chunk.columns
                writer.add_documents(column.tokens, column.lengths, column.ends, column.weights)
                report.documents += chunk.documents
        report.tokens = tokens
    write_vocabulary(output, identity)
    return report


def shuffled_documents(columns: Sequence[Sequence[IndexedDataset]], seed: int) -> Iterator[Encoded]:
    """All documents, in the random order of `seed`, in chunks.

    columns: for each key, the datasets that hold its documents. Document n of all keys is from the
    same row; these stay together. The order depends on the seed and the number of documents alone.
    Memory: about 32 bytes per document. Tokens are read at random positions.
    """
    counts = [dataset.num_documents for dataset in columns[0]]
    for datasets in columns:
        assert [dataset.num_documents for dataset in datasets] == counts
    firsts = np.cumsum([0, *counts])
    starts = [list(map(_starts, datasets)) for datasets in columns]
    order, begin = shuffled(int(firsts[-1]), seed, _KEY), 0
    while begin < len(order):
        chosen, waiting = [], _TOKENS
        for number in order[begin:]:
            dataset_number = int(np.searchsorted(firsts, number, side="right")) - 1
            document = int(number - firsts[dataset_number])
            chosen.append((dataset_number, document))
            bounds = (column[dataset_number][document : document + 2] for column in starts)
            waiting -= sum(int(end - start) for start, end in bounds)
            if waiting <= 0:
                break
        begin += len(chosen)
        yield Encoded(
            tuple(map(_column, columns, starts, [chosen] * len(columns))), documents=len(chosen)
        )


def _starts(dataset: IndexedDataset) -> np.ndarray:
    if not len(dataset):  # all documents are empty
        return np.zeros(dataset.num_documents + 1, np.int64)
    return dataset.document_starts()


def _column(
    datasets: Sequence[IndexedDataset],
    starts: Sequence[np.ndarray],
    chosen: Sequence[tuple[int, int]],
) -> Column:
    tokens, lengths, weights = [], [], []
    for which, place in chosen:
        dataset, at = datasets[which], starts[which]
        first, last = dataset.document_indices[place : place + 2]
        tokens.append(dataset.tokens[at[place] : at[place + 1]])
        lengths.append(dataset.lengths[first:last])
        weights.append(1 if dataset.weights is None else dataset.weights[place])
    ends = np.cumsum([len(part) for part in lengths])
    weights = np.array(weights, np.float32)
    return Column(np.concatenate(tokens), np.concatenate(lengths), ends, weights)


def _check_partitions(prefixes: Sequence[str]) -> None:
    """ValueError where a partition of a corpus is missing, repeated or out of order."""
    partitions: dict[tuple[str, int, str], list[int]] = {}
    for prefix in prefixes:
        if match := _PARTITION.fullmatch(prefix):
            partitions.setdefault((match[1], int(match[3]), match[4]), []).append(int(match[2]))
    for (output, count, key), numbers in partitions.items():
        if numbers == list(range(count)):
            continue
        missing = sorted(set(range(count)) - set(numbers))
        wrong = f"{missing[:8]} are missing" if missing else f"the order is {numbers[:8]}"
        raise ValueError(
            f"of the {count} partitions {output}_*_{key} {wrong}: prepare those, and name each "
            f"once, as {output}_*-of-{count:05d}_{key}.idx"
        )
