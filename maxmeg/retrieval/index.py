"""An index on disk: the embeddings of a corpus, and the texts and the encoder that they are of.

A folder with `vectors.f32`, the rows [N, W] in little-endian float32, and `index.json`, which is
written last: without it the folder holds no index. Search is exact, or by faiss.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmeg.data.corpus.stored import write_atomically

VECTORS, DESCRIPTION = "vectors.f32", "index.json"
QUERIES, ROWS = 1024, 32_768  # whose products, 128 MiB, are in a device's memory at a time
SMALLEST = 8  # queries or rows of a block, whose sizes are powers of two up to these
NO_ROW = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Description:
    """The contents of index.json. encoder, corpus: hashes."""

    encoder: str
    corpus: str
    rows: int
    width: int


@dataclasses.dataclass(frozen=True)
class Index:
    """Vectors [N, W], memory-mapped, and their description."""

    vectors: np.ndarray
    description: Description

    @classmethod
    def create(
        cls, folder: str | Path, vectors: Iterable[np.ndarray], encoder: str, corpus: str
    ) -> "Index":
        """Write an index, in place of one that the folder holds, and open it.

        vectors: blocks [n, W] of finite numbers, in the order of the rows. encoder, corpus: hashes
        that identify what computes the vectors, and from which texts. ValueError for vectors that
        are not finite, that differ in their width, or that are none.
        """
        path, rows, width = Path(folder), 0, 0
        path.mkdir(parents=True, exist_ok=True)
        (path / DESCRIPTION).unlink(missing_ok=True)
        (path / VECTORS).unlink(missing_ok=True)  # others may have mapped it
        with open(path / VECTORS, "wb") as file:
            for block in vectors:
                block = np.ascontiguousarray(block, "<f4")
                if block.ndim != 2 or (rows and block.shape[1] != width):
                    expected = f"[n, {width}]" if rows else "[n, W]"
                    raise ValueError(
                        f"vectors of shape {[*block.shape]} after {rows} rows: each block must be "
                        f"{expected}"
                    )
                if not np.isfinite(block).all():
                    row = rows + int(np.argmin(np.isfinite(block).all(axis=1)))
                    raise ValueError(f"the vector of row {row} is not finite: check the encoder")
                rows, width = rows + len(block), block.shape[1]
                block.tofile(file)
        if not rows * width:
            raise ValueError(f"no vectors for the index {path}: the corpus is empty")
        values = dataclasses.asdict(Description(encoder, corpus, rows, width))
        write_atomically(path / DESCRIPTION, json.dumps(values, indent=2).encode())
        return cls.open(folder, encoder, corpus)

    @classmethod
    def open(cls, folder: str | Path, encoder: str, corpus: str) -> "Index":
        """Open the index in a folder. ValueError if there is none, if it is damaged, or if it was
        built by another encoder or from another corpus."""
        description = read_description(folder)
        for name, expected in (("encoder", encoder), ("corpus", corpus)):
            value = getattr(description, name)
            if value != expected:
                raise ValueError(
                    f"the index {folder} was built with another {name}: its {name} has the hash "
                    f"{value}, and the one here {expected}: build the index again, or use the "
                    f"{name} that it was built with"
                )
        path, shape = Path(folder, VECTORS), (description.rows, description.width)
        size = path.stat().st_size if path.exists() else 0
        if size != 4 * shape[0] * shape[1]:
            raise ValueError(
                f"{path} has {size} bytes instead of 4 * {shape[0]} rows * {shape[1]}: it is "
                "damaged: build the index again"
            )
        return cls(np.memmap(path, "<f4", "r", shape=shape), description)

    def search(
        self,
        queries: Float[np.ndarray, "Q W"],
        count: int,
        excluded: Int[np.ndarray, "Q 2"] | None = None,
    ) -> tuple[Float[np.ndarray, "Q C"], Int[np.ndarray, "Q C"]]:
        """Return (float32 scores, int64 rows) of the `count` largest inner products of each query,
        the best first; of equal scores, the lower row first.

        excluded: a range of rows [begin, end) for each query, none of which is returned. ValueError
        if there are fewer than `count` other rows.
        """
        queries = np.ascontiguousarray(queries, np.float32)
        excluded = np.zeros((len(queries), 2), np.int64) if excluded is None else excluded
        excluded = np.clip(np.asarray(excluded, np.int64), 0, len(self.vectors))
        self.check(queries, count, excluded)
        scores = np.empty((len(queries), count), np.float32)
        rows = np.empty((len(queries), count), np.int64)
        for first in range(0, len(queries), QUERIES):
            part = slice(first, first + QUERIES)
            scores[part], rows[part] = self.best(queries[part], count, excluded[part])
        return scores, rows

    def check(self, queries: np.ndarray, count: int, excluded: np.ndarray) -> None:
        """ValueError for queries that this index cannot answer."""
        size, width = self.vectors.shape
        if queries.ndim != 2 or queries.shape[1] != width:
            raise ValueError(f"queries of shape {[*queries.shape]}: they must be [Q, {width}]")
        if excluded.shape != (len(queries), 2):
            raise ValueError(f"excluded of shape {[*excluded.shape]}: it must be [Q, 2]")
        if not np.isfinite(queries).all():
            raise ValueError("queries with numbers that are not finite: check the encoder")
        left = size - np.maximum(excluded[:, 1] - excluded[:, 0], 0)
        fewest = int(left.min(initial=size))
        if not 1 <= count <= fewest:
            without = "" if fewest == size else f" without those excluded for {np.argmin(left)}"
            raise ValueError(
                f"count={count}: the index has {fewest} rows{without}: choose 1 to {fewest}"
            )

    def best(
        self, queries: np.ndarray, count: int, excluded: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `search`, of at most QUERIES queries: each device reads every n-th block of rows."""
        number, size = len(queries), len(self.vectors)
        wide, high = block_size(number, QUERIES), block_size(max(size, count), ROWS)
        pad = ((0, wide - number), (0, 0))
        queries_QW, excluded_Q2 = np.pad(queries, pad), np.pad(excluded, pad).astype(np.int32)
        empty = np.full((wide, count), -np.inf, np.float32), np.full((wide, count), NO_ROW)
        devices = jax.local_devices()[: -(-size // high)]
        fixed = [jax.device_put((queries_QW, excluded_Q2), device) for device in devices]
        best = [jax.device_put((empty[0], empty[1].astype(np.int32)), d) for d in devices]
        for turn, begin in enumerate(range(0, size, high)):
            rows_RW = np.zeros((high, self.vectors.shape[1]), np.float32)
            rows_RW[: size - begin] = self.vectors[begin : begin + high]
            at = turn % len(devices)
            jax.block_until_ready(best[at])  # blocks that wait would fill the memory
            rows_RW = jax.device_put(rows_RW, devices[at])
            ends = np.int32(begin), np.int32(size)
            best[at] = _better(*best[at], *fixed[at], rows_RW, *ends)
        scores, rows = (np.concatenate(parts, 1)[:number] for parts in zip(*best, strict=True))
        order = np.lexsort((rows, -scores))[:, :count]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _better(
    scores_QC: Float[Array, "Q C"],
    numbers_QC: Int[Array, "Q C"],
    queries_QW: Float[Array, "Q W"],
    excluded_Q2: Int[Array, "Q 2"],
    rows_RW: Float[Array, "R W"],
    begin: Int[Array, ""],
    end: Int[Array, ""],
) -> tuple[Float[Array, "Q C"], Int[Array, "Q C"]]:
    """The best scores and row numbers so far, with those of a later block of rows from `begin`.

    top_k keeps the order of equal scores: the rows of earlier blocks stand first.
    """
    count = scores_QC.shape[1]
    products_QR = jnp.einsum("QW,RW->QR", queries_QW, rows_RW, precision="highest")
    numbers_R = begin + jnp.arange(rows_RW.shape[0], dtype=jnp.int32)
    begin_Q1, end_Q1 = jnp.split(excluded_Q2, 2, axis=1)
    is_out_QR = (numbers_R >= begin_Q1) & (numbers_R < end_Q1) | (numbers_R >= end)
    products_QR = jnp.where(is_out_QR, -jnp.inf, products_QR)
    block_QC, places_QC = jax.lax.top_k(products_QR, min(count, rows_RW.shape[0]))
    all_scores = jnp.concatenate([scores_QC, block_QC], axis=1)
    all_numbers = jnp.concatenate([numbers_QC, numbers_R[places_QC]], axis=1)
    scores_QC, chosen_QC = jax.lax.top_k(all_scores, count)
    return scores_QC, jnp.take_along_axis(all_numbers, chosen_QC, axis=1)


def read_description(folder: str | Path) -> Description:
    """Read the description of an index. ValueError if there is none, or if it is damaged."""
    path = Path(folder, DESCRIPTION)
    try:
        description = Description(**json.loads(path.read_text("utf-8")))
        types = {field.name: field.type for field in dataclasses.fields(Description)}
        values = dataclasses.asdict(description).items()
        if any(not isinstance(value, types[name]) for name, value in values):  # type: ignore
            raise TypeError("wrong types")
    except OSError as error:
        raise ValueError(f"no index in {folder} ({error}): build one first") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): build the index again") from error
    return description


def block_size(count: int, largest: int) -> int:
    """The power of two that holds `count`, from SMALLEST to `largest`."""
    return min(largest, max(SMALLEST, 1 << (count - 1).bit_length()))


def faiss_search(
    index: Index, queries: np.ndarray, count: int, description: str
) -> tuple[np.ndarray, np.ndarray]:
    """As `Index.search`, by an index of faiss that is built from the vectors in memory.

    description: of faiss' index_factory, such as Flat or IVF1024,PQ32. Approximate indices may miss
    rows; then row -1 with the score -inf takes their place. ValueError for a description that faiss
    refuses. ImportError without faiss.
    """
    try:
        import faiss  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            f"--faiss={description} needs faiss: pip install 'maxmeg[faiss]', or leave --faiss out "
            "for exact search"
        ) from error
    queries = np.ascontiguousarray(queries, np.float32)
    index.check(queries, count, np.zeros((len(queries), 2), np.int64))
    vectors = np.ascontiguousarray(index.vectors)
    try:
        searcher = faiss.index_factory(vectors.shape[1], description, faiss.METRIC_INNER_PRODUCT)
        searcher.train(vectors)
    except RuntimeError as error:
        raise ValueError(f"--faiss={description}: {error}") from error
    searcher.add(vectors)
    scores, rows = searcher.search(queries, count)
    return np.where(rows < 0, -np.inf, scores), rows
