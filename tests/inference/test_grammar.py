"""Texts that follow a grammar, written by random choices among the tokens that it allows."""

import contextlib
import dataclasses
import json
import re

import jsonschema
import numpy as np
import pytest
from tokenizer_files import decoding_kinds

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.grammar import Grammar, Grammars

TOKENIZER = load_tokenizer("bytes")
MOST = 600  # tokens of a text


WORD = {"type": "string", "pattern": "^[a-z]{1,4}$"}
NUMBER = {"type": "integer", "minimum": -9, "maximum": 99}
OBJECT = {
    "type": "object",
    "properties": {"a": NUMBER, "bc": {"enum": ["red", 7, None, "grün"]}, "d": {"const": "x"}},
    "required": ["bc"],
    "additionalProperties": False,
}
SCHEMAS = [
    {"type": "array", "items": OBJECT, "maxItems": 2},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"type": "number", "maximum": 9}, OBJECT]},
    {**OBJECT, "properties": {"bc": {"type": "array", "items": WORD, "maxItems": 2}, "d": OBJECT}},
]


TEXTS = [  # and whether they may be written
    ({"format": "date"}, '"2000-02-29"', True),
    ({"format": "date"}, '"1900-02-29"', False),
    ({"format": "date"}, '"0000-01-01"', False),
    ({"format": "date-time", "pattern": "^2"}, '"2024-02-29T23:59:59.5+01:00"', True),
    ({"format": "date-time", "pattern": "^2"}, '"2024-02-29T23:59:60Z"', False),
    ({"format": "time"}, '"23:59:60Z"', False),
    ({"format": "file-path"}, '"a/b"', True),
    ({"properties": {"a": {"type": "null"}}}, '{"\\u0061": 3}', False),
    ({"const": "\1"}, '"\\u0001"', True),
    ({"minProperties": 2, "required": ["a"]}, '{"a": 1, "b": 2}', True),
]


def grammars(vocab_size: int) -> Grammars:
    return Grammars(TOKENIZER, vocab_size, (TOKENIZER.eod,))


def random_text(
    grammar: Grammar, vocab_size: int, rng: np.random.Generator, tokenizer: Tokenizer = TOKENIZER
) -> str:
    """A text that ends, at latest after MOST tokens, where its grammar is complete."""
    matcher, ids = grammar.matcher(), []
    for _ in range(MOST):
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        (allowed,) = np.nonzero(bits)
        assert len(allowed) and allowed.max() < vocab_size
        ids.append(int(rng.choice(allowed)))
        if matcher.add(ids[-1]):
            return tokenizer.decode([i for i in ids if i != tokenizer.eod])
    raise AssertionError(f"it does not end: {tokenizer.decode(ids)}")


def test_any_tokenizer_follows_a_text_that_is_forced(tmp_path):
    """One that puts a space before a text, and a text that names a token without a row."""
    for spec in decoding_kinds(tmp_path).values():
        tokenizer, made = load_tokenizer(spec), contextlib.nullcontext()
        if tokenizer.token_bytes() is None:
            made = pytest.raises(ValueError, match="ids do not determine the bytes")
        size = tokenizer.required_size
        assert size == tokenizer.eod + 1 == tokenizer.vocab_size - 1  # without <s>
        with made:
            grammar = Grammars(tokenizer, size, (tokenizer.eod,)).compile("regex", "a  <s>é[^ ]")
            text = random_text(grammar, size, np.random.default_rng(0), tokenizer)
            assert re.fullmatch("a  <s>é[^ ]", text), spec


@pytest.mark.parametrize("vocab_size", [257, 288])  # 288: whole words of 32 bits
def test_texts_follow_their_schema(vocab_size):
    rng = np.random.default_rng(0)
    for one in SCHEMAS * 8:
        grammar = grammars(vocab_size).compile("json_schema", json.dumps(one))
        jsonschema.validate(json.loads(random_text(grammar, vocab_size, rng)), one)


@pytest.mark.parametrize(("schema", "text", "is_valid"), TEXTS)
def test_schemas_are_followed_to_the_letter(schema, text, is_valid):
    tokens = [*text.encode(), TOKENIZER.eod]
    start = grammars(257).compile("json_schema", json.dumps(schema)).start
    assert (start.validate_tokens(tokens) == len(tokens)) == is_valid


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "a(b", "the regex cannot be followed: (?s:.*)unclosed group"),
        ("lark", "start: other", "the lark cannot be followed"),
        ("json_schema", "{", "the JSON schema is not JSON"),
        ("json_schema", '{"type": "whole"}', "the json_schema cannot be followed: .*whole"),
    ],
)
def test_wrong_grammars_are_refused(kind, text, message):
    with pytest.raises(ValueError, match=message):
        grammars(257).compile(kind, text)


def test_a_grammar_that_takes_long_is_given_up():
    """Each further token of this one has more readings, and takes longer."""
    grammar = grammars(257).compile("lark", 'start: s\ns: s s s s | "a" | "aa" | "aaa" |')
    matcher = dataclasses.replace(grammar, seconds=0.05).matcher()
    with pytest.raises(ValueError, match=r"it has taken more than 0\.05 s for this reply"):
        for _ in range(10_000):
            matcher.mask()
            matcher.add(ord("a"))
