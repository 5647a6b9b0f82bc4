"""Tokenizers behind one interface; `load_tokenizer(spec)` makes them.

A spec is `KIND:FILE`, or `KIND:FILE?NAME=VALUE&NAME=VALUE`. Text is never scanned for special
tokens, except where a tokenizer.json or a SentencePiece model asks for it itself: the end of a
document is added by the caller (`eod`), so text cannot forge it.

special_tokens=<image>,<|end|>  tokens behind the vocabulary, unless it has them; chats and
                                encode_placeholders find them in text, encode never
extra_ids=100                   T5's <extra_id_0>, <extra_id_1> ... likewise
eod= bos= pad= cls= sep= mask=  the name of the token with that role, also added
do_lower_case= strip_accents= tokenize_chinese_chars=   of wordpiece: true or false
pattern= num_special_tokens= vocab_size=                of tiktoken: Megatron-LM's
"""

import dataclasses
import difflib
import hashlib
import itertools
import json
import re
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from maxmeg.config.lazy import Lazy

_added = Lazy("maxmeg.data.added_tokens")
_vocabularies = Lazy("maxmeg.data.vocabularies")
_tiktoken = Lazy("maxmeg.data.tiktoken_ranks")

SENTINEL = "<extra_id_{}>"  # T5's


class Tokenizer(Protocol):
    """Text to ids and back.

    `spec` makes the same tokenizer in another process; `identity` is equal exactly when the
    vocabularies are, wherever their files lie. opening: what its own files put before a text.
    sentinels: T5's, by their number. special_ids: tokens that are no text. added: those of the
    spec's options, by name. model_size: ids without an end that had to be appended.
    """

    spec: str
    identity: str
    vocab_size: int
    model_size: int
    eod: int
    bos: int | None = None
    pad: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    unk: int | None = None
    opening: tuple[int, ...] = ()
    sentinels: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    added: Mapping[str, int] = {}

    def encode(self, text: str) -> np.ndarray:
        """Ids, int32, without special tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        return None

    def encode_marked(self, text: str, marks: Mapping[str, int]) -> np.ndarray:
        """Ids, where the names in `marks` are their ids and no text; the longest name wins."""
        parts = [np.zeros(0, np.int32)]
        for piece, is_mark in split_marks(text, marks):
            if is_mark:
                parts.append(np.array([marks[piece]], np.int32))
            else:
                parts.append(self.encode_after(piece) if len(parts) > 1 else self.encode(piece))
        return np.concatenate(parts)

    def decode_marked(self, ids: Iterable[int], names: Mapping[int, str]) -> str:
        """The text, with names for the ids that `names` has."""
        text, first = "", True
        for is_mark, group in itertools.groupby(map(int, ids), names.__contains__):
            run, decode = list(group), self.decode if first else self.decode_after
            text += "".join(names[i] for i in run) if is_mark else decode(run)
            first = False
        return text

    def encode_after(self, text: str) -> np.ndarray:
        """Ids of a text that follows a mark."""
        return self.encode(text)

    def decode_after(self, ids: list[int]) -> str:
        """The text of ids that follow a mark."""
        return self.decode(ids)


def split_marks(text: str, marks: Collection[str]) -> Iterable[tuple[str, bool]]:
    """The parts of a text and whether each is one of `marks`; empty ones are left out."""
    if not marks:
        return [(text, False)] if text else []
    longest_first = sorted(marks, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return [(part, number % 2 == 1) for number, part in enumerate(parts) if part]


def encode_placeholders(tokenizer: Tokenizer, text: str, names: Collection[str]) -> np.ndarray:
    """Ids of a text in which these names alone stand for their tokens, as `<image>` does."""
    return tokenizer.encode_marked(text, find_marks(tokenizer, names))


def find_marks(tokenizer: Tokenizer, names: Iterable[str]) -> dict[str, int]:
    """The tokens of names, for encode_marked; ValueError for a name that is no token."""
    marks = {}
    for name in names:
        found = tokenizer.token_id(name)
        if found is None:
            near = difflib.get_close_matches(name, tokenizer.added, 1, 0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"placeholder {name!r} is no token of {tokenizer.spec}: {hint}Add it with "
                "?special_tokens= after the tokenizer's file"
            )
        marks[name] = found
    return marks


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, and 256 for the end of a document."""

    spec = identity = "bytes"
    vocab_size = 257
    model_size = eod = 256
    special_ids = frozenset([256])

    def __init__(self, argument: str = "", options: Mapping[str, str] | None = None) -> None:
        if argument:
            raise ValueError(f"tokenizer 'bytes:{argument}': write 'bytes', it takes no argument")

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_spans(
        self, text: str, marks: Mapping[str, int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids, and the characters [begin, end) of the text that each stands for."""
        marks, place, spans = marks or {}, 0, [np.zeros((0, 2), np.int64)]
        for piece, is_mark in split_marks(text, marks):
            units = [piece] if is_mark else list(piece)
            counts = [1] if is_mark else [len(unit.encode("utf-8")) for unit in units]
            ends = place + np.cumsum([len(unit) for unit in units])
            begins = np.concatenate([[place], ends[:-1]])
            spans.append(np.repeat(np.stack([begins, ends], axis=1), counts, axis=0))
            place += len(piece)
        return self.encode_marked(text, marks), np.concatenate(spans)

    def decode(self, ids: Iterable[int]) -> str:
        ids = np.asarray(list(ids), np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode("utf-8", "replace")


class NullTokenizer(Tokenizer):
    """N ids written as numbers with spaces between; the last is the end of a document."""

    def __init__(self, argument: str, options: Mapping[str, str] | None = None) -> None:
        if not argument.isdecimal() or int(argument) < 1:
            raise ValueError(f"tokenizer 'null:{argument}': give a number of ids, like null:32000")
        self.vocab_size = self.model_size = int(argument)
        self.eod = self.vocab_size - 1
        self.spec = self.identity = f"null:{self.vocab_size}"

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = np.array([int(word) for word in text.split()], np.int64)
        except ValueError as error:
            raise ValueError(
                f"the null tokenizer reads numbers with spaces between: {error}"
            ) from None
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(
                f"ids from {ids.min()} to {ids.max()} are not in [0, {self.vocab_size}) of "
                f"{self.spec}"
            )
        return ids.astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


@dataclasses.dataclass(frozen=True)
class Kind:
    """argument: what stands after the colon; options: of this kind alone."""

    argument: str
    make: Callable[[str, Mapping[str, str]], Tokenizer]
    options: tuple[str, ...] = ()


ROLES = ("eod", "bos", "pad", "cls", "sep", "mask")
ADDING = ("special_tokens", "extra_ids", *ROLES)
KINDS = {
    "bytes": Kind("", ByteTokenizer),
    "null": Kind("N", NullTokenizer),
    "sentencepiece": Kind("FILE", lambda *given: _vocabularies.SentencePieceTokenizer(*given)),
    "huggingface": Kind("FILE", lambda *given: _vocabularies.HuggingFaceTokenizer(*given)),
    "gpt2": Kind("FOLDER", lambda *given: _vocabularies.Gpt2Tokenizer(*given)),
    "wordpiece": Kind(
        "FILE",
        lambda *given: _vocabularies.WordPieceTokenizer(*given),
        ("do_lower_case", "strip_accents", "tokenize_chinese_chars"),
    ),
    "tiktoken": Kind(
        "FILE",
        lambda *given: _tiktoken.TiktokenTokenizer(*given),
        ("pattern", "num_special_tokens", "vocab_size"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """A spec's parts; names of tokens in values are percent-encoded where they hold & or commas."""

    kind: str
    argument: str
    options: Mapping[str, str]

    @property
    def roles(self) -> dict[str, str]:
        """The names of tokens that have a role."""
        return {
            role: urllib.parse.unquote(self.options[role]) for role in ROLES if role in self.options
        }


def parse_spec(spec: str) -> Spec:
    """The parts of `KIND:ARGUMENT?NAME=VALUE&...`; a file with a ? in its name needs one at the
    end. ValueError for kinds and options that do not exist."""
    place, _, words = spec.rpartition("?") if "?" in spec else (spec, "", "")
    kind, _, argument = place.partition(":")
    if kind not in KINDS:
        hint = _near(kind, KINDS)
        raise ValueError(f"unknown tokenizer {spec!r}: {hint}Choose one of {', '.join(KINDS)}")
    if not argument and KINDS[kind].argument not in ("", "N"):
        raise ValueError(
            f"tokenizer {spec!r} needs its vocabulary: write {kind}:{KINDS[kind].argument}"
        )
    allowed = KINDS[kind].options + (ADDING if kind != "null" else ())
    options: dict[str, str] = {}
    for word in words.split("&") if words else ():
        name, equals, value = word.partition("=")
        if name not in allowed:
            raise ValueError(
                f"tokenizer {spec!r}: {kind} has no option {name!r}: {_near(name, allowed)}"
                f"Its options: {', '.join(allowed) or 'none'}"
            )
        if not equals or not value or name in options:
            raise ValueError(f"tokenizer {spec!r}: write {name}=VALUE, and only once")
        options[name] = value
    return Spec(kind, argument, options)


def load_tokenizer(spec: str) -> Tokenizer:
    """`bytes`, `null:N`, `sentencepiece:FILE`, `huggingface:FILE`, `gpt2:FOLDER`,
    `wordpiece:FILE`, `tiktoken:FILE`, with options as `?special_tokens=<image>,<|end|>`.

    ValueError for an unknown kind and for files that are missing or are not what the kind reads.
    """
    parts = parse_spec(spec)
    tokenizer = KINDS[parts.kind].make(parts.argument, parts.options)
    tokenizer.spec = spec
    if any(name in ADDING for name in parts.options):
        tokenizer = _added.extended(tokenizer, parts)
    return tokenizer


def read_vocabulary(kind: str, path: str) -> bytes:
    """What a file holds; ValueError where it is missing or empty."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"tokenizer {kind!r} cannot read {path}: {error.strerror}; check the path"
        ) from error
    if not data:
        raise ValueError(f"tokenizer {kind!r}: {path} is empty")
    return data


def identity_of(kind: str, *data: bytes) -> str:
    """Of the kind and all that decides its ids."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{kind}:{digest.hexdigest()[:16]}"


def find_sentinels(token_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """The ids of <extra_id_0>, <extra_id_1> ... as far as there are any."""
    found = map(token_id, map(SENTINEL.format, itertools.count()))
    return tuple(itertools.takewhile(lambda token: token is not None, found))  # pyright: ignore


def json_object(path: Path) -> dict[str, Any]:
    """What a file of settings holds; nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object of named settings")
    return found


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f"did you mean {near[0]!r}? " if near else ""
