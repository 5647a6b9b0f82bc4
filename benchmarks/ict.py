"""Recall of a biencoder on held-out blocks, beside TF-IDF: python benchmarks/ict.py RUN_DIR

The blocks of a run's validation and test documents (data.objective=ict). A random sentence of each
is taken away and has to find what is left of its block among all of these. Prints recall@k of the
model and of cosines of TF-IDF over word pieces.
"""

import argparse
import tempfile

import numpy as np
import scipy.sparse

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.retrieval.ict import Blocks
from maxmeg.data.retrieval.rows import TextEncoder
from maxmeg.data.samples.sampling import split_range
from maxmeg.inference.embeddings import Pooling
from maxmeg.inference.load import load_run
from maxmeg.retrieval.embed import Searcher, recall
from maxmeg.retrieval.index import Index

TOPS = (1, 5, 20, 100)
Texts = list[np.ndarray]


def held_out(corpus: IndexedDataset, split: str, room: int, seed: int) -> tuple[Texts, Texts]:
    """(a sentence of each block, the others) of the documents that are not for training."""
    random = np.random.default_rng(seed)
    first = split_range(split, 1, corpus.num_documents)[0]
    bounds = np.asarray(corpus.document_indices[first:], np.int64)
    rooms = np.full(len(bounds) - 1, room - 3)
    queries, texts = [], []
    for begin, end, _ in Blocks(corpus.lengths, bounds, rooms).epoch().tolist():
        sentences = [corpus.get(number) for number in range(begin, end)]
        queries.append(sentences.pop(int(random.integers(len(sentences)))))
        texts.append(np.concatenate(sentences))
    return queries, texts


def tf_idf(queries: Texts, texts: Texts, vocab_size: int, count: int) -> np.ndarray:
    """Rows [Q, count] of the texts with the largest cosines of (1 + ln tf) * idf."""

    def counts(rows: Texts) -> scipy.sparse.csr_matrix:
        owner = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        pairs = (np.ones(len(owner)), (owner, np.concatenate(rows)))
        matrix = scipy.sparse.csr_matrix(pairs, shape=(len(rows), vocab_size))
        matrix.data = 1 + np.log(matrix.data)
        return matrix

    documents = counts(texts)
    found_in = np.asarray((documents > 0).sum(axis=0)).ravel()
    weights = scipy.sparse.diags(np.log((1 + len(texts)) / (1 + found_in)) + 1)

    def weighted(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
        product = matrix @ weights
        norms = np.sqrt(np.asarray(product.multiply(product).sum(axis=1)).ravel())
        return scipy.sparse.diags(1 / np.maximum(norms, 1e-30)) @ product

    scores = (weighted(counts(queries)) @ weighted(documents).T).toarray()
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir")
    parser.add_argument("--corpus", default="", help="prefix; default: the run's")
    parser.add_argument("--pooling", default="", help="of a model that is no biencoder")
    parser.add_argument("--query_length", type=int, default=0)
    parser.add_argument("--text_length", type=int, default=0)
    parser.add_argument("--split", default="")
    arguments = parser.parse_args()
    trained = load_run(arguments.run_dir)
    pooling: Pooling | None = arguments.pooling or None
    searcher, data = Searcher(trained, pooling), trained.config.data
    room = arguments.text_length or data.text_tokens
    corpus = IndexedDataset(arguments.corpus or data.paths[0])
    queries, texts = held_out(corpus, arguments.split or data.split, room, seed=0)
    encode, own = TextEncoder.of(trained.tokenizer), np.arange(len(texts))
    length = arguments.query_length or data.query_length
    vectors = [
        searcher.vectors([encode(tokens, length) for tokens in queries], queries=True),
        searcher.vectors([encode(tokens, room) for tokens in texts]),
    ]
    with tempfile.TemporaryDirectory() as folder:
        index = Index.create(folder, [vectors[1]], "benchmark", "held out")
        _, rows = index.search(vectors[0], max(TOPS))
    found = {"model": rows, "TF-IDF": tf_idf(queries, texts, encode.vocab_size, max(TOPS))}
    print(f"{len(queries):,} queries; step {trained.step}; chance at 1: {1 / len(texts):.5f}")
    for name, rows in found.items():
        shares = recall(rows, own, TOPS)
        print(name, *(f"recall@{top} {100 * share:.1f} %" for top, share in shares.items()))


if __name__ == "__main__":
    main()
