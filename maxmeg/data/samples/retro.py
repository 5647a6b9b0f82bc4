"""RETRO's samples: chunks of documents, each with its neighbours in the training split.

A chunk has `length` tokens of one document, the last one of a document perhaps fewer. A folder that
`maxmeg neighbours` writes (maxmeg/retrieval/neighbours.py) holds, for each split, the numbers of
each chunk's nearest chunks, NAME.npy [chunks, neighbours], and neighbours.json, which says of which
corpus, tokenizer and encoder they are.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from maxmeg.config.data import DataConfig
from maxmeg.config.retro import Neighbours
from maxmeg.data.corpus.indexed import IndexedDataset, check_vocabulary
from maxmeg.data.corpus.stored import digest
from maxmeg.data.opening import Opening
from maxmeg.data.samples.dataset import SPLITS, EpochRows, Record, identify
from maxmeg.data.samples.sampling import (
    Batch,
    EpochOrder,
    Permutation,
    nonempty_range,
    split_range,
)
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.data.workers import RebuiltInWorkers

DESCRIPTION = "neighbours.json"
_ROWS, _SHUFFLED = 5, 6  # keys of permutations: of rows of chunks, and of chunks


class Chunks:
    """The chunks of the documents [begin, end) of a corpus, numbered in order."""

    def __init__(self, corpus: IndexedDataset, begin: int, end: int, length: int) -> None:
        self.corpus, self.length = corpus, length
        self.starts = corpus.document_starts()[begin : end + 1]
        counts = -(-np.diff(self.starts) // length)
        self.bounds = np.concatenate([[0], np.cumsum(counts)])  # of the documents' chunks
        self.identity = digest(identify([corpus], [(begin, end)]), corpus.document_indices, length)

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def documents(self, numbers: np.ndarray) -> np.ndarray:
        """The documents of chunks, from 0 on."""
        return np.searchsorted(self.bounds, numbers, side="right") - 1

    def same_document(self, numbers: np.ndarray) -> np.ndarray:
        """The ranges [begin, end) of the chunks in the documents of these chunks, [N, 2]."""
        documents = self.documents(numbers)
        return np.stack([self.bounds[documents], self.bounds[documents + 1]], axis=1)

    def read(self, numbers: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids [N, length], sizes [N]) of chunks and their continuations; zeros fill what follows
        the end of a document."""
        documents = self.documents(numbers)
        starts = self.starts[documents] + (numbers - self.bounds[documents]) * self.length
        sizes = np.minimum(self.starts[documents + 1] - starts, length)
        self.corpus.expect(starts, sizes, now=True)
        ids = np.zeros((len(numbers), length), np.int32)
        for row, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            ids[row, :size] = self.corpus.tokens[start : start + size]
        return ids, sizes


@dataclasses.dataclass(frozen=True)
class Description:
    """The contents of neighbours.json. database: identity of the chunks of the training split, from
    which neighbours are. tokenizer, encoder: hashes. splits: identities of the chunks of each."""

    chunk_length: int
    num_neighbours: int
    database: str
    tokenizer: str
    encoder: str
    splits: dict[str, str]


def folder_of(config: DataConfig) -> Path:
    """The folder with the neighbours of a run's corpus."""
    return Path(config.neighbours or f"{config.paths[0]}.neighbours")


def read_description(folder: Path) -> Description:
    """ValueError if there is none, or if it is damaged."""
    path = folder / DESCRIPTION
    try:
        return Description(**json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ValueError(
            f"no neighbours in {folder} ({error}): run `maxmeg neighbours` with the settings of "
            "the run and --encoder=RUN_DIR, or name their folder with data.neighbours"
        ) from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): run `maxmeg neighbours` again") from error


def check_description(folder: Path, database: Chunks, tokenizer: Tokenizer) -> Description:
    """Read a description. ValueError if it is of other chunks or another tokenizer."""
    description = read_description(folder)
    expected = {"chunk_length": database.length, "database": database.identity}
    for name, expected_value in (expected | {"tokenizer": tokenizer.identity}).items():
        if (value := getattr(description, name)) != expected_value:
            raise ValueError(
                f"the neighbours in {folder} were found with another {name}: {value}, and here it "
                f"is {expected_value}: run `maxmeg neighbours` again, name another folder with "
                "data.neighbours, or go back to what they were found with"
            )
    return description


def open_table(folder: Path, chunks: Chunks, split: str, count: int) -> np.ndarray:
    """The numbers [chunks, at least `count`] of the neighbours of a split's chunks. ValueError if
    they are of another corpus, or fewer."""
    description, path = read_description(folder), folder / f"{split}.npy"
    if (identity := description.splits.get(split)) != chunks.identity:
        raise ValueError(
            f"{path} is of a corpus or a split with the hash {identity}, and that of {split} in "
            f"{chunks.corpus.prefix} is {chunks.identity}: run `maxmeg neighbours` again, or name "
            "another folder with data.neighbours"
        )
    if count > description.num_neighbours:
        raise ValueError(
            f"data.num_neighbours={count}: {folder} has {description.num_neighbours} of each "
            "chunk: choose at most these, or run `maxmeg neighbours` again"
        )
    try:
        table = np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): run `maxmeg neighbours` again") from error
    if table.shape != (len(chunks), description.num_neighbours):
        raise ValueError(f"{path} has shape {table.shape}: run `maxmeg neighbours` again")
    return table


