"""tiktoken's byte-pair encoding: rank files, and the files of Megatron-LM's TikTokenizer."""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from maxmeg.data.tokenizers.added_tokens import added_names
from maxmeg.data.tokenizers.tokenizer import (
    Tokenizer,
    identity_of,
    read_vocabulary,
)

# Patterns that split text before BPE: cl100k is also Llama 3's; v1 and v2 are Megatron-LM's.
_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
PATTERNS = {
    "cl100k": rf"{_SUFFIX}|{_LETTERS}\p{{L}}+|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}",
    "o200k": rf"{_LETTERS}{_UPPER}*{_LOWER}+{_SUFFIX}?|{_LETTERS}{_UPPER}+{_LOWER}*{_SUFFIX}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}",
    "gpt2": rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}",
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}|"
    rf" ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}",
    "v2": rf"{_LETTERS}{_UPPER}*{_LOWER}+|{_LETTERS}{_UPPER}+{_LOWER}*|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}",
}
# Megatron-LM's defaults for a .json vocabulary, whose first ids are its special tokens.
MEGATRON = {"pattern": "v2", "num_special_tokens": 1000, "vocab_size": 2**17}
MEGATRON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
RESERVED = "<SPECIAL_{}>"
END = "<|endoftext|>"


class TiktokenTokenizer(Tokenizer):
    """A rank file (base64 token, space, rank), or Megatron-LM's .json list of ranks.

    Options: pattern: one of PATTERNS. num_special_tokens: the number of ids before the ranks, for
    Megatron-LM's special tokens, for special_tokens and extra_ids, and for reserved tokens; 0 puts
    the end-of-document token after the ranks. vocab_size: the number of all ids; higher ranks are
    dropped.
    """

    def __init__(self, argument: str, options: Mapping[str, str]) -> None:
        import tiktoken

        is_json = argument.lower().endswith(".json")
        data = read_vocabulary("tiktoken", argument)
        ranks = _parse_json(argument, data) if is_json else _parse_ranks(argument, data)
        pattern = options.get("pattern", MEGATRON["pattern"] if is_json else "cl100k")
        if pattern not in PATTERNS:
            raise ValueError(
                f"tokenizer option pattern={pattern} is not one of {', '.join(PATTERNS)}: "
                "choose the pattern that the ranks were made with"
            )
        count = _number(options, "num_special_tokens", MEGATRON, is_json)
        special = special_names(count, added_names(options)) if count else ()
        total = max(ranks.values()) + 1 + max(count, 1)
        size = min(_number(options, "vocab_size", MEGATRON, is_json) or total, total)
        if size < int(options.get("vocab_size", 0)) or size - max(count, 1) < 256:
            raise ValueError(
                f"tokenizer option vocab_size={options.get('vocab_size', size)}: {argument} has "
                f"{total:,} ids with its {max(count, 1):,} special ones: choose at most so many, "
                f"and at least {256 + max(count, 1):,}, the single bytes"
            )
        limit = size - max(count, 1)
        ranks = {token: rank + count for token, rank in ranks.items() if rank < limit}
        self._special = {name: i for i, name in enumerate(special)} if count else {END: limit}
        self.vocab_size, self.model_size = size, size if count else limit
        self.eod = self._special["</s>" if count else END]
        names = ("<unk>", "<s>", "<mask>", "<pad>", "<cls>", "<sep>")
        roles = (self._special.get(name) for name in names)
        self.unk, self.bos, self.mask, self.pad, self.cls, self.sep = roles
        self.special_ids = frozenset(self._special.values())
        self._model = tiktoken.Encoding(
            Path(argument).name,
            pat_str=PATTERNS[pattern],
            mergeable_ranks=ranks,
            special_tokens=self._special,
        )
        self._ids = frozenset(ranks.values()) | (self.special_ids if count else frozenset())
        # Without options, the identity is a hash of the file alone, as in older checkpoints.
        extra_bytes = [str((pattern, special, size)).encode()] if options or is_json else []
        self.identity = identity_of("tiktoken", data, *extra_bytes)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._model.encode_ordinary(text), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if i in self._ids])

    def token_bytes(self) -> dict[int, bytes]:
        ids = self._ids - self.special_ids
        return {i: self._model.decode_single_token_bytes(i) for i in ids}

    def token_id(self, name: str) -> int | None:
        return self._special.get(name)


def special_names(count: int, tokens: list[str]) -> tuple[str, ...]:
    """The names of the first `count` ids: Megatron-LM's seven, unless `tokens` names them all."""
    named = [name for name in MEGATRON_SPECIAL if name in tokens]
    if named and len(named) < len(MEGATRON_SPECIAL):
        missing = [name for name in MEGATRON_SPECIAL if name not in tokens]
        raise ValueError(
            f"tokenizer option special_tokens names {', '.join(named)} but not "
            f"{', '.join(missing)}: name all seven of Megatron-LM's, in your order, or none"
        )
    names = tokens if named else [*MEGATRON_SPECIAL, *tokens]
    names = [*names, *(RESERVED.format(i) for i in range(len(names), count))]
    if len(names) > count or len(set(names)) < len(names):
        raise ValueError(
            f"tokenizer option num_special_tokens={count} must hold the {len(MEGATRON_SPECIAL)} of "
            f"Megatron-LM and {len(set(tokens) - set(MEGATRON_SPECIAL))} other tokens, each once: "
            "raise it, or name fewer"
        )
    return tuple(names)


def _number(options: Mapping[str, str], name: str, defaults: Mapping, use_defaults: bool) -> int:
    value = options.get(name, str(defaults[name]) if use_defaults else "0")
    if not value.isdecimal():
        raise ValueError(f"tokenizer option {name}={value} must be a whole number, 0 or more")
    return int(value)


def _parse_json(path: str, data: bytes) -> dict[bytes, int]:
    """Ranks from Megatron-LM's list of {rank, token_bytes, token_str}, in order of ranks."""
    try:
        entries = json.loads(data)
        if not isinstance(entries, list):
            raise ValueError(f"a {type(entries).__name__}, not a list")
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        wrong = [i for i, entry in enumerate(entries) if entry["rank"] != i]
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise ValueError(
            f"{path} is not Megatron-LM's list of {{rank, token_bytes, token_str}} for its "
            f"TikTokenizer: {error}"
        ) from None
    if wrong:
        raise ValueError(f"{path}: entry {wrong[0]} has a different rank: ranks must count from 0")
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return _checked_ranks(path, ranks, len(tokens))


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
    return _checked_ranks(path, ranks, len(ranks))


def _checked_ranks(path: str, ranks: dict[bytes, int], count: int) -> dict[bytes, int]:
    if len(set(ranks.values())) != count or not ranks:
        raise ValueError(f"{path} gives the same rank to two tokens, or has none")
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} single bytes, the first {missing[0]}")
    return ranks
