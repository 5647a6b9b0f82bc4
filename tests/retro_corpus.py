"""A corpus of repeated passages, and the neighbours of its chunks."""

from pathlib import Path

import numpy as np

from maxmeg.config.data import DataConfig, DataOrder, Objective
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.samples.dataset import SPLITS
from maxmeg.data.samples.retro import folder_of, split_chunks
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.retrieval.neighbours import Encoder, prepare

CHUNK, NEIGHBOURS, LENGTH, SPLIT = 4, 2, 8, "8,1,1"
TOKENIZER = load_tokenizer("bytes")


def write(folder: Path, documents: int = 40, passages: int = 12, chunks: int = 3) -> str:
    """Its prefix. A document has two passages of whole chunks, and up to a chunk of other bytes."""
    prefix, rng = str(folder / "passages"), np.random.default_rng(0)
    texts = rng.integers(97, 123, (passages, chunks * CHUNK))
    with IndexedWriter(prefix, 257) as writer:
        for number in range(documents):
            chosen = texts[[number % passages, rng.integers(passages)]].ravel()
            tokens = np.concatenate([chosen, rng.integers(97, 123, number % CHUNK), [256]])
            writer.add_document(tokens, [len(tokens)])
    return prefix


def embed(texts) -> np.ndarray:
    """Counts of letters, normalized."""
    rows = [
        np.bincount(np.frombuffer(text.encode()[:CHUNK], np.uint8), minlength=256) for text in texts
    ]
    counts = np.array(rows, np.float32)
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def settings(prefix: str, **others) -> DataConfig:
    fields = {"objective": Objective.retro, "paths": (prefix,), "split": SPLIT}
    fields |= {"chunk_length": CHUNK, "num_neighbours": NEIGHBOURS, "neighbour_length": LENGTH}
    fields |= {"sequence_length": 16, "order": DataOrder.native}
    return DataConfig(**fields | others)


def find(prefix: str, encoder: str = "letters", **others) -> DataConfig:
    """Prepare the neighbours of a corpus; returns the settings of its samples."""
    config, corpus = settings(prefix, **others), IndexedDataset(prefix)
    splits = {
        name: split_chunks(corpus, config.split, number, config.chunk_length)
        for number, name in enumerate(SPLITS)
    }
    count = config.num_neighbours
    prepare(folder_of(config), splits, count, TOKENIZER, Encoder(embed, encoder))
    return config
