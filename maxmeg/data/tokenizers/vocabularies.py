"""Tokenizers from vocabulary files: SentencePiece, tokenizer.json, GPT-2 and BERT."""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxmeg.data.tokenizers import merged_bytes
from maxmeg.data.tokenizers.decoded_bytes import (
    decoded_bytes,
    is_byte_level,
    letter_bytes,
    misread_tokens,
    piece_bytes,
)
from maxmeg.data.tokenizers.tokenizer import (
    Tokenizer,
    identity_of,
    json_object,
    library_errors,
    read_vocabulary,
    without,
)

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<EOD>", "</s>", "<eos>", "[SEP]")
FAST_AFTER = 1 << 19  # characters after which preparing tiktoken pays off
MAX_WORD_CHARACTERS = 100  # BERT's limit: longer words become [UNK]
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # the character that SentencePiece uses for a space


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model; one id is appended if it has no end-of-sentence piece.

    Text is searched for the model's user-defined symbols, never for its control symbols.
    """

    def __init__(self, argument: str, options: Mapping[str, str]) -> None:
        import sentencepiece

        data = read_vocabulary("sentencepiece", argument)
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise ValueError(f"{argument} is not a SentencePiece model: {error}") from error
        size, end = self._model.GetPieceSize(), self._model.eos_id()
        self.model_size = size
        self.eod = end if end >= 0 else size
        self.vocab_size = max(size, self.eod + 1)
        self.bos = _or_none(self._model.bos_id())
        self.pad = _or_none(self._model.pad_id())
        self.unk = _or_none(self._model.unk_id())
        control = frozenset(i for i in range(size) if self._model.IsControl(i))
        self.special_ids = control | {self.eod}
        self._blank = self.token_id(_WORD_START)
        self.identity = identity_of("sentencepiece", data)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._model.EncodeAsIds(text), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        size = self._model.GetPieceSize()
        return self._model.DecodeIds([int(i) for i in ids if 0 <= i < size])

    def encode_after(self, text: str) -> np.ndarray:
        """As in Megatron-LM, without the space that the model puts before a text."""
        ids = self.encode(text)
        return ids[1:] if len(ids) and ids[0] == self._blank else ids

    def decode_after(self, ids: list[int]) -> str:
        """The text, with its leading space, which the model removes at the start of a text."""
        if self._inside is None:
            return self.decode(ids)
        begin = self.decode([self._inside])
        return self.decode([self._inside, *ids]).removeprefix(begin)

    @functools.cached_property
    def _inside(self) -> int | None:
        """A piece that is decoded without a space before it."""
        model = self._model
        return next(
            (
                i
                for i in range(model.GetPieceSize())
                if not (model.IsControl(i) or model.IsUnknown(i) or model.IsByte(i))
                and _WORD_START not in model.IdToPiece(i)
            ),
            None,
        )

    def token_bytes(self) -> dict[int, bytes]:
        """The unknown piece has the bytes of the sign that it is decoded to."""
        model, token_bytes = self._model, {}
        for i in range(model.GetPieceSize()):
            piece = model.IdToPiece(i)
            text = self.decode_after([i]) if i == self.unk else piece.replace(_WORD_START, " ")
            token_bytes[i] = piece_bytes(piece) if model.IsByte(i) else text.encode("utf-8")
        return without(self.special_ids, token_bytes)

    def token_id(self, name: str) -> int | None:
        token = self._model.PieceToId(name)
        # PieceToId of an unknown name is the id of the unknown piece, or 0 without one.
        return token if token >= 0 and self._model.IdToPiece(token) == name else None


class _AcceleratedTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library, `_model`; uses tiktoken for long texts if ids are
    equal."""

    _model: Any
    _make_fast: Callable[[], Callable[[str], list[int] | None] | None] | None = None
    _fast: Callable[[str], list[int] | None] | None = None
    _num_characters = 0  # characters that were encoded

    def encode(self, text: str) -> np.ndarray:
        if self._make_fast is not None:
            self._num_characters += len(text)
            if self._num_characters > FAST_AFTER:
                self._fast, self._make_fast = self._make_fast(), None
        ids = None if self._fast is None else self._fast(text)
        if ids is None:
            with library_errors(self.spec):
                ids = self._model.encode(text, add_special_tokens=False).ids
        return np.array(ids, np.int32)


