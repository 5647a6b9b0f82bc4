"""The interface of tokenizers, and functions that several kinds use."""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import re
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from maxmeg.config.hints import hub_command

SENTINEL = "<extra_id_{}>"  # the name of T5's sentinels
ROLES = ("eod", "bos", "pad", "cls", "sep", "mask")


class Tokenizer(Protocol):
    """Text to token ids and back.

    `spec` loads the same tokenizer in another process. `identity` is equal exactly for equal
    vocabularies, wherever their files are. opening: ids that the tokenizer's own files put before a
    text. special_ids: ids that do not stand for text. added: ids by name of the tokens that the
    spec's options add. model_size: the number of ids without an end-of-document id that had to be
    appended. required_size: the number of ids that a model must have. Ids from there to vocab_size
    are added tokens such as Gemma 3's <image_soft_token>, for which its text models have no row:
    text becomes such an id as in transformers, and a model without the row refuses it.
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
    special_ids: frozenset[int] = frozenset()
    added: Mapping[str, int] = {}

    @property
    def required_size(self) -> int:
        return self.vocab_size

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int32, without special tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD."""
        ...

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name in the vocabulary; None if there is none."""
        return None

    @functools.cached_property
    def sentinels(self) -> tuple[int, ...]:
        """The ids of <extra_id_0>, <extra_id_1>, ... up to the first that is missing."""
        ids = map(self.token_id, map(SENTINEL.format, itertools.count()))
        return tuple(itertools.takewhile(lambda token: token is not None, ids))  # pyright: ignore

    def token_bytes(self) -> dict[int, bytes] | None:
        """The bytes of each id's text, without special tokens; None if ids do not determine them.

        They are the bytes that the id is decoded to inside a text. The bytes of a text's ids are
        those of the text as the vocabulary represents it: after normalization, including a space
        that is put before the text.
        """
        return None

    @functools.cached_property
    def known_bytes(self) -> Mapping[int, bytes]:
        """`token_bytes`, which is made once; empty where it is None."""
        return self.token_bytes() or {}

    def byte_lengths(self) -> np.ndarray | None:
        """Number of bytes of each id's text, int32 [vocab_size], 0 for special tokens; None as
        `token_bytes`."""
        token_bytes = self.token_bytes()
        if token_bytes is None:
            return None
        return np.array([len(token_bytes.get(i, b"")) for i in range(self.vocab_size)], np.int32)

    def encode_marked(self, text: str, marks: Mapping[str, int]) -> np.ndarray:
        """Token ids of a text in which the names in `marks` stand for their ids; the longest
        name wins."""
        parts = [np.zeros(0, np.int32)]
        for piece, is_mark in split_marks(text, marks):
            if is_mark:
                parts.append(np.array([marks[piece]], np.int32))
            else:
                parts.append(self.encode_after(piece) if len(parts) > 1 else self.encode(piece))
        return np.concatenate(parts)

    def decode_marked(self, ids: Iterable[int], names: Mapping[int, str]) -> str:
        """The text of token ids, in which the ids in `names` become their names."""
        text, first = "", True
        for is_mark, group in itertools.groupby(map(int, ids), names.__contains__):
            run, decode = list(group), self.decode if first else self.decode_after
            text += "".join(names[i] for i in run) if is_mark else decode(run)
            first = False
        return text

    def encode_spans(
        self, text: str, marks: Mapping[str, int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids as from `encode_marked`, and the characters [begin, end) of each, int64 [ids, 2]."""
        raise NotImplementedError(
            f"tokenizer {self.spec!r} does not say where its tokens are in a text, which chats "
            "and preferences need: use huggingface:FILE, wordpiece:FILE or bytes"
        )

    def encode_after(self, text: str) -> np.ndarray:
        """Token ids of a text that follows a mark."""
        return self.encode(text)

    def decode_after(self, ids: list[int]) -> str:
        """The text of token ids that follow a mark."""
        return self.decode(ids)


def padding_of(tokenizer: Tokenizer, vocab_size: int) -> int:
    """The token that fills up rows: the end of a document if the model has no row for padding."""
    pad = tokenizer.pad
    return tokenizer.eod if pad is None or pad >= vocab_size else pad


