"""Search by faiss (pip install 'maxmeg[faiss]'), which has approximate indices of many kinds."""

import numpy as np

from maxmeg.retrieval.index import Index


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
        found = faiss.index_factory(vectors.shape[1], description, faiss.METRIC_INNER_PRODUCT)
        found.train(vectors)
    except RuntimeError as error:
        raise ValueError(f"--faiss={description}: {error}") from error
    found.add(vectors)
    scores, rows = found.search(queries, count)
    return np.where(rows < 0, -np.inf, scores), rows
