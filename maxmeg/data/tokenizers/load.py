"""Tokenizers behind one interface; `load_tokenizer(spec)` makes them.

A spec is `KIND:FILE`, or `KIND:FILE?NAME=VALUE&NAME=VALUE`. Text is not searched for special
tokens, unless a tokenizer.json or a SentencePiece model itself defines that. The caller appends the
end-of-document token (`eod`), so text cannot forge it. Added tokens of a tokenizer.json may have
ids beyond a model's vocabulary: a text that contains one is an error. Options:

special_tokens=<image>,<|end|>  names to add to the vocabulary unless it has them; chats and
                                encode_placeholders recognize them in text, encode does not
extra_ids=100                   likewise T5's <extra_id_0>, <extra_id_1>, ...
eod= bos= pad= cls= sep= mask=  the name of the token with that role, which is added if missing
do_lower_case= strip_accents= tokenize_chinese_chars=   true or false, for wordpiece
pattern= num_special_tokens= vocab_size=                as in Megatron-LM, for tiktoken
"""

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from maxmeg.config.hints import hub_command
from maxmeg.config.paths import split_spec
from maxmeg.data.tokenizers import added_tokens
from maxmeg.data.tokenizers.tiktoken_ranks import TiktokenTokenizer
from maxmeg.data.tokenizers.tokenizer import (
    ROLES,
    Spec,
    Tokenizer,
    library_errors,
    split_marks,
)
from maxmeg.data.tokenizers.vocabularies import (
    Gpt2Tokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    WordPieceTokenizer,
)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255; 256 is the end of a document."""

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
        marks, place, spans = marks or {}, 0, [np.zeros((0, 2), np.int64)]
        for piece, is_mark in split_marks(text, marks):
            units = [piece] if is_mark else list(piece)
            counts = [1] if is_mark else [len(unit.encode("utf-8")) for unit in units]
            ends = place + np.cumsum([len(unit) for unit in units])
            begins = np.concatenate([[place], ends[:-1]])
            spans.append(np.repeat(np.stack([begins, ends], axis=1), counts, axis=0))
            place += len(piece)
        return self.encode_marked(text, marks), np.concatenate(spans)

    def token_bytes(self) -> dict[int, bytes]:
        return {i: bytes([i]) for i in range(256)}

    def decode(self, ids: Iterable[int]) -> str:
        ids = np.asarray(list(ids), np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode("utf-8", "replace")


class NullTokenizer(Tokenizer):
    """N ids, written as numbers with spaces between; the last id is the end of a document."""

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
    """A kind of tokenizer. argument: what follows the colon of a spec; options: the kind's own
    options."""

    argument: str
    make: Callable[[str, Mapping[str, str]], Tokenizer]
    options: tuple[str, ...] = ()


ADDING = ("special_tokens", "extra_ids", *ROLES)
KINDS = {
    "bytes": Kind("", ByteTokenizer),
    "null": Kind("N", NullTokenizer),
    "sentencepiece": Kind("FILE", SentencePieceTokenizer),
    "huggingface": Kind("FILE", HuggingFaceTokenizer),
    "gpt2": Kind("FOLDER", Gpt2Tokenizer),
    "wordpiece": Kind(
        "FILE",
        WordPieceTokenizer,
        ("do_lower_case", "strip_accents", "tokenize_chinese_chars"),
    ),
    "tiktoken": Kind(
        "FILE",
        TiktokenTokenizer,
        ("pattern", "num_special_tokens", "vocab_size"),
    ),
}


_SUFFIXES = {".json": "huggingface", ".model": "sentencepiece", ".tiktoken": "tiktoken"}


def parse_spec(spec: str) -> Spec:
    """Parse `KIND:ARGUMENT?NAME=VALUE&...`; write a ? at the end if the file name contains one.

    ValueError for kinds and options that do not exist.
    """
    kind, argument, words = split_spec(spec)
    if kind not in KINDS:
        is_huggingface = os.path.exists(kind) or bool(hub_command(kind))
        likely = _SUFFIXES.get(os.path.splitext(kind)[1], "huggingface" * is_huggingface)
        hint = f"did you mean {likely}:{spec}? " if likely else _suggestion(kind, KINDS)
        raise ValueError(
            f"unknown tokenizer {spec!r}: {hint}Choose one of {', '.join(KINDS)}{hub_command(kind)}"
        )
    if not argument and KINDS[kind].argument not in ("", "N"):
        raise ValueError(
            f"tokenizer {spec!r} needs its vocabulary: write {kind}:{KINDS[kind].argument}"
        )
    allowed = KINDS[kind].options + (ADDING if kind != "null" else ())
    options: dict[str, str] = {}
    for word in words[1:].split("&") if words[1:] else ():
        name, equals, value = word.partition("=")
        if name not in allowed:
            raise ValueError(
                f"tokenizer {spec!r}: {kind} has no option {name!r}: {_suggestion(name, allowed)}"
                f"Its options: {', '.join(allowed) or 'none'}"
            )
        if not equals or not value or name in options:
            raise ValueError(f"tokenizer {spec!r}: write {name}=VALUE, and only once")
        options[name] = value
    return Spec(kind, argument, options)


def load_tokenizer(spec: str) -> Tokenizer:
    """Load the tokenizer that a spec describes; see the docstring of this module.

    ValueError for an unknown kind, and for files that are missing or that this kind cannot read.
    """
    parts = parse_spec(spec)
    with library_errors(spec):
        tokenizer = KINDS[parts.kind].make(parts.argument, parts.options)
        tokenizer.spec = spec
        if any(name in ADDING for name in parts.options):
            names = added_tokens.added_names(parts.options)
            tokenizer = added_tokens.ExtendedTokenizer(tokenizer, names, parts.roles)
    return tokenizer


def _suggestion(name: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f"did you mean {matches[0]!r}? " if matches else ""