class _LibraryTokenizer(_AcceleratedTokenizer):
    """A tokenizer that knows the spans of its tokens, and to which tokens can be added."""

    def encode_spans(
        self, text: str, marks: Mapping[str, int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        marks = marks or {}
        model = self._with(tuple(marks)) if marks else self._model
        with library_errors(self.spec):
            encoding = model.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if marks:
            ids = [marks.get(token, i) for token, i in zip(encoding.tokens, ids, strict=True)]
        return np.array(ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        with library_errors(self.spec):
            return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_id(self, name: str) -> int | None:
        return self._model.token_to_id(name)

    def encode_marked(self, text: str, marks: Mapping[str, int]) -> np.ndarray:
        return self.encode_spans(text, marks)[0]

    def decode_marked(self, ids: Iterable[int], names: Mapping[int, str]) -> str:
        model = self._with(tuple(names.values()))
        added_ids = {i: model.token_to_id(name) for i, name in names.items()}
        ids = [added_ids.get(int(i), int(i)) for i in ids if i in names or i < self.model_size]
        return model.decode(ids, skip_special_tokens=False)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def _with(self, names: tuple[str, ...]) -> Any:
        """The model with added tokens, so that the library itself splits the text around them.

        The library gives these tokens ids of its own.
        """
        import tokenizers

        extended = tokenizers.Tokenizer.from_str(self._model.to_str())
        added = [tokenizers.AddedToken(name, special=True, normalized=False) for name in names]
        extended.add_special_tokens(added)
        for name in names:
            existing = self._model.id_to_token(extended.token_to_id(name))
            if existing not in (name, None):
                raise ValueError(
                    f"tokenizer {self.spec!r}: its ids have gaps, and {name!r} would become "
                    f"{existing!r}: number its tokens without gaps"
                )
        return extended


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A tokenizer.json of the `tokenizers` library.

    Special tokens come from tokenizer_config.json beside it. If that names no end of text, the end
    is the first of END_NAMES in the vocabulary, or else an appended id.
    """

    def __init__(self, argument: str, options: Mapping[str, str]) -> None:
        import tokenizers

        path = Path(argument)
        path = path / "tokenizer.json" if path.is_dir() else path
        data = read_vocabulary("huggingface", str(path))
        try:
            self._model = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"{path} is not a tokenizer.json of the tokenizers library: {error}"
            ) from None
        self._model.no_truncation()
        self._model.no_padding()
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        added = self._model.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.model_size = max(vocabulary.values(), default=-1) + 1
        names = _special_names(path.parent / "tokenizer_config.json", vocabulary)
        named = [names[role] for role in ("eos_token", "sep_token") if role in names]
        ends = named[:1] or list(END_NAMES)
        self.eod = next((vocabulary[n] for n in ends if n in vocabulary), self.model_size)
        self.bos, self.pad, self.cls, self.sep, self.mask, self.unk = (
            vocabulary.get(names.get(f"{role}_token", ""))
            for role in ("bos", "pad", "cls", "sep", "mask", "unk")
        )
        self.opening = self._opening()
        self.vocab_size = max(self.model_size, self.eod + 1)
        settings = str((self.eod, self.bos, self.pad)).encode()
        self.identity = identity_of("huggingface", data, settings)
        self._make_fast = functools.partial(merged_bytes.of_tokenizer_json, data)
        # As in Megatron-LM, bos and cls default to each other, and sep to the end of text.
        self.bos, self.cls = _either(self.bos, self.cls), _either(self.cls, self.bos)
        self.sep = self.eod if named and self.sep is None else self.sep

    @functools.cached_property
    def required_size(self) -> int:
        """The ids of the model's own vocabulary except special tokens, of the end of a document
        and of what begins a text."""
        vocabulary = self._model.get_vocab(with_added_tokens=False).values()
        text = (i for i in vocabulary if i not in self.special_ids)
        return max(*text, self.eod, *self.opening, -1) + 1

    @functools.cached_property
    def _misread(self) -> dict[int, str]:
        return misread_tokens(self._model)

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return is_byte_level(self._model)

    def decode(self, ids: Iterable[int]) -> str:
        if not self._misread:
            return super().decode(ids)
        runs, decode = itertools.groupby(map(int, ids), self._misread.__contains__), super().decode
        return "".join(
            "".join(map(self._misread.__getitem__, run)) if is_literal else decode(run)
            for is_literal, run in runs
        )

    def decode_marked(self, ids: Iterable[int], names: Mapping[int, str]) -> str:
        if self._is_byte_level:  # the library would take the names' letters for bytes
            return Tokenizer.decode_marked(self, ids, names)
        return super().decode_marked(ids, names)

    def token_bytes(self) -> dict[int, bytes] | None:
        token_bytes = decoded_bytes(self._model)
        return None if token_bytes is None else without(self.special_ids, token_bytes)

    def _opening(self) -> tuple[int, ...]:
        """From tokenizer.json alone, as transformers ignores add_bos_token beside one."""
        encoding = self._model.encode("a", add_special_tokens=True)
        text = encoding.special_tokens_mask.index(0) if 0 in encoding.special_tokens_mask else 0
        return tuple(encoding.ids[:text])


class Gpt2Tokenizer(_AcceleratedTokenizer):
    """GPT-2's byte-level BPE: vocab.json and merges.txt (or encoder.json and vocab.bpe)."""

    def __init__(self, argument: str, options: Mapping[str, str]) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        folder = Path(argument)
        old = (folder / "encoder.json").is_file() and not (folder / "vocab.json").is_file()
        names = ("encoder.json", "vocab.bpe") if old else ("vocab.json", "merges.txt")
        paths = [str(folder / name) for name in names]
        data = [read_vocabulary("gpt2", path) for path in paths]
        try:
            model = models.BPE.from_file(*paths)
            self._vocabulary: dict[str, int] = json.loads(data[0])
            self.model_size = max(self._vocabulary.values()) + 1
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"{paths[0]} and {paths[1]} are not a BPE vocabulary: {error}"
            ) from None
        self._model = Tokenizer(model)
        self._model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._model.decoder = decoders.ByteLevel()
        self.eod = self._vocabulary.get("<|endoftext|>", self.model_size)
        self.special_ids = frozenset([self.eod])
        self.vocab_size = max(self.model_size, self.eod + 1)
        self.identity = identity_of("gpt2", *data)
        self._make_fast = functools.partial(merged_bytes.of_gpt2, *data)

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if i < self.model_size])

    def token_bytes(self) -> dict[int, bytes]:
        token_bytes = {i: letter_bytes(token) for token, i in self._vocabulary.items()}
        return without(self.special_ids, token_bytes)

    def token_id(self, name: str) -> int | None:
        return self._vocabulary.get(name)


