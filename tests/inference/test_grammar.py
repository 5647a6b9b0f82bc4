"""Replies of random models that follow a grammar, and grammars that are refused."""

import functools
import json
import re

import jsonschema
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.engine import Engine
from maxmeg.inference.grammar import Grammars
from maxmeg.inference.load import Trained
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling

HOT = Sampling(temperature=2.0)


@functools.cache
def engine() -> Engine:
    # A vocabulary of whole words of 32 bits, unlike that of test_engine.py.
    config = tiny({"vocab_size": 288, "max_position": 1024, "init_std": 0.3}, fsdp=1)
    mesh = mesh_of(config)
    model = tiny_state(config, mesh)[2].model
    return Engine(Trained(model, config, load_tokenizer("bytes"), 0, mesh), lanes=16, chunk=32)


def schema(rng: np.random.Generator, depth: int = 0) -> dict:
    """A random JSON schema whose texts are all short."""
    kinds = ["integer", "boolean", "null", "string", "enum", "const", "number"]
    kinds += ["object", "array", "anyOf"] * (depth < 2)
    match kind := str(rng.choice(kinds)):
        case "integer" | "number":
            return {"type": kind, "minimum": -9, "maximum": 99}
        case "string":
            return {"type": "string", "pattern": "^[a-z]{1,4}$"}
        case "enum":
            return {"enum": ["red", 7, None, "grün"]}
        case "const":
            return {"const": "x"}
        case "array":
            return {"type": "array", "items": schema(rng, depth + 1), "maxItems": 2}
        case "anyOf":
            return {"anyOf": [schema(rng, depth + 1) for _ in range(2)]}
        case "object":
            names = ["a", "bc", "d"][: rng.integers(1, 4)]
            properties = {name: schema(rng, depth + 1) for name in names}
            required = names[: rng.integers(0, len(names) + 1)]
            rest = {"required": required, "additionalProperties": False}
            return {"type": "object", "properties": properties, **rest}
    return {"type": kind}


def test_replies_follow_their_schema():
    """Of a random model, at a high temperature: 50 schemas, and other requests beside them."""
    served, rng = engine(), np.random.default_rng(0)
    schemas = [schema(rng) for _ in range(50)]
    grammars = [served.grammars.compile("json_schema", json.dumps(one)) for one in schemas]
    replies = [
        served.submit(np.arange(i % 5 + 1), Request(600, HOT, served.ends, grammar=grammar), i)
        for i, grammar in enumerate(grammars)
    ]
    while served.step():
        pass
    for reply, one in zip(replies, schemas, strict=True):
        assert reply.reason == "stop", (one, reply.text)
        jsonschema.validate(json.loads(reply.text), one)
    assert served.programs.compiled() == 2


def test_regular_expressions_and_lark():
    served = engine()
    for kind, text in (("regex", "a[bc]{2}d"), ("lark", 'start: "a" ("b" | "c") ("b" | "c") "d"')):
        grammar = served.grammars.compile(kind, text)
        for reply in served.generate([np.arange(3)] * 4, Request(9, HOT, grammar=grammar)):
            assert re.fullmatch("a[bc]{2}d", reply.text) and reply.reason == "stop"
    some = served.grammars.compile("json_object")
    reply = served.generate([np.arange(3)], Request(40, HOT, served.ends, grammar=some))[0]
    assert reply.text.startswith("{")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "a(b", "the regex cannot be followed: (?s:.*)unclosed group"),
        ("lark", "start: other", "the lark cannot be followed"),
        ("json_schema", "{", "the JSON schema is not JSON"),
        ("json_schema", '{"type": "whole"}', "the json_schema cannot be followed: .*whole"),
        ("json_schema", '{"not": {"type": "string"}}', "the json_schema cannot be followed: .*not"),
        ("xml", "", "'xml' is not a valid Kind"),
    ],
)
def test_wrong_grammars_are_refused(kind, text, message):
    with pytest.raises(ValueError, match=message):
        engine().grammars.compile(kind, text)


def test_a_tokenizer_without_bytes_has_no_grammars():
    with pytest.raises(ValueError, match="ids do not determine the bytes"):
        Grammars(load_tokenizer("null:100"), 100, (99,))
