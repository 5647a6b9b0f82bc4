"""Tokenizers behind one interface; `load_tokenizer(spec)` makes them.

Text is never scanned for special tokens, except where a tokenizer.json asks for it itself: the
end of a document is added by the caller (`eod`), so text cannot forge it.
"""

import base64
import binascii
import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# The splitting rule of cl100k_base and Llama 3.
TIKTOKEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<EOD>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Text to ids and back.

    `spec` makes the same tokenizer in another process; `identity` is equal exactly when the
    vocabularies are, wherever their files lie. opening: what its own files put before a text.
    """

    spec: str
    identity: str
    vocab_size: int
    eod: int
    bos: int | None
    pad: int | None
    opening: tuple[int, ...]

    def encode(self, text: str) -> np.ndarray:
        """Ids, int32, without special tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """UTF-8 bytes, and 256 for the end of a document."""

    spec = identity = "bytes"
    vocab_size = 257
    eod = 256
    bos: int | None = None
    pad: int | None = None
    opening: tuple[int, ...] = ()

    def __init__(self, argument: str = "") -> None:
        if argument:
            raise ValueError(f"tokenizer 'bytes:{argument}': write 'bytes', it takes no argument")

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids, and the characters [begin, end) of the text that each stands for."""
        begins = np.repeat(np.arange(len(text)), [len(c.encode("utf-8")) for c in text])
        return self.encode(text), np.stack([begins, begins + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        ids = np.asarray(list(ids), np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode("utf-8", "replace")


class NullTokenizer:
    """N ids written as numbers with spaces between; the last is the end of a document."""

    bos: int | None = None
    pad: int | None = None
    opening: tuple[int, ...] = ()

    def __init__(self, argument: str) -> None:
        if not argument.isdecimal() or int(argument) < 1:
            raise ValueError(f"tokenizer 'null:{argument}': give a number of ids, like null:32000")
        self.vocab_size = int(argument)
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


class SentencePieceTokenizer:
    """A SentencePiece .model; without an end-of-sentence piece one id is appended for it."""

    opening: tuple[int, ...] = ()

    def __init__(self, argument: str) -> None:
        import sentencepiece

        data = _read("sentencepiece", argument)
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise ValueError(f"{argument} is no SentencePiece model: {error}") from error
        size, end = self._model.GetPieceSize(), self._model.eos_id()
        self.eod = end if end >= 0 else size
        self.vocab_size = max(size, self.eod + 1)
        self.bos = _or_none(self._model.bos_id())
        self.pad = _or_none(self._model.pad_id())
        self.spec = f"sentencepiece:{argument}"
        self.identity = _identity("sentencepiece", data)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._model.EncodeAsIds(text), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        size = self._model.GetPieceSize()
        return self._model.DecodeIds([int(i) for i in ids if 0 <= i < size])


class HuggingFaceTokenizer:
    """A tokenizer.json of the `tokenizers` library.

    End, begin and padding come from tokenizer_config.json beside it where that exists; otherwise
    the end is the first of END_NAMES in the vocabulary, or one appended id.
    """

    def __init__(self, argument: str) -> None:
        import tokenizers

        path = Path(argument)
        path = path / "tokenizer.json" if path.is_dir() else path
        data = _read("huggingface", str(path))
        try:
            self._model = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"{path} is no tokenizer.json of the tokenizers library: {error}"
            ) from None
        self._model.no_truncation()
        self._model.no_padding()
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        added = self._model.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        size = max(vocabulary.values(), default=-1) + 1
        names = _special_names(path.parent / "tokenizer_config.json", vocabulary)
        ends = [names["eos_token"]] if "eos_token" in names else list(END_NAMES)
        self.eod = next((vocabulary[name] for name in ends if name in vocabulary), size)
        self.bos = vocabulary.get(names.get("bos_token", ""))
        self.pad = vocabulary.get(names.get("pad_token", ""))
        self.opening = self._opening()
        self.vocab_size = max(size, self.eod + 1)
        self.spec = f"huggingface:{argument}"
        self.identity = _identity("huggingface", data, str((self.eod, self.bos, self.pad)).encode())

    def _opening(self) -> tuple[int, ...]:
        """By the tokenizer.json: transformers heeds no add_bos_token beside one."""
        found = self._model.encode("a", add_special_tokens=True)
        text = found.special_tokens_mask.index(0) if 0 in found.special_tokens_mask else 0
        return tuple(found.ids[:text])

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._model.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids, and the characters [begin, end) of the text that each stands for."""
        found = self._model.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_id(self, name: str) -> int | None:
        return self._model.token_to_id(name)


