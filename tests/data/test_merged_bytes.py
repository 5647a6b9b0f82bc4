"""tiktoken in the place of `tokenizers`: the same ids, or none."""

import json
import random

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from maxmeg.data import vocabularies
from maxmeg.data.corpus import source_files
from maxmeg.data.merged_bytes import byte_letters, merged_bytes
from maxmeg.data.tokenizers import load_tokenizer

LETTERS = list(byte_letters())
ODD = [*range(0x3000), *range(0x3000, 0xD800, 97), *range(0xE000, 0x110000, 97)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GPT-2's files of a vocabulary of 2,000, and the texts it was trained on."""
    texts = [path.read_text("utf-8", "replace") for path in source_files()[:40]]
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=2000, show_progress=False, special_tokens=["<|endoftext|>"],
            initial_alphabet=LETTERS,
        ),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("gpt2")
    model.model.save(str(path))
    return path


@pytest.fixture(scope="module")
def both(folder):
    slow = load_tokenizer(f"gpt2:{folder}")
    fast = merged_bytes(*(p.read_bytes() for p in (folder / "vocab.json", folder / "merges.txt")))
    assert fast is not None
    return lambda text: slow.encode(text).tolist(), fast.encode_ordinary


def test_every_kind_of_character_is_split_the_same(both):
    slow, fast = both
    for begin in range(0, len(ODD), 1000):
        odd = [chr(code) for code in ODD[begin : begin + 1000]]
        text = "".join(f"x{c}x 1{c}1 {c} {c}{c}'s{c} _{c}\n{c}\n" for c in odd)
        assert fast(text) == slow(text)


@given(st.text(st.sampled_from("ab'sSdtlver \n\t\r1२é東\u00a0\u2003\u0085\x1c_.-<|>"), max_size=40))
def test_texts_are_encoded_the_same(both, text):
    slow, fast = both
    assert fast(text) == slow(text)


@pytest.mark.parametrize("repeated", ["a", " ", ".", "é", " \n", "ab1", "'", "the "])
def test_runs_are_encoded_the_same(both, repeated):
    slow, fast = both
    assert fast(repeated * 5000) == slow(repeated * 5000)


@pytest.mark.parametrize("seed", range(20))
def test_lists_of_any_kind_give_the_same_ids_or_none(seed):
    """Merges of random pairs: few are what training makes, so most are refused."""
    source, found = random.Random(seed), 0
    for _ in range(30):
        tokens, pairs = list("abc"), []
        for _ in range(source.randrange(1, 7)):
            pair = (source.choice(tokens), source.choice(tokens))
            if "".join(pair) not in tokens:
                pairs.append(pair)
                tokens.append("".join(pair))
        ids = {token: i for i, token in enumerate([*LETTERS, *tokens[3:]])}
        merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs)
        fast = merged_bytes(json.dumps(ids).encode(), merges.encode())
        if fast is None:
            continue
        found += 1
        slow = tokenizers.Tokenizer(models.BPE(ids, pairs))
        for _ in range(60):
            text = "".join(source.choices("abc", k=source.randrange(1, 14)))
            assert fast.encode_ordinary(text) == slow.encode(text).ids
    assert found


@pytest.mark.parametrize(
    ("merges", "changes"),
    [
        ("b c\na b\nab c\n", {}),  # `abc` is never made: b c comes first
        ("a b\na b\n", {}),  # twice
        ("a b\nab c\n", {"ab": 999}),  # by id, ab comes after abc
        ("a b c\n", {}),
    ],
)
def test_lists_that_training_does_not_make_are_refused(merges, changes):
    ids = {token: i for i, token in enumerate([*LETTERS, "bc", "ab", "abc"])}
    assert merged_bytes(json.dumps(ids | changes).encode(), merges.encode()) is None
    few = {token: i for token, i in ids.items() if token != "a"}
    assert merged_bytes(json.dumps(few).encode(), b"") is None


def test_long_texts_are_encoded_by_it(folder, monkeypatch):
    monkeypatch.setattr(vocabularies, "FAST_AFTER", 1000)
    tokenizer = load_tokenizer(f"gpt2:{folder}")
    assert isinstance(tokenizer, vocabularies.Gpt2Tokenizer)
    text = source_files()[0].read_text("utf-8")[:900]
    before = tokenizer.encode(text)
    assert tokenizer._fast is None
    after = tokenizer.encode(text)
    assert tokenizer._fast is not None and after.dtype == np.int32
    assert np.array_equal(before, after) and tokenizer.decode(after) == text
