"""Samples of biencoders: blocks as Megatron-LM makes them, pairs from files, what is refused."""

import itertools
import json
import pickle

import numpy as np
import pytest
from masked_corpus import CLS, LENGTHS, SEP, SIZE, corpus

from maxmeg.config.data import DataConfig, Objective
from maxmeg.data.build import build_dataset
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.masked.sentences import Mersenne64, SentenceOrder
from maxmeg.data.retrieval.ict import IctDataset
from maxmeg.data.retrieval.pairs import PairDataset
from maxmeg.data.retrieval.rows import Lengths, TextEncoder
from maxmeg.data.tokenizers.load import load_tokenizer

ENCODER = TextEncoder(CLS, SEP, SIZE)
TITLES = (2, 0, 5, 1)  # tokens of the title of each document


def blocks_of_megatron(bounds, sizes, titles, longest: int, seed: int, asked: int) -> list[tuple]:
    """`build_blocks_mapping`, sentence by sentence: (first, end, document) of each sample."""
    rows: list[tuple] = []
    while len(rows) < asked:
        for document in range(len(bounds) - 1):
            first, last = bounds[document], bounds[document + 1]
            remain, length, count, begin = last - first, 0, 0, first
            if remain < 2 or max(sizes[first:last]) > 512:
                continue
            for sentence in range(first, last):
                length, count, remain = length + sizes[sentence], count + 1, remain - 1
                is_full = length >= longest - titles[document] and remain >= 2 and count >= 2
                if is_full or remain == 0:
                    rows.append((begin, sentence + 1, document))
                    begin, length, count = sentence + 1, 0, 0
    random = Mersenne64(seed + 1)
    for i in range(len(rows) - 1, 0, -1):
        j = int(random.draw(1)[0]) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows


def written(folder, name: str, documents) -> IndexedDataset:
    """A corpus of documents of sentences of these numbers of tokens."""
    with IndexedWriter(str(folder / name), SIZE) as writer:
        at = 0
        for lengths in documents:
            tokens = 6 + np.arange(at, at + sum(lengths)) % 48
            writer.add_document(tokens, lengths)
            at += sum(lengths)
    return IndexedDataset(str(folder / name))


@pytest.fixture(scope="module")
def titles(tmp_path_factory) -> IndexedDataset:
    return written(tmp_path_factory.mktemp("titles"), "titles", [[n] for n in TITLES])


@pytest.mark.parametrize("has_titles", [True, False])
def test_blocks_equal_those_of_megatron(tmp_path, has_titles):
    random = np.random.default_rng(3)
    sizes = [random.integers(0, 30, n).tolist() for n in random.integers(0, 25, 80)]
    sizes[7], sizes[9] = [4, 513, 6], [600]
    data = written(tmp_path, "text", sizes)
    heads = random.integers(0, 9, 80).tolist() if has_titles else [0] * 80
    named = written(tmp_path, "titles", [[n] for n in heads]) if has_titles else None
    order = SentenceOrder(1234, 300)
    ours = IctDataset(data, ("1,0,0", 0), Lengths(90, 30, 60), ENCODER, named, order=order)
    bounds = data.document_indices.tolist()
    wanted = blocks_of_megatron(bounds, data.lengths.tolist(), heads, 57, 1234, 300)
    assert ours.rows.tolist() == [list(row) for row in wanted]


@pytest.mark.parametrize("has_titles", [True, False])
def test_a_sample_is_a_sentence_and_its_block(tmp_path, titles, has_titles):
    """As Megatron-LM's dataset builds it, with the draws of a generator of each sample."""
    data, named = corpus(tmp_path), titles if has_titles else None
    lengths = Lengths(24, 8, 16)
    part, order = ("1,0,0", 0), SentenceOrder(5)
    ours = IctDataset(data, part, lengths, ENCODER, named, 0.3, order)
    numbers = np.arange(3 * len(ours.rows))
    batch = ours.batch(numbers)
    kept = []
    for row, n in enumerate(numbers.tolist()):
        first, end, document = ours.rows[n % len(ours.rows)].tolist()
        block = [data.get(i).tolist() for i in range(first, end)]
        random = np.random.RandomState(5 + n)
        chosen = random.randint(0, len(block))
        kept.append(random.random() < 0.3)
        query = block[chosen] if kept[-1] else block.pop(chosen)
        title = named.get(document).tolist() if named else None
        opening = [CLS, *title, SEP] if title is not None else [CLS]
        text = [*itertools.chain(*block)][: 16 - len(opening) - 1]
        parts = [[CLS, *query[:6], SEP], [*opening, *text, SEP]]
        whole, rest = [*itertools.chain(*parts)], 24 - sum(map(len, parts))
        assert batch["tokens"][row].tolist() == whole + [0] * rest
        numbers_of = [1] * len(parts[0]) + [2] * len(parts[1]) + [0] * rest
        assert batch["segment_ids"][row].tolist() == numbers_of
        positions = [*range(len(parts[0])), *range(len(parts[1]))] + [0] * rest
        assert batch["positions"][row].tolist() == positions
    assert {True, False} == set(kept)
    assert batch["loss_mask"].sum(axis=1).tolist() == [1] * len(numbers)
    assert (batch["loss_mask"][:, 0] == 1).all() and batch["has_text_0"].all()
    again = pickle.loads(pickle.dumps(ours)).batch(numbers[5:7])
    assert all((again[name] == values[5:7]).all() for name, values in batch.items())


