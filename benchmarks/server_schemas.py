"""Replies of a server against JSON schemas: `python benchmarks/server_schemas.py [--seeds=4]`.

OpenAI's client asks a server of a tiny random model for replies of each schema in `SCHEMAS`: as
response_format and as the parameters of a required tool, in one piece and streamed, two replies a
request. Each reply that ended must validate, or the request is refused with 400 in one line before
anything is generated. The same for the Pydantic classes of `CLASSES`, which the client parses. The
table shows the number of replies, of replies that ended within the token limit, and of invalid
replies. The exit code is 1 if a reply is invalid or a status is neither 200 nor 400. Needs
maxmeg[serve,test].
"""

import argparse
import concurrent.futures
import datetime
import enum
import json
import sys
import tempfile
import typing
from collections import Counter
from pathlib import Path

import jsonschema
import openai
import pydantic

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from tiny_servers import make_run, serving

CHAT: typing.Any = [{"role": "user", "content": "?"}]
LIMIT, CONTEXT = 400, 4096  # tokens of a reply, and of the model
# A random model hardly ever ends a text: it prefers what closes one.
SAMPLING = {"temperature": 2.0, "logit_bias": {str(ord(sign)): 6 for sign in '"}],'}}
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
ROW = "{:<40} {:>7} {:>6} {:>7}  {}"


def obj(required=None, **properties) -> dict:
    """An object of these properties, all required unless `required` names others."""
    names = [*properties] if required is None else required
    made = {"type": "object", "properties": properties, "required": names}
    return made | {"additionalProperties": False}


def text(**limits) -> dict:
    return {"type": "string", "maxLength": 8} | limits


def array(items, **limits) -> dict:
    return {"type": "array", "items": items, "maxItems": 3} | limits


def nested(depth: int) -> dict:
    return obj(a=nested(depth - 1)) if depth else DIGIT


