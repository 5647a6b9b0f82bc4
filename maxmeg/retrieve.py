"""Search a corpus by a biencoder: maxmeg retrieve runs/biencoder --corpus=FILE.jsonl --query="..."

The first call embeds the corpus into --index; later ones read it, and refuse it if the model or the
corpus has changed. FILE.jsonl: {"text": ..., "title": ... (optional)} a line; or a JSON array
(.json), Parquet, Arrow or a saved dataset of such rows; or the prefix of a corpus of sentences
(`maxmeg preprocess --split_sentences`). --queries=FILE.jsonl with a query and the row or text that
answers it a line prints recall; --output=FILE.jsonl writes what is found.
"""

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    run_module("retrieve")

import json
import os
import typing
from pathlib import Path

import numpy as np

from maxmeg.config.options import Retrieve as Options
from maxmeg.inference.load import load_chosen
from maxmeg.inference.mesh import serving_mesh
from maxmeg.processes import multihost
from maxmeg.retrieval.embed import Searcher, recall
from maxmeg.retrieval.index import faiss_search
from maxmeg.retrieval.passages import Passages, open_passages, read_queries
from maxmeg.runtime.faults.out_of_memory import explains_out_of_memory
from maxmeg.runtime.gpu_environment import set_gpu_environment
from maxmeg.runtime.screen import say

TOPS = (1, 5, 10, 20, 50, 100)
SHOWN = 160  # characters of a text that is found


@explains_out_of_memory("set --dtype=bfloat16 or raise --tensor")
def main(options: Options) -> None:
    set_gpu_environment()
    multihost.use_one_process()
    if not options.corpus:
        raise ValueError("--corpus is empty: name a file of texts, or a prefix of .bin/.idx files")
    if options.query and options.queries:
        raise ValueError("--query and --queries both name queries: give one of them")
    trained = load_chosen(options, serving_mesh(options.tensor, 1, options.data))
    pooling: typing.Any = options.pooling or None
    searcher = Searcher(trained, pooling)
    data = trained.config.data
    passages = open_passages(options.corpus, data, trained.tokenizer)
    queries, right_rows = [*options.query], None
    if options.queries:
        queries, right_rows = read_queries(options.queries, passages)
    folder = options.index or os.path.join(options.run_dir, "index")
    index = searcher.index(folder, passages, options.run_dir)
    rows, width = index.vectors.shape
    say(f"{folder}: {rows:,} texts, vectors of {width} numbers")
    if not queries:
        return
    vectors, count = searcher.queries(queries), options.count
    if options.faiss:
        scores, numbers = faiss_search(index, vectors, count, options.faiss)
    else:
        scores, numbers = index.search(vectors, count)
    if options.output:
        write(options.output, queries, scores, numbers, passages)
    if right_rows is not None:
        for top, share in recall(numbers, right_rows, [n for n in TOPS if n <= count]).items():
            say(f"recall@{top} {100 * share:.2f} % of {len(queries):,} queries")
    elif not options.output:
        show(queries, scores, numbers, passages)


def results(scores: np.ndarray, rows: np.ndarray, passages: Passages) -> list[dict]:
    pairs = [pair for pair in zip(scores.tolist(), rows.tolist(), strict=True) if pair[1] >= 0]
    return [{"row": row, "score": score, "text": passages.text(row)} for score, row in pairs]


def write(path: str, queries: list[str], scores, rows, passages: Passages) -> None:
    """Write one JSON line per query."""
    with Path(path).open("w", encoding="utf-8") as file:
        for query, *columns in zip(queries, scores, rows, strict=True):
            record = {"query": query, "results": results(columns[0], columns[1], passages)}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def show(queries: list[str], scores, rows, passages: Passages) -> None:
    for query, *columns in zip(queries, scores, rows, strict=True):
        say(query)
        for result in results(columns[0], columns[1], passages):
            text = " ".join(result["text"].split())
            excerpt = f"{text[:SHOWN]}..." if len(text) > SHOWN else text
            say(f"{result['score']:.3f}  row {result['row']}  {excerpt}")
