"""The index against plain sorting of all inner products, and what it refuses."""

import json

import numpy as np
import pytest

from maxmeg.retrieval import index as index_module
from maxmeg.retrieval.index import DESCRIPTION, VECTORS, Index


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Several blocks of rows on each of the devices, and of queries."""
    monkeypatch.setattr(index_module, "ROWS", 16)
    monkeypatch.setattr(index_module, "QUERIES", 8)


def vectors_of(rows: int, width: int = 6, seed: int = 0) -> np.ndarray:
    """Small integers, whose inner products are exact and often equal."""
    return np.random.default_rng(seed).integers(-2, 3, (rows, width)).astype(np.float32)


def brute_force(queries, vectors, count: int, excluded) -> tuple[list, list]:
    scores, rows = [], []
    for query, (begin, end) in zip(queries, excluded, strict=True):
        order = sorted(
            (row for row in range(len(vectors)) if not begin <= row < end),
            key=lambda row: (-float(query @ vectors[row]), row),
        )[:count]
        scores.append([float(query @ vectors[row]) for row in order])
        rows.append(order)
    return scores, rows


@pytest.mark.parametrize("rows", [11, 300])
def test_search_equals_brute_force_with_ties_and_excluded_rows(tmp_path, small_blocks, rows):
    vectors, queries = vectors_of(rows), vectors_of(21, seed=1)
    blocks = np.array_split(vectors, 4)
    index = Index.create(tmp_path, iter(blocks), "e", "c")
    random = np.random.default_rng(2)
    begins = random.integers(0, rows, 21)
    excluded = np.stack([begins, begins + random.integers(0, 4, 21)], axis=1)
    excluded[0], excluded[1] = (0, 0), (5, 2)  # nothing
    for count, ranges in ((5, None), (5, excluded), (rows, None)):
        scores, numbers = index.search(queries, count, ranges)
        ranges = np.zeros((21, 2), int) if ranges is None else ranges
        expected = brute_force(queries, vectors, count, ranges)
        assert numbers.tolist() == expected[1]
        assert scores.tolist() == expected[0]
    assert index.search(queries[:0], 5)[1].shape == (0, 5)


def test_another_encoder_or_corpus_is_refused(tmp_path):
    Index.create(tmp_path, [vectors_of(3)], "one", "two")
    assert len(Index.open(tmp_path, "one", "two").vectors) == 3
    with pytest.raises(ValueError, match=r"another encoder.*hash one.*here 1.*build the index"):
        Index.open(tmp_path, "1", "two")
    with pytest.raises(ValueError, match=r"another corpus.*hash two.*here 2.*build the index"):
        Index.open(tmp_path, "one", "2")


def test_a_folder_holds_one_whole_index_or_none(tmp_path):
    mapped = Index.create(tmp_path, [vectors_of(3)], "e", "c").vectors

    def broken():
        yield vectors_of(2)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        Index.create(tmp_path, broken(), "e", "c")
    with pytest.raises(ValueError, match=r"no index in .*build one first"):
        Index.open(tmp_path, "e", "c")
    Index.create(tmp_path, [vectors_of(4)], "e", "c")
    np.testing.assert_array_equal(mapped, vectors_of(3))  # who reads the old one goes on
    (tmp_path / VECTORS).write_bytes(b"0123")
    with pytest.raises(ValueError, match=r"4 bytes instead of 4 \* 4 rows \* 6.*damaged"):
        Index.open(tmp_path, "e", "c")
    for text in ("{", "{}", json.dumps({"encoder": 1, "corpus": "c", "rows": 4, "width": 6})):
        (tmp_path / DESCRIPTION).write_text(text)
        with pytest.raises(ValueError, match=r"index\.json is damaged"):
            Index.open(tmp_path, "e", "c")


def test_bad_vectors_and_queries_are_refused(tmp_path):
    for blocks, message in (
        ([], "the corpus is empty"),
        ([vectors_of(2), vectors_of(2, 5)], r"shape \[2, 5\] after 2 rows: .* \[n, 6\]"),
        ([vectors_of(2), [[np.nan] * 6]], "row 2 is not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            Index.create(tmp_path, blocks, "e", "c")
    index = Index.create(tmp_path, [vectors_of(4)], "e", "c")
    ranges = np.array([[0, 0], [1, 3]])
    for queries, count, excluded, message in (
        (vectors_of(2), 5, None, "count=5: the index has 4 rows: choose 1 to 4"),
        (vectors_of(2), 0, None, "count=0"),
        (vectors_of(2), 3, ranges, "has 2 rows without those excluded for 1: choose 1 to 2"),
        (vectors_of(2, 5), 1, None, r"shape \[2, 5\]: they must be \[Q, 6\]"),
        (vectors_of(3), 1, ranges, r"excluded of shape \[2, 2\]"),
        (np.full((2, 6), np.inf), 1, None, "not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            index.search(queries, count, excluded)