def test_bad_corpora_are_refused(tmp_path, titles):
    lengths = Lengths(24, 8, 16)
    single = written(tmp_path, "single", [[3], [4]])
    with pytest.raises(ValueError, match=r"no document of 2 has 2 sentences.*--split_sentences"):
        IctDataset(single, ("1,0,0", 0), lengths, ENCODER)
    with pytest.raises(ValueError, match=r"leaves none of 2 documents .* for split 1"):
        IctDataset(single, ("1,0,0", 1), lengths, ENCODER)
    with pytest.raises(ValueError, match=r"has 4 titles for 2 documents.*one for each"):
        IctDataset(single, ("1,0,0", 0), lengths, ENCODER, titles)
    data = corpus(tmp_path)
    small = IctDataset(data, ("1,0,0", 0), lengths, TextEncoder(CLS, SEP, 20))
    with pytest.raises(ValueError, match=r"sentences\.bin"):
        small.batch(np.arange(4))
    with pytest.raises(ValueError, match=r"no class or separator token.*BERT's kind"):
        TextEncoder.of(load_tokenizer("bytes"))
    assert len(LENGTHS) == len(data)


@pytest.fixture
def vocabulary(tmp_path) -> str:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijkl"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    return f"wordpiece:{tmp_path}/vocab.txt"


def opened(tmp_path, vocabulary: str, rows, index: int = 0, **values) -> PairDataset | None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    fields = {"objective": Objective.retrieve, "sequence_length": 24, "query_length": 6}
    config = DataConfig(**fields | {"split": "1,0,0", "tokenizer": vocabulary} | values)
    tokenizer = load_tokenizer(vocabulary)
    return build_dataset(config, [str(path)], tokenizer, index, seed=7)  # type: ignore


def test_pairs_and_hard_negatives_are_read(tmp_path, vocabulary):
    long = " ".join("abcdefghijkl")
    rows = [
        {"query": "a b", "text": "c d", "negatives": ["e", {"title": "f", "text": "g"}, "h"]},
        {"query": long, "text": {"title": "k", "text": long}},
    ]
    data = opened(tmp_path, vocabulary, rows, negatives=1)
    assert data is not None and (data.samples_per_epoch, data.sequence_length) == (2, 24)
    batch = data.batch(np.arange(40))
    names, seen = ["[PAD]", "?", "[", "]", "?", *"abcdefghijkl"], set()
    for tokens, flag in zip(batch["tokens"], batch["has_text_1"], strict=True):
        text = "".join(names[token] for token in tokens.tolist() if token)
        seen.add((text, int(flag)))
    first = "[ab][cd]"
    assert seen == {
        *((first + negative, 1) for negative in ("[e]", "[f]g]", "[h]")),
        ("[abcd][k]abcde]", 0),
    }
    assert batch["has_text_0"].all()
    again = data.batch(np.array([11, 5]))
    assert all((again[name] == values[[11, 5]]).all() for name, values in batch.items())


def test_dpr_files_are_read(tmp_path, vocabulary):
    row = {
        "question": "a",
        "positive_ctxs": [{"title": "b", "text": "c"}],
        "hard_negative_ctxs": [],
    }
    columns = ("question", "positive_ctxs", "hard_negative_ctxs")
    data = opened(tmp_path, vocabulary, [row], columns=columns)
    assert data is not None
    assert [each.tolist() for each in data.examples[0]] == [[2, 5, 3], [2, 6, 3, 7, 3]]
    assert opened(tmp_path, vocabulary, [row], 1, columns=columns) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, r"line 1: query must be a str, and is missing; it has text"),
        ({"query": " ", "text": "a"}, "query is empty"),
        ({"query": "a", "text": ""}, "text must be texts, or objects"),
        ({"query": "a", "text": []}, "text is empty"),
        ({"query": "a", "text": "b", "negatives": [3]}, "negatives must be texts, or objects"),
        ({"query": "a", "text": "b", "negatives": "c"}, "negatives must be a list"),
    ],
)
def test_bad_rows_are_refused(tmp_path, vocabulary, row, message):
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, vocabulary, [row])