class WordPieceTokenizer(_LibraryTokenizer):
    """BERT's WordPiece: a vocab.txt with one token per line, or the folder of one.

    Options, by default from tokenizer_config.json in the folder: do_lower_case (otherwise true if
    no token has a capital letter), strip_accents (otherwise as do_lower_case),
    tokenize_chinese_chars.
    """

    def __init__(self, argument: str, options: Mapping[str, str]) -> None:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        folder = Path(argument) if Path(argument).is_dir() else None
        path = folder / "vocab.txt" if folder else Path(argument)
        vocabulary = _lines_as_ids(path)
        config = json_object(folder / "tokenizer_config.json") if folder else {}
        lower, strip, chinese = (
            _boolean(name, options[name]) if name in options else config.get(name)
            for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
        )
        lower = not any(map(_has_capital, vocabulary)) if lower is None else bool(lower)
        strip = lower if strip is None else bool(strip)
        chinese = True if chinese is None else bool(chinese)
        self._model = Tokenizer(
            models.WordPiece(
                vocabulary, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS
            )
        )
        self._model.normalizer = normalizers.BertNormalizer(True, chinese, strip, lower)
        self._model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._model.decoder = decoders.WordPiece()
        self.model_size = max(vocabulary.values()) + 1
        self.pad, self.unk, self.cls, self.sep, self.mask = (
            vocabulary.get(name) for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
        )
        self.bos = self.cls
        self.eod = self.model_size if self.sep is None else self.sep
        self.opening = () if self.cls is None else (self.cls,)
        # Brackets are split off words, so text never becomes a token in brackets.
        in_brackets = {i for token, i in vocabulary.items() if _is_in_brackets(token)}
        self.special_ids = frozenset({*in_brackets, self.eod}) - {self.unk}
        self.vocab_size = max(self.model_size, self.eod + 1)
        lines = "\n".join(vocabulary).encode()
        self.identity = identity_of("wordpiece", lines, str((lower, strip, chinese)).encode())


def _lines_as_ids(path: Path) -> dict[str, int]:
    data = read_vocabulary("wordpiece", str(path))
    try:
        # Not splitlines: tokens may contain Unicode's other line separators.
        lines = data.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not a vocab.txt: invalid UTF-8 at byte {error.start}"
        ) from None
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(lines):
        token = line.removesuffix("\r")
        if token in vocabulary:
            raise ValueError(
                f"{path} has {token!r} on lines {vocabulary[token] + 1} and {number + 1}: a token "
                "stands once"
            )
        vocabulary[token] = number
    if "[UNK]" not in vocabulary:
        raise ValueError(
            f"{path} has no [UNK] among its {len(vocabulary):,} lines, which WordPiece needs for "
            "unknown words: is it BERT's vocab.txt, with one token per line?"
        )
    return vocabulary


def _boolean(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError(f"tokenizer option {name}={value}: write true or false")
    return value == "true"


def _has_capital(token: str) -> bool:
    """Whether a token has a letter A to Z; other capitals differ between versions of Unicode."""
    return any("A" <= c <= "Z" for c in token) and not _is_in_brackets(token)


def _is_in_brackets(token: str) -> bool:
    return len(token) > 2 and token.startswith("[") and token.endswith("]")


def _either(token: int | None, other: int | None) -> int | None:
    return other if token is None else token


def _or_none(token: int) -> int | None:
    return token if token >= 0 else None


def _special_names(path: Path, vocabulary: Mapping[str, int]) -> dict[str, str]:
    """eos_token, bos_token, ... in a tokenizer_config.json; empty where it does not exist."""
    config, names = json_object(path), {}
    for role in ("eos", "bos", "pad", "cls", "sep", "mask", "unk"):
        value = config.get(f"{role}_token")
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            if value in vocabulary:
                names[f"{role}_token"] = value
            elif role in ("eos", "bos", "pad"):
                raise ValueError(f"{path}: {role}_token {value!r} is not in the vocabulary")
    return names