def split_chunks(corpus: IndexedDataset, split: str, index: int, length: int) -> Chunks:
    """The chunks of split 0, 1 or 2 of a corpus, by documents."""
    return Chunks(corpus, *split_range(split, index, corpus.num_documents), length)


class RetroDataset(EpochRows, RebuiltInWorkers):
    """Batches of one split (0 train, 1 validation, 2 test) of a corpus.

    A row holds consecutive chunks, each padded to its whole length; rows are read in shuffled order
    for training. Tokens attend to their own document only, also to the neighbours of its chunks.
    ValueError if the neighbours are of another corpus, tokenizer or length of chunks.
    """

    def __init__(
        self,
        corpus: IndexedDataset,
        split: str,
        split_index: int,
        config: DataConfig,
        tokenizer: Tokenizer,
        seed: int,
        vocab_size: int = 0,
    ) -> None:
        nonempty_range(split, split_index, corpus.num_documents, f"documents of {corpus.prefix}")
        length, self.num_neighbours = config.chunk_length, config.num_neighbours
        self.chunks = split_chunks(corpus, split, split_index, length)
        self.database = split_chunks(corpus, split, 0, length)
        folder, name = folder_of(config), SPLITS[split_index]
        self.neighbours = check_description(folder, self.database, tokenizer)
        self.table = open_table(folder, self.chunks, name, self.num_neighbours)
        self.read_neighbours = config.read_neighbours
        self.neighbour_length = config.neighbour_length
        self.sequence_length = config.sequence_length
        self.vocab_size = vocab_size or tokenizer.vocab_size
        self._seed = seed
        rows = -(-len(self.chunks) * length // self.sequence_length)
        self._order = EpochOrder(rows, seed, _ROWS, shuffle=split_index == 0)
        self._other = Permutation(len(self.chunks), seed, _SHUFFLED)

    @property
    def num_tokens(self) -> int:
        return int(self.chunks.starts[-1] - self.chunks.starts[0])

    @property
    def description(self) -> Record:
        return {
            "order": "chunks",
            "corpora": [self.chunks.identity],
            "sequence_length": self.sequence_length,
            "seed": self._seed,
            "neighbours": [
                *dataclasses.astuple(self.neighbours)[:-1],
                self.read_neighbours.value,
            ],
        }

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples with these numbers, any >= 0; arrays as of T5Dataset.batch.

        encoder_tokens [N, chunks * neighbours * neighbour_length]: the neighbours of each chunk.
        encoder_segment_ids: that of the chunk, 0 for padding. Padding at a document's end has a
        segment of its own.
        """
        L, m = self.sequence_length, self.chunks.length
        rows = self._order(indices)
        numbers = (rows[:, None] * (L // m) + np.arange(L // m)).ravel()
        exists = numbers < len(self.chunks)
        numbers = np.minimum(numbers, len(self.chunks) - 1)
        ids, sizes = self.chunks.read(numbers, m + 1)
        sizes = np.where(exists, sizes, 0)[:, None]
        documents = self.chunks.documents(numbers).reshape(len(rows), -1)
        segments = 2 * (documents - documents[:, :1]).reshape(-1, 1) + 1
        places = np.arange(m)
        padded = np.where(places < sizes, segments, segments + 1)
        batch: Batch = {
            "tokens": ids[:, :m] * exists[:, None],
            "targets": ids[:, 1:] * exists[:, None],
            "loss_mask": (places + 1 < sizes).astype(np.float32),
            "segment_ids": (padded * exists[:, None]).astype(np.int32),
            "positions": np.tile(np.arange(L, dtype=np.int32), (len(rows), 1)),
        }
        neighbours, lengths = self._neighbours(numbers)
        is_token = np.arange(self.neighbour_length) < lengths[:, None]
        is_token &= np.repeat(exists, self.num_neighbours)[:, None]
        batch["encoder_tokens"] = neighbours * is_token
        of_chunk = np.repeat(segments, self.num_neighbours, axis=0)
        batch["encoder_segment_ids"] = (of_chunk * is_token).astype(np.int32)
        for name in ("tokens", "encoder_tokens"):
            check_vocabulary(batch[name], self.vocab_size, f"{self.chunks.corpus.prefix}.bin")
        return {name: values.reshape(len(rows), -1) for name, values in batch.items()}

    def _neighbours(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids [N * neighbours, length], sizes) of the neighbours of chunks."""
        if self.read_neighbours is Neighbours.shuffled:
            numbers = self._other(numbers)
        chunks = np.asarray(self.table[numbers, : self.num_neighbours]).ravel()
        ids, sizes = self.database.read(chunks, self.neighbour_length)
        return ids, sizes * (self.read_neighbours is not Neighbours.none)


def open_retro(opening: Opening) -> RetroDataset | None:
    """The samples of a split of one corpus; None where it may be left out."""
    if (corpus := opening.only_corpus()) is None:
        return None
    rest = opening.config, opening.tokenizer, opening.seed, opening.num_ids
    return RetroDataset(corpus, opening.split, opening.index, *rest)
