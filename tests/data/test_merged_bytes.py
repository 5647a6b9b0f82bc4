"""tiktoken in the place of `tokenizers`: the same ids, or none."""

import json
import random
import unicodedata

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from maxmeg.data.prepare.standard_library import source_files
from maxmeg.data.tokenizers import vocabularies
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.merged_bytes import (
    DIGITS,
    GPT2,
    PATTERNS,
    byte_letters,
    merged_bytes,
    needs_library,
    of_gpt2,
    of_tokenizer_json,
)

LETTERS = list(byte_letters())
ODD = [*range(0x2100), *range(0x2100, 0xD800, 97), *range(0xE000, 0x110000, 397)]
ODD = [code for code in ODD if unicodedata.category(chr(code)) != "Cn"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GPT-2's files of a vocabulary of 1,000."""
    texts = [path.read_text("utf-8", "replace") for path in source_files()[:20]]
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1000, show_progress=False, special_tokens=["<|endoftext|>"],
            initial_alphabet=LETTERS,
        ),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("gpt2")
    model.model.save(str(path))
    return path


def splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pattern == GPT2:
        return by_words
    if pattern == DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, plain])


def library_tokenizer(folder, pattern: str) -> tokenizers.Tokenizer:
    names = [str(folder / name) for name in ("vocab.json", "merges.txt")]
    model = tokenizers.Tokenizer(models.BPE.from_file(*names))
    model.pre_tokenizer = splitter(pattern)
    return model


@pytest.fixture(scope="module", params=list(PATTERNS))
def both(request, folder):
    """The library's encoding and the fast one, of a tokenizer.json with every way to split."""
    model = library_tokenizer(folder, request.param)
    fast = of_tokenizer_json(model.to_str().encode())
    assert fast is not None
    return lambda text: model.encode(text).ids, fast


def test_every_kind_of_character_is_split_the_same(both):
    slow, fast = both
    for begin in range(0, len(ODD), 1000):
        odd = [chr(code) for code in ODD[begin : begin + 1000]]
        text = "".join(f"x{c}x 1{c}1 {c} {c}{c}'s{c} '{c} _{c}\n{c}\n'l{c} {c}\t" for c in odd)
        assert fast(text) == slow(text)


@given(
    st.text(
        st.sampled_from("ab'sSdtlver \n\r\t1२é東\u00a0\u2003\u0085\x1c_.-<|>\u017f"), max_size=40
    )
)
def test_texts_are_encoded_the_same(both, text):
    slow, fast = both
    assert fast(text) == slow(text)


def test_texts_that_only_the_library_knows_are_left_to_it(folder):
    model = library_tokenizer(folder, GPT2)
    model.normalizer = tokenizers.normalizers.NFC()
    model.add_special_tokens(["<|user|>"])
    model.add_tokens([tokenizers.AddedToken("e\u0301t", normalized=True)])
    fast = of_tokenizer_json(model.to_str().encode())
    assert fast is not None
    for text in ("a <|user|> b", "\u00e9t", "e\u0301t", "a\u0378"):
        assert fast(text) is None
    for text in ("a <|use|> b", "\u00e9", "e\u0301", "\u1e9b\u0323"):
        assert fast(text) == model.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "changed",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"model": {"dropout": 0.1}},
        {"model": {"byte_fallback": True}},
        {"model": {"type": "WordPiece"}},
        {"model": {"ignore_merges": True}},  # and <|endoftext|> in the vocabulary
    ],
)
def test_other_tokenizers_are_refused(folder, changed):
    settings = json.loads(library_tokenizer(folder, GPT2).to_str())
    for name, value in changed.items():
        settings[name] = settings[name] | value if name == "model" else value
    assert of_tokenizer_json(json.dumps(settings).encode()) is None


@pytest.mark.parametrize("byte", [0x2D, 0x80, 0xC1, 0xC2, 0xE0, 0xF0, 0xF4, None])
def test_bytes_that_are_no_token_are_told_by_their_characters(byte):
    letters = byte_letters()
    actual = needs_library(letter for letter in letters if letters[letter] != byte)
    if byte == 0x80:
        assert actual is None
        return
    assert actual is not None and actual[0x378]  # no version of Unicode has this one
    for code in ODD:
        assert actual[code] == (byte in chr(code).encode("utf-8") if byte else False)


@pytest.mark.parametrize("seed", range(8))
def test_lists_of_any_kind_give_the_same_ids_or_none(seed):
    """Merges of random pairs: few are what training makes, so most are refused."""
    source, actual = random.Random(seed), 0
    for _ in range(30):
        tokens, pairs = list("abc"), []
        for _ in range(source.randrange(1, 7)):
            pair = (source.choice(tokens), source.choice(tokens))
            if "".join(pair) not in tokens:
                pairs.append(pair)
                tokens.append("".join(pair))
        ids = {token: i for i, token in enumerate([*LETTERS, *tokens[3:]])}
        whole = source.random() < 0.5
        fast = merged_bytes(ids, pairs, GPT2, whole)
        if fast is None:
            continue
        actual += 1
        slow = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=whole))
        for _ in range(60):
            text = "".join(source.choices("abc", k=source.randrange(1, 14)))
            assert fast.encode_ordinary(text) == slow.encode(text).ids
    assert actual


@pytest.mark.parametrize(
    ("merges", "changes", "is_known"),
    [
        ("#version: 0.2\na b\nab c\n", {}, True),
        ("b c\na b\nab c\n", {}, False),  # `abc` is never made: b c comes first
        ("a b\nab c\n", {"ab": 999}, False),  # by id, ab comes after abc
        ("a b c\n", {}, False),
        ("", {LETTERS[-1]: None}, False),  # no token of the byte 0xAD
    ],
)
def test_lists_that_training_does_not_make_are_refused(merges, changes, is_known):
    ids = {token: i for i, token in enumerate([*LETTERS, "ab", "bc", "abc"])} | changes
    vocabulary = {token: i for token, i in ids.items() if i is not None}
    actual = of_gpt2(json.dumps(vocabulary).encode(), merges.encode())
    assert (actual is not None) == is_known


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