class Gpt2Tokenizer:
    """GPT-2's byte-level BPE: vocab.json and merges.txt (or encoder.json and vocab.bpe)."""

    bos: int | None = None
    pad: int | None = None
    opening: tuple[int, ...] = ()

    def __init__(self, argument: str) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        folder = Path(argument)
        old = (folder / "encoder.json").is_file() and not (folder / "vocab.json").is_file()
        names = ("encoder.json", "vocab.bpe") if old else ("vocab.json", "merges.txt")
        paths = [str(folder / name) for name in names]
        data = [_read("gpt2", path) for path in paths]
        try:
            model = models.BPE.from_file(*paths)
            vocabulary = json.loads(data[0])
            self._size = max(vocabulary.values()) + 1
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{paths[0]} and {paths[1]} hold no BPE vocabulary: {error}") from None
        self._model = Tokenizer(model)
        self._model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._model.decoder = decoders.ByteLevel()
        self.eod = vocabulary.get("<|endoftext|>", self._size)
        self.vocab_size = max(self._size, self.eod + 1)
        self.spec = f"gpt2:{argument}"
        self.identity = _identity("gpt2", *data)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._model.encode(text).ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if i < self._size])


class TiktokenTokenizer:
    """A rank file (base64 token, space, rank), split by TIKTOKEN_PATTERN; eod is appended."""

    bos: int | None = None
    pad: int | None = None
    opening: tuple[int, ...] = ()

    def __init__(self, argument: str) -> None:
        import tiktoken

        data = _read("tiktoken", argument)
        ranks = _parse_ranks(argument, data)
        self._size = self.eod = max(ranks.values()) + 1
        self.vocab_size = self.eod + 1
        self._model = tiktoken.Encoding(
            Path(argument).name,
            pat_str=TIKTOKEN_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": self.eod},
        )
        self.spec = f"tiktoken:{argument}"
        self.identity = _identity("tiktoken", data)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._model.encode_ordinary(text), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if i < self._size])


KINDS = {
    "bytes": ByteTokenizer,
    "null": NullTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "huggingface": HuggingFaceTokenizer,
    "gpt2": Gpt2Tokenizer,
    "tiktoken": TiktokenTokenizer,
}


def load_tokenizer(spec: str) -> Tokenizer:
    """`bytes`, `null:N`, `sentencepiece:FILE`, `huggingface:FILE`, `gpt2:FOLDER`, `tiktoken:FILE`.

    ValueError for an unknown kind and for files that are missing or are not what the kind reads.
    """
    kind, _, argument = spec.partition(":")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1, 0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown tokenizer {spec!r}: {hint}Choose one of {', '.join(KINDS)}")
    if not argument and kind not in ("bytes", "null"):
        what = "FOLDER" if kind == "gpt2" else "FILE"
        raise ValueError(f"tokenizer {spec!r} needs its vocabulary: write {kind}:{what}")
    return KINDS[kind](argument)


def _read(kind: str, path: str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"tokenizer {kind!r} cannot read {path}: {error.strerror}; check the path"
        ) from error
    if not data:
        raise ValueError(f"tokenizer {kind!r}: {path} is empty")
    return data


def _identity(kind: str, *data: bytes) -> str:
    digest = hashlib.sha256()
    for part in data:
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{kind}:{digest.hexdigest()[:16]}"


def _or_none(token: int) -> int | None:
    return token if token >= 0 else None


def _special_names(path: Path, vocabulary: Mapping[str, int]) -> dict[str, str]:
    """eos_token, bos_token, pad_token of a tokenizer_config.json, if it exists."""
    config, names = json_object(path), {}
    for key in ("eos_token", "bos_token", "pad_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            if value not in vocabulary:
                raise ValueError(f"{path}: {key} {value!r} is not in the vocabulary")
            names[key] = value
    return names


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


def _parse_ranks(path: str, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"{path} line {number} is not 'base64 rank' of a tiktoken file: {error}"
            ) from None
    if len(set(ranks.values())) != len(ranks) or not ranks:
        raise ValueError(f"{path} gives the same rank to two tokens, or has none")
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} single bytes, the first {missing[0]}")
    return ranks
