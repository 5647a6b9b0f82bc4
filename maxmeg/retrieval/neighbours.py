"""RETRO's neighbours of a corpus: maxmeg neighbours --config=retro --data.paths=PREFIX
--encoder=RUN_DIR

Writes the folder data.neighbours (PREFIX.neighbours): an index of the embeddings of the training
split's chunks, and for the chunks of every split the numbers of the nearest of these, without those
of the same document. RUN_DIR: a run of maxmeg or an imported model, such as BERT or MiniLM.
"""

import dataclasses
import functools
import io
import json
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from maxmeg.config.options import Neighbours as Options
from maxmeg.config.schema import Config
from maxmeg.config.validate import check_settings
from maxmeg.data.build import cache_folder, open_corpus
from maxmeg.data.corpus import remote
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.stored import digest, write_atomically
from maxmeg.data.samples.dataset import SPLITS
from maxmeg.data.samples.retro import (
    DESCRIPTION,
    Chunks,
    Description,
    check_description,
    folder_of,
    split_chunks,
)
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.embeddings import Embedder, Pooling
from maxmeg.inference.load import Trained, load_run
from maxmeg.retrieval import index as indices
from maxmeg.runtime.gpu_environment import set_gpu_environment
from maxmeg.runtime.screen import say

BLOCK = 1024  # chunks that are embedded, or searched, at a time
DATABASE = "database"  # folder of the index

Embed = Callable[[Sequence[str]], np.ndarray]  # texts to vectors [N, W]


def main(config: Config, options: Options) -> None:
    set_gpu_environment()
    check_settings(config)
    if not config.data.objective.has_neighbours:
        raise ValueError(
            f"data.objective={config.data.objective.value} reads no neighbours: use the settings "
            "of a run with objective=retro, such as --config=retro"
        )
    tokenizer, corpus = open_indexed(config)
    encoder = load_encoder(options.encoder, options.pooling)
    length, split = config.data.chunk_length, config.data.split
    splits = {
        name: split_chunks(corpus, split, number, length) for number, name in enumerate(SPLITS)
    }
    prepare(folder_of(config.data), splits, config.data.num_neighbours, tokenizer, encoder)


def open_indexed(config: Config) -> tuple[Tokenizer, IndexedDataset]:
    """The tokenizer and the corpus of a run of RETRO."""
    tokenizer, prefixes = open_corpus(config.data, config.run_dir)
    folder = cache_folder(config.data, config.run_dir)
    return tokenizer, remote.open_dataset(prefixes[0], config.data, folder, tokenizer.vocab_size)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """embed: of texts. hash: identifies the model, and how its hidden states are pooled."""

    embed: Embed
    hash: str


def load_encoder(run_dir: str, pooling: str) -> Encoder:
    """Load the model that embeds chunks. ValueError if it cannot embed texts with this pooling."""
    trained, named = load_run(run_dir), typing.cast(Pooling, pooling)
    embedder = Embedder(trained, few=True)
    embedder.check(named)
    embed = functools.partial(embedder, pooling=named, truncate=True)
    return Encoder(embed, encoder_hash(trained, named))


def encoder_hash(trained: Trained, pooling: Pooling) -> str:
    """A hash of the weights, the vocabulary and the pooling."""
    arrays = jax.tree_util.tree_leaves_with_path(trained.model)
    parts = (
        digest(jax.tree_util.keystr(path), np.atleast_1d(np.asarray(array)).view(np.uint8))
        for path, array in arrays
    )
    return digest(trained.tokenizer.identity, pooling, *parts)


def prepare(
    folder: Path,
    splits: dict[str, Chunks],
    count: int,
    tokenizer: Tokenizer,
    encoder: Encoder,
) -> None:
    """Write the neighbours of the chunks of all splits. An index that is in the folder is used; a
    ValueError says if it is of another encoder or corpus."""
    database = splits[SPLITS[0]]
    if not len(database):
        raise ValueError("the training split has no tokens: give it more weight with data.split")
    identity, path = database.identity, folder / DATABASE
    if (path / indices.DESCRIPTION).exists():
        index = indices.Index.open(path, encoder.hash, identity)
    else:
        vectors = embedded(database, tokenizer, encoder.embed)
        index = indices.Index.create(path, vectors, encoder.hash, identity)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    for name, chunks in splits.items():
        is_own = name == SPLITS[0]
        blocks = blocks_of(index.vectors) if is_own else embedded(chunks, tokenizer, encoder.embed)
        first, neighbours = 0, [np.empty((0, count), np.int64)]
        for queries in blocks:
            numbers = np.arange(first, first + len(queries))
            excluded = chunks.same_document(numbers) if is_own else None
            neighbours.append(index.search(queries, count, excluded)[1])
            first += len(queries)
        file = io.BytesIO()
        np.save(file, np.concatenate(neighbours).astype(np.int32))
        write_atomically(folder / f"{name}.npy", file.getvalue())
        say(f"{name}: {count} neighbours of each of {len(chunks):,} chunks")
    identities = {name: chunks.identity for name, chunks in splits.items()}
    values = (database.length, count, identity, tokenizer.identity, encoder.hash, identities)
    write_atomically(
        folder / DESCRIPTION, json.dumps(vars(Description(*values)), indent=2).encode()
    )


def embedded(chunks: Chunks, tokenizer: Tokenizer, embed: Embed) -> Iterator[np.ndarray]:
    """Yield blocks of the embeddings of all chunks, in order."""
    for numbers in blocks_of(np.arange(len(chunks))):
        yield embed(texts_of(*chunks.read(numbers, chunks.length), tokenizer))


def texts_of(ids: np.ndarray, sizes: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The text of each chunk, of `sizes` tokens."""
    rows = zip(ids, sizes.tolist(), strict=True)
    # The model needs a token, which the text of special tokens may not have.
    return [tokenizer.decode(row[:size].tolist()) or " " for row, size in rows]


def blocks_of(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows, BLOCK at a time."""
    for first in range(0, len(rows), BLOCK):
        yield rows[first : first + BLOCK]


@dataclasses.dataclass(frozen=True)
class Search:
    """Find the neighbours of any chunks, in the way `prepare` finds those of a corpus.

    database: chunks of the training split. index: their embeddings. count: number of neighbours per
    chunk. length: number of tokens per neighbour.
    """

    database: Chunks
    index: indices.Index
    tokenizer: Tokenizer
    encoder: Encoder
    count: int
    length: int

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the neighbours of chunks [N, chunk length]: token ids [N, count * length] and a
        mask of the same shape, False for padding."""
        sizes = np.full(len(ids), self.database.length)
        vectors = self.encoder.embed(texts_of(ids, sizes, self.tokenizer))
        rows = self.index.search(vectors, self.count)[1]
        ids_of_rows, lengths = self.database.read(rows.ravel(), self.length)
        is_token = np.arange(self.length) < lengths[:, None]
        return ids_of_rows.reshape(len(ids), -1), is_token.reshape(len(ids), -1)


def open_search(config: Config, encoder: Encoder) -> Search:
    """Open the chunk database that a run was trained with. ValueError if it was built from another
    corpus or with another tokenizer, encoder or chunk length."""
    (tokenizer, corpus), data = open_indexed(config), config.data
    database = split_chunks(corpus, data.split, 0, data.chunk_length)
    folder = folder_of(data)
    check_description(folder, database, tokenizer)
    index = indices.Index.open(folder / DATABASE, encoder.hash, database.identity)
    sizes = data.num_neighbours, data.neighbour_length
    return Search(database, index, tokenizer, encoder, *sizes)