def special_name(tokenizer: Tokenizer, token: int) -> str:
    """The name of a special token in texts; "" if it has none."""
    names = {i: name for name, i in tokenizer.added.items()}
    return names.get(token) or tokenizer.decode([token])


def missing_rows(tokenizer: Tokenizer, num_rows: int) -> tuple[str, ...]:
    """A note on the added tokens for which a model has no row; ValueError where other tokens have
    none."""
    end, count = tokenizer.eod, tokenizer.required_size
    if count > num_rows:
        name = repr(tokenizer.decode([end])) if end < tokenizer.model_size else "appended"
        remedy = "name its eos_token in tokenizer_config.json, or " * (end >= num_rows)
        raise ValueError(
            f"tokenizer {tokenizer.spec} needs {count} rows with the end of a document ({name}, "
            f"id {end}), the model has {num_rows}: {remedy}choose the model's own tokenizer with "
            "--tokenizer"
        )
    names = [tokenizer.decode([i]) for i in range(num_rows, tokenizer.vocab_size)]
    examples = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
    note = f"the model has no row for {len(names)} added tokens of the tokenizer ({examples}): "
    return (f"{note}a text with one of them is an error",) * bool(names)


def without(special: Collection[int], token_bytes: Mapping[int, bytes]) -> dict[int, bytes]:
    """The bytes of ids that are not special."""
    return {i: text for i, text in token_bytes.items() if i not in special}


def split_marks(text: str, marks: Collection[str]) -> Iterable[tuple[str, bool]]:
    """The parts of a text, and whether each is one of `marks`; empty parts are left out."""
    if not marks:
        return [(text, False)] if text else []
    longest_first = sorted(marks, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return [(part, number % 2 == 1) for number, part in enumerate(parts) if part]


def encode_placeholders(tokenizer: Tokenizer, text: str, names: Collection[str]) -> np.ndarray:
    """Token ids of a text in which only these names, such as `<image>`, stand for special
    tokens."""
    return tokenizer.encode_marked(text, find_marks(tokenizer, names))


def find_marks(tokenizer: Tokenizer, names: Iterable[str]) -> dict[str, int]:
    """The ids of names, for encode_marked; ValueError for a name that is not a token."""
    marks = {}
    for name in names:
        token = tokenizer.token_id(name)
        if token is None:
            matches = difflib.get_close_matches(name, tokenizer.added, 1, 0.5)
            hint = f"did you mean {matches[0]!r}? " if matches else ""
            raise ValueError(
                f"placeholder {name!r} is not a token of {tokenizer.spec}: {hint}Add it with "
                "?special_tokens= after the tokenizer's file"
            )
        marks[name] = token
    return marks


@dataclasses.dataclass(frozen=True)
class Spec:
    """The parts of a tokenizer's spec; names with & or commas are percent-encoded in the
    options."""

    kind: str
    argument: str
    options: Mapping[str, str]

    @property
    def roles(self) -> dict[str, str]:
        """The names of tokens by role, such as eod or bos."""
        return {
            role: urllib.parse.unquote(self.options[role]) for role in ROLES if role in self.options
        }


@contextlib.contextmanager
def library_errors(spec: str) -> Iterator[None]:
    """Raise ValueError for the errors of the tokenizers library: plain Exception, and Rust's
    PanicException, which is not a subclass of Exception."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise ValueError(
                f"tokenizer {spec!r}: its files are damaged or contradict each other: {error}"
            ) from None
        raise


def read_vocabulary(kind: str, path: str) -> bytes:
    """The bytes of a vocabulary file; ValueError where it is missing or empty."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"tokenizer {kind!r} cannot read {path}: {error.strerror}; check the path"
            f"{hub_command(path.removesuffix('/tokenizer.json'))}"
        ) from error
    if not data:
        raise ValueError(f"tokenizer {kind!r}: {path} is empty")
    return data


def identity_of(kind: str, *data: bytes) -> str:
    """A hash of the kind and of all data that decides its ids."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{kind}:{digest.hexdigest()[:16]}"


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where the file does not exist."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"{path} holds a {type(settings).__name__}, not an object of named settings"
        )
    return settings
