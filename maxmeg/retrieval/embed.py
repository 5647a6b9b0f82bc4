"""Embed a corpus on the mesh into an index, and queries for a search."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from maxmeg.data.retrieval.rows import TextEncoder
from maxmeg.hf.folder import open_checkpoints
from maxmeg.inference.embeddings import Pooling, embedders
from maxmeg.inference.load import Trained
from maxmeg.retrieval.index import DESCRIPTION, Index
from maxmeg.retrieval.passages import Passages
from maxmeg.runtime.screen import tracked

BATCHES = 16  # of rows of texts that are sorted by length together


class Searcher:
    """The vectors of a run's model, of queries and of texts of the lengths of its training.

    pooling: for a model that is no biencoder, as of an Embedder; None: the model's own. ValueError
    for a model without such vectors, and for a tokenizer without class and separator tokens.
    """

    def __init__(self, trained: Trained, pooling: Pooling | None = None) -> None:
        self.trained, self.config = trained, trained.config.data
        self.embedder, self.of_queries = embedders(trained)
        if trained.config.model.attention.causal:
            raise ValueError(
                "model.attention.causal=true: the vectors of texts are a bidirectional model's: "
                "train one with --config=retrieval"
            )
        self.pooling: Pooling = pooling or self.embedder.default
        self.embedder.check(self.pooling)
        self._encode = TextEncoder.of(trained.tokenizer)

    def hash(self, run_dir: str) -> str:
        """That identifies the checkpoint, and how vectors are computed from it."""
        source = open_checkpoints(run_dir)
        return f"{source.manifest(self.trained.step).digest}-{self.pooling}"

    def vectors(
        self, texts: Sequence[np.ndarray], queries: bool = False
    ) -> Float[np.ndarray, "N W"]:
        """Of texts, or of queries, as token ids."""
        embedder = self.of_queries if queries else self.embedder
        return embedder([tokens.tolist() for tokens in texts], self.pooling)

    def queries(self, texts: Sequence[str]) -> Float[np.ndarray, "Q W"]:
        encode, length = self.trained.tokenizer.encode, self.config.query_length
        return self.vectors([self._encode(encode(text), length) for text in texts], queries=True)

    def blocks(self, passages: Passages) -> Iterator[Float[np.ndarray, "N W"]]:
        """The vectors of all texts, in order."""
        count = BATCHES * 32 * self.embedder.shards
        for first in tracked(range(0, len(passages), count), "embedding"):
            rows = range(first, min(first + count, len(passages)))
            yield self.vectors([passages.tokens(row) for row in rows])

    def index(self, folder: str, passages: Passages, run_dir: str) -> Index:
        """The index in a folder, which is built if there is none. ValueError for that of another
        encoder or corpus."""
        encoder = self.hash(run_dir)
        if not Path(folder, DESCRIPTION).exists():
            return Index.create(folder, self.blocks(passages), encoder, passages.hash)
        return Index.open(folder, encoder, passages.hash)


def recall(
    rows: Int[np.ndarray, "Q C"], right_rows: Int[np.ndarray, " Q"], tops: Sequence[int]
) -> dict[int, float]:
    """The share of queries whose own text is among the first rows found, for each number."""
    hits = rows == right_rows[:, None]
    return {top: float(hits[:, :top].any(axis=1).mean()) for top in tops}
