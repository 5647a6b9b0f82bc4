"""Byte-level BPE by tiktoken, several times as fast as `tokenizers`, where the ids are provably
equal.

`tokenizers` merges the pairs in the merge list; tiktoken merges any two neighbours whose
concatenation is a token. Both merge the pair that is first in the list, or has the lowest id, which
is the same order here. Suppose that (x, y) is the first pair outside the list that tiktoken merges,
into the token t. No earlier merge crossed the ends of t's bytes, so these bytes were merged as if
they were the whole text. Hence the merge list, applied to t alone, also arrives at (x, y), and goes
no further. Conversely, if the merge list turns no token into two tokens with lower ids, there is no
such pair. A word that is a token becomes that token in tiktoken; in `tokenizers` only if the merge
list produces it or `ignore_merges` is set.
"""

import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Fast = Callable[[str], list[int] | None]  # ids; None for texts that `tokenizers` must encode

_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
_WORDS_AND_LINES = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}++|{}"
_WORDS_AND_LINES += r"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
# Patterns by which tokenizer.json files split text -> equal patterns without backtracking.
GPT2, DIGITS = "gpt2", "digits"
_THEIRS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    GPT2: _WORDS + r"|\s++$|\s+(?!\S)|\s",
    # Each digit is split off before the rest.
    DIGITS: r"\p{N}|" + _WORDS.replace(r"| ?\p{N}++", "") + r"|\s++(?=\p{N})|\s++$|\s+(?!\S)|\s",
    _THEIRS.format(r"\p{N}{1,3}"): _WORDS_AND_LINES.format(r"\p{N}{1,3}+"),  # Llama 3's
    _THEIRS.format(r"\p{N}"): _WORDS_AND_LINES.format(r"\p{N}"),  # Qwen's
}


def byte_letters() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes; printable bytes are their own characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def merged_bytes(
    ids: dict[str, int], pairs: Sequence[tuple[str, ...]], pattern: str, whole_words: bool = False
) -> Any | None:
    """A tiktoken.Encoding for a vocabulary and its merge list; None where ids might differ.

    whole_words: a word that is a token becomes that token, whatever the merges (`ignore_merges`).
    Texts with bytes that are not tokens are excluded elsewhere (`needs_library`).
    """
    import tiktoken
    import tokenizers

    letters = {letter: byte for letter, byte in byte_letters().items() if letter in ids}
    if not all(len(pair) == 2 for pair in pairs):
        return None
    merged = list(dict.fromkeys("".join(pair) for pair in pairs))
    symbols = {*letters, *merged}
    if not symbols <= ids.keys() or (whole_words and len(symbols) < len(ids)):
        return None
    order = [ids["".join(pair)] for pair in pairs]
    if any(b < a for a, b in itertools.pairwise(order)):
        return None
    if len({ids[token] for token in symbols}) < len(symbols):
        return None
    model = tokenizers.Tokenizer(tokenizers.models.BPE(ids, list(pairs)))
    encoded = model.encode_batch_fast(merged, add_special_tokens=False)
    for token, result in zip(merged, (encoding.ids for encoding in encoded), strict=True):
        if result != [ids[token]] and not whole_words:
            return None
        if len(result) == 2 and max(result) < ids[token]:
            return None
    ranks = {bytes(letters[c] for c in token): ids[token] for token in symbols}
    return tiktoken.Encoding(
        "merged", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
    )


@functools.cache
def _undefined() -> np.ndarray:
    """For each code point, whether this Python's Unicode tables do not define it. Read only."""
    return np.array([unicodedata.category(chr(code)) == "Cn" for code in range(0x110000)])


def needs_library(vocabulary: Iterable[str]) -> np.ndarray | None:
    """For each code point, whether texts that contain it need `tokenizers`; None if all do.

    These are characters with bytes that are not tokens, and code points that this Python's Unicode
    tables do not define, because libraries may have tables of other versions.
    """
    letters = byte_letters()
    missing = [letters[letter] for letter in letters.keys() - set(vocabulary)]
    excluded = _undefined().copy()
    for byte in missing:
        if 0x80 <= byte < 0xC0:
            return None
        if byte < 0x80:
            excluded[byte] = True
        elif byte < 0xE0:
            excluded[max((byte & 0x1F) << 6, 0x80) : ((byte & 0x1F) + 1) << 6] = True
        elif byte < 0xF0:
            excluded[max((byte & 0x0F) << 12, 0x800) : ((byte & 0x0F) + 1) << 12] = True
        elif byte < 0xF5:
            excluded[max((byte & 0x07) << 18, 0x10000) : ((byte & 0x07) + 1) << 18] = True
    return excluded


def of_gpt2(vocabulary: bytes, merges: bytes) -> Fast | None:
    """A fast encoder from GPT-2's vocab.json and merges.txt; None where ids might differ."""
    lines = [line for line in merges.decode("utf-8").split("\n") if line]
    pairs = [tuple(line.split(" ")) for line in lines if not line.startswith("#version")]
    ids = json.loads(vocabulary)
    return _fast(merged_bytes(ids, pairs, GPT2), needs_library(ids), [], None)


def of_tokenizer_json(data: bytes) -> Fast | None:
    """A fast encoder from a byte-level tokenizer.json; None where ids might differ.

    Texts that contain an added token are encoded by `tokenizers`.
    """
    import tokenizers

    settings = json.loads(data)
    model, pattern = settings["model"], _pattern(settings["pre_tokenizer"])
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or pattern is None or model.get("byte_fallback"):
        return None
    if any(model.get(name) for name in options):
        return None
    merges = model["merges"]
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in merges]
    encoding = merged_bytes(model["vocab"], pairs, pattern, bool(model.get("ignore_merges")))
    normalizer = tokenizers.Tokenizer.from_str(data.decode("utf-8")).normalizer
    added = [token["content"] for token in settings.get("added_tokens") or ()]
    return _fast(encoding, needs_library(model["vocab"]), added, normalizer)


def _fast(
    encoding: Any, is_foreign: np.ndarray | None, added: list[str], normalizer: Any
) -> Fast | None:
    if encoding is None or is_foreign is None:
        return None
    names = {*added, *(normalizer.normalize_str(name) for name in added if normalizer)}
    # (?!) never matches.
    named = re.compile("|".join(map(re.escape, sorted(names))) or "(?!)")

    def is_theirs(text: str) -> bool:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return bool(is_foreign[codes].any() or named.search(text))

    def encode(text: str) -> list[int] | None:
        if is_theirs(text):
            return None
        if normalizer:
            text = normalizer.normalize_str(text)
            if is_theirs(text):
                return None
        return encoding.encode_ordinary(text)

    return encode


def _pattern(splitting: dict | None) -> str | None:
    """The key of PATTERNS for the way a tokenizer.json splits text; None for other ways."""
    steps = [splitting or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    by_words = last.get("use_regex", True)
    if not before:
        return GPT2 if by_words else None
    first = {name: value for name, value in before[0].items() if value is not False}
    if len(before) > 1:
        return None
    if first == {"type": "Digits", "individual_digits": True}:
        return DIGITS if by_words else None
    regex = (first.get("pattern") or {}).get("Regex", "")
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
    return regex if first == split and not by_words and regex in PATTERNS else None