FLAG, NOTHING = {"type": "boolean"}, {"type": "null"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NODE = obj(v=DIGIT, children=array({"$ref": "#/$defs/Node"}, maxItems=1))
CELL = obj(head=FLAG, tail={"anyOf": [{"$ref": "#/$defs/Cell"}, NOTHING]})
A = obj(b={"anyOf": [{"$ref": "#/$defs/B"}, NOTHING]})
B = obj(a={"anyOf": [{"$ref": "#/$defs/A"}, FLAG]})
SCHEMAS = {
    "$ref and $defs": {"$defs": {"D": DIGIT}}
    | obj(a={"$ref": "#/$defs/D"}, b={"$ref": "#/$defs/D"}),
    "definitions": {"definitions": {"D": FLAG}} | obj(a={"$ref": "#/definitions/D"}),
    "recursive tree": {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"},
    "recursive list": {"$defs": {"Cell": CELL}} | obj(cell={"$ref": "#/$defs/Cell"}),
    "recursive root": obj(v=FLAG, next={"anyOf": [{"$ref": "#"}, NOTHING]}),
    "mutual recursion": {"$defs": {"A": A, "B": B}} | obj(x={"$ref": "#/$defs/A"}),
    "$ref with siblings": {"$defs": {"N": {"type": "integer", "minimum": 0}}}
    | obj(a={"$ref": "#/$defs/N", "maximum": 5}),
    "$anchor": {"$defs": {"N": {"$anchor": "n"} | FLAG}} | obj(a={"$ref": "#n"}),
    "missing $ref": obj(a={"$ref": "#/$defs/absent"}),
    "remote $ref": obj(a={"$ref": "https://example.com/schema.json"}),
    "enum": obj(a={"enum": ["red", 7, None, True, 1.5, "grün", [1], {"b": 2}]}),
    "enum with type": obj(a={"type": "string", "enum": ["x", "y"]}),
    "enum of other types": obj(a={"type": "integer", "enum": ["x", 3, 4.0]}),
    "empty enum": obj(a={"enum": []}),
    "const": obj(a={"const": "x"}, b={"const": {"c": [1, None]}}, c={"const": 0.5}),
    "anyOf": obj(a={"anyOf": [FLAG, DIGIT, text(), NOTHING]}),
    "anyOf of objects": {"type": "object", "anyOf": [obj(a=FLAG), obj(b=DIGIT)]},
    "anyOf with siblings": obj(
        a={"type": "integer", "minimum": 0, "anyOf": [{"maximum": 3}, {"maximum": 7}]}
    ),
    "allOf": obj(a={"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}),
    "allOf of objects": {
        "type": "object",
        "allOf": [
            {"properties": {"a": FLAG}, "required": ["a"]},
            {"properties": {"b": DIGIT}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    "oneOf apart": obj(a={"oneOf": [FLAG, DIGIT]}),
    "oneOf overlapping": obj(
        a={"oneOf": [DIGIT, {"type": "integer", "minimum": 5, "maximum": 20}]}
    ),
    "oneOf by const": {
        "type": "object",
        "oneOf": [obj(kind={"const": "a"}, x=FLAG), obj(kind={"const": "b"}, y=DIGIT)],
    },
    "not": obj(a={"type": "integer", "not": {"const": 3}}),
    "if then else": {
        "type": "object",
        "properties": {"a": FLAG, "b": DIGIT},
        "required": ["a"],
        "additionalProperties": False,
        "if": {"properties": {"a": {"const": True}}},
        "then": {"required": ["b"]},
    },
    "dependentRequired": {**obj([], a=FLAG, b=DIGIT), "dependentRequired": {"a": ["b"]}},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x_[a-c]$": DIGIT},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "patternProperties beside properties": {
        "type": "object",
        "properties": {"x_a": FLAG, "b": DIGIT},
        "patternProperties": {"^x_": {"type": "boolean"}},
        "required": ["x_a", "b"],
        "additionalProperties": False,
    },
    "propertyNames": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]$"},
        "additionalProperties": DIGIT,
        "maxProperties": 2,
    },
    "additionalProperties": {
        "type": "object",
        "properties": {"a": DIGIT},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
    },
    "additionalProperties true": {
        "type": "object",
        "properties": {"a": DIGIT},
        "required": ["a"],
        "additionalProperties": True,
    },
    "minProperties": {
        "type": "object",
        "additionalProperties": DIGIT,
        "minProperties": 2,
        "maxProperties": 3,
    },
    "optional properties": obj(["b"], a=FLAG, b=DIGIT, c=NOTHING, d=FLAG),
    "required without a property": {
        "type": "object",
        "properties": {"a": FLAG},
        "required": ["a", "z"],
    },
    "required and forbidden": {
        "type": "object",
        "properties": {"a": FLAG},
        "required": ["a", "z"],
        "additionalProperties": False,
    },
    "minItems and maxItems": obj(a=array(DIGIT, minItems=2, maxItems=3)),
    "minItems above maxItems": obj(a=array(DIGIT, minItems=4, maxItems=3)),
    "uniqueItems": obj(a=array(FLAG, minItems=2, maxItems=2, uniqueItems=True)),
    "prefixItems": obj(
        a={"type": "array", "prefixItems": [FLAG, DIGIT], "items": False, "minItems": 2}
    ),
    "contains": obj(a=array(DIGIT, minItems=1, contains={"const": 7})),
    "array of arrays": obj(a=array(array(array(FLAG, maxItems=1), maxItems=2), maxItems=2)),
    "lengths": obj(a=text(minLength=2, maxLength=4), b=text(minLength=0, maxLength=0)),
    "pattern": obj(a={"type": "string", "pattern": "^[a-z]{2}-\\d{3}$"}),
    "pattern without anchors": obj(a={"type": "string", "pattern": "[0-9]", "maxLength": 6}),
    "pattern and lengths": obj(
        a={"type": "string", "pattern": "^[ab]*$", "minLength": 3, "maxLength": 5}
    ),
    "pattern with lookahead": obj(a={"type": "string", "pattern": "^(?=.*a)[a-c]{3}$"}),
    "formats of time": obj(
        a={"type": "string", "format": "date"},
        b={"type": "string", "format": "time"},
        c={"type": "string", "format": "date-time"},
    ),
    "formats of names": obj(
        a={"type": "string", "format": "email"},
        b={"type": "string", "format": "uuid"},
        c={"type": "string", "format": "ipv4"},
    ),
    "format of another kind": obj(a={"type": "string", "format": "colour"}),
    "bounds": obj(
        a={"type": "integer", "minimum": -3, "maximum": 12},
        b={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    ),
    "bounds of numbers": obj(
        a={"type": "number", "minimum": 0.5, "maximum": 2.25},
        b={"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    ),
    "bounds that exclude each other": obj(a={"type": "integer", "minimum": 5, "maximum": 4}),
    "multipleOf": obj(a={"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 7}),
    "multipleOf a fraction": obj(
        a={"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25}
    ),
    "nullable": obj(
        a={"type": ["string", "null"], "maxLength": 4},
        b={"type": ["integer", "boolean"], "maximum": 9, "minimum": 0},
    ),
    "OpenAPI's nullable": obj(a={"type": "string", "maxLength": 4, "nullable": True}),
    "nested six deep": nested(6),
    "unicode names": obj(
        **{"größe": DIGIT, "名前": FLAG, 'a"b\\c': NOTHING, "😀": DIGIT, "tab\t": FLAG, "": FLAG}
    ),
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "empty schema": {},
    "an array": array(DIGIT, minItems=1),
    "a number": {"type": "number", "minimum": 0, "maximum": 1},
    "title, description, default, examples": {"title": "T", "description": "d"}
    | obj(a={**DIGIT, "default": 3, "examples": [1]}),
    "$schema and $id": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/a",
    }
    | obj(a=FLAG),
    "property false": {
        "type": "object",
        "properties": {"a": FLAG, "b": False},
        "required": ["a"],
        "additionalProperties": False,
    },
    "unknown type": obj(a={"type": "whole"}),
    "unknown keyword": obj(a={**FLAG, "x-mine": 1}),
    "type is a list of objects": obj(a={"type": [{"type": "string"}]}),
    "unevaluatedProperties": {
        "type": "object",
        "properties": {"a": FLAG},
        "required": ["a"],
        "unevaluatedProperties": False,
    },
    "large integers": obj(
        a={"type": "integer", "minimum": 9007199254740990, "maximum": 9007199254741000}
    ),
    "large enum": obj(a={"enum": [f"word{i}" for i in range(200)]}),
    "string content": obj(a={"type": "string", "contentEncoding": "base64", "maxLength": 8}),
    "minContains 2": obj(
        a=array(FLAG, minItems=2, maxItems=4, contains={"const": True}, minContains=2)
    ),
}


class Colour(enum.Enum):
    red = "red"
    green = "grün"


class Leaf(pydantic.BaseModel):
    kind: typing.Literal["leaf"]
    when: datetime.datetime
    day: datetime.date
    hour: datetime.time


class Branch(pydantic.BaseModel):
    kind: typing.Literal["branch"]
    left: "Leaf | Branch | None"
    colour: Colour


class Limits(pydantic.BaseModel):
    count: typing.Annotated[int, pydantic.Field(ge=0, le=9)]
    share: typing.Annotated[float, pydantic.Field(gt=0, lt=1)]
    code: typing.Annotated[str, pydantic.Field(pattern="^[A-Z]{2}[0-9]{2}$")]
    path: Path
    flags: typing.Annotated[list[bool], pydantic.Field(min_length=1, max_length=3)]
    note: str | None


CLASSES = (Leaf, Branch, Limits)


class Asked(typing.NamedTuple):
    """A kind of request: for a tool or a response_format, streamed or not."""

    is_tool: bool
    is_stream: bool

    def fields(self, schema: dict, seed: int) -> dict[str, typing.Any]:
        """Those of a request, in which tool_choice and parallel_tool_calls take turns."""
        fields = {"model": "tiny", "messages": CHAT, "n": 2, "seed": seed, "max_tokens": LIMIT}
        if not self.is_tool:
            wanted = {"name": "reply", "schema": schema, "strict": bool(seed % 2)}
            return fields | {"response_format": {"type": "json_schema", "json_schema": wanted}}
        function = {"name": "tool", "parameters": schema}
        named = {"type": "function", "function": {"name": "tool"}}
        fields |= {"tools": [{"type": "function", "function": function}]}
        fields |= {"tool_choice": named if seed % 2 else "required"}
        return fields | ({"parallel_tool_calls": False} if seed % 4 < 2 else {})

    def replies(self, client: openai.OpenAI, fields: dict) -> list[tuple[str, list[str]]]:
        """The finish_reason and the texts of JSON of each reply."""
        create: typing.Any = client.chat.completions.create
        if not self.is_stream:
            answer = create(**fields, **SAMPLING)
            return [
                (c.finish_reason, self.texts(c.message.content, c.message.tool_calls))
                for c in answer.choices
            ]
        contents: dict[int, str] = {}
        calls, reasons = {}, {}
        for chunk in create(**fields, **SAMPLING, stream=True):
            (choice,) = chunk.choices
            content = contents.get(choice.index, "") + (choice.delta.content or "")
            contents[choice.index] = content
            calls.setdefault(choice.index, []).extend(choice.delta.tool_calls or [])
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
        return [(reasons[i], self.texts(contents[i], calls[i])) for i in sorted(reasons)]

    def texts(self, content, calls) -> list[str]:
        return [call.function.arguments for call in calls or []] if self.is_tool else [content]


WAYS = [Asked(is_tool, is_stream) for is_tool in (False, True) for is_stream in (False, True)]


def judged(client: openai.OpenAI, schema: dict, way: Asked, seed: int) -> list[str]:
    """ "ended", "cut", or what is wrong with each reply; or the one refusal of the request."""
    try:
        replies = way.replies(client, way.fields(schema, seed))
    except openai.BadRequestError as error:
        message = str(error.body["message"])  # pyright: ignore
        return [f"refused: {message}" if "\n" not in message else f"wrong: lines of {message!r}"]
    except openai.APIError as error:
        return [f"wrong: {error}"]
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    found = []
    for reason, texts in replies:
        if reason == "length":
            found.append("cut")
            continue
        wrong = [text for text in texts if not is_valid(validator, text)]
        wrong += [] if texts and reason == ("tool_calls" if way.is_tool else "stop") else [reason]
        found.append(f"wrong: {way} {wrong}" if wrong else "ended")
    return found


def is_valid(validator, text: str) -> bool:
    def refused(name: str):
        raise ValueError(name)

    try:
        return validator.is_valid(json.loads(text, parse_constant=refused))
    except ValueError:
        return False


def parsed(client: openai.OpenAI, kind: type[pydantic.BaseModel], seed: int) -> list[str]:
    """ "ended", "cut" or "wrong: ..." of replies that the client parses, in both ways."""
    request: dict[str, typing.Any] = {"model": "tiny", "messages": CHAT, "seed": seed, "n": 2}
    request |= {"max_tokens": LIMIT} | SAMPLING
    tool = {"tools": [openai.pydantic_function_tool(kind)], "tool_choice": "required"}
    found = []
    ways: typing.Any = {"response_format": kind}, tool
    for fields in ways:
        for is_stream in (False, True):
            try:
                if is_stream:
                    with client.chat.completions.stream(**request, **fields) as stream:
                        answer = stream.get_final_completion()
                else:
                    answer = client.chat.completions.parse(**request, **fields)
            except openai.LengthFinishReasonError:
                found.append("cut")
                continue
            except (openai.APIError, ValueError) as error:
                found.append(f"wrong: {error}")
                continue
            for choice in answer.choices:
                calls = choice.message.tool_calls or []
                made = [choice.message.parsed, *(c.function.parsed_arguments for c in calls)]
                made = [each for each in made if each is not None]
                is_right = made and all(isinstance(each, kind) for each in made)
                found.append("ended" if is_right else f"wrong: {choice}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--only", default="", help="a part of the names of schemas")
    options = parser.parse_args()
    total = Counter()
    print(ROW.format("schema", "replies", "ended", "invalid", ""))
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(make_run(Path(folder), max_position=CONTEXT)) as server,
    ):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:

            def show(name: str, found: list[str]) -> None:
                kinds = Counter(each.partition(":")[0] for each in found)
                total.update(kinds)
                notes = sorted({each for each in found if each[:5] in ("wrong", "refus")})
                counts = kinds["ended"] + kinds["cut"], kinds["ended"], kinds["wrong"]
                print(ROW.format(name, *counts, "; ".join(notes)[:600]), flush=True)

            for name, schema in SCHEMAS.items():
                if options.only in name:
                    cases = [(way, seed) for way in WAYS for seed in range(options.seeds)]
                    jobs = [pool.submit(judged, client, schema, *case) for case in cases]
                    show(name, [each for job in jobs for each in job.result()])
            for kind in CLASSES:
                jobs = [pool.submit(parsed, client, kind, seed) for seed in range(options.seeds)]
                show(kind.__name__, [each for job in jobs for each in job.result()])
        health = server.ask("/health").status
    print(dict(total))
    sys.exit(bool(total["wrong"] or health != 200))


if __name__ == "__main__":
    main()
