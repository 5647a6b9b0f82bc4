"""RETRO's neighbours of a corpus: maxmeg neighbours --config=retro --data.paths=PREFIX \\
--encoder=RUN_DIR

Writes the folder data.neighbours (PREFIX.neighbours): an index of the embeddings of the training
split's chunks, and for the chunks of every split the numbers of the nearest of these, without those
of the same document. RUN_DIR: a run of maxmeg or an imported model, such as BERT or MiniLM.
"""

import dataclasses
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
from maxmeg.data.corpus.stored import digest, write_atomically
from maxmeg.data.samples.gpt import SPLITS
from maxmeg.data.samples.retro import (
    DESCRIPTION,
    Chunks,
    Description,
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
    tokenizer, prefixes = open_corpus(config.data, config.run_dir)
    folder = cache_folder(config.data, config.run_dir)
    corpus = remote.open_dataset(prefixes[0], config.data, folder, tokenizer.vocab_size)
    trained = load_run(options.encoder)
    embedder, pooling = Embedder(trained, few=True), typing.cast(Pooling, options.pooling)
    embedder.check(pooling)
    length, split = config.data.chunk_length, config.data.split
    splits = {
        name: split_chunks(corpus, split, number, length) for number, name in enumerate(SPLITS)
    }
    encoder = Encoder(
        lambda texts: embedder(texts, pooling, truncate=True), encoder_hash(trained, pooling)
    )
    prepare(folder_of(config.data), splits, config.data.num_neighbours, tokenizer, encoder)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """embed: of texts. hash: identifies the model, and how its hidden states are pooled."""

    embed: Embed
    hash: str


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
        first, found = 0, [np.empty((0, count), np.int64)]
        for queries in blocks:
            numbers = np.arange(first, first + len(queries))
            excluded = chunks.same_document(numbers) if is_own else None
            found.append(index.search(queries, count, excluded)[1])
            first += len(queries)
        file = io.BytesIO()
        np.save(file, np.concatenate(found).astype(np.int32))
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
        ids, sizes = chunks.read(numbers, chunks.length)
        rows = zip(ids, sizes.tolist(), strict=True)
        # The model needs a token, which the text of special tokens may not have.
        yield embed([tokenizer.decode(row[:size].tolist()) or " " for row, size in rows])


def blocks_of(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows, BLOCK at a time."""
    for first in range(0, len(rows), BLOCK):
        yield rows[first : first + BLOCK]
