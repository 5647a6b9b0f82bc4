"""Byte pairs merged by tiktoken, several times as fast, where it must give `tokenizers`' ids.

`tokenizers` merges the pairs of a list, tiktoken any two neighbours whose bytes are a token; both
take the pair that comes first in the list, or by its id, which is the same order here. Suppose
tiktoken merges a pair (x, y) that is not in the list, as the first such, into the token t. No merge
crossed the ends of t's bytes before, so within them all went as if they were the whole text: what
the list makes of t alone comes to (x, y) as well, and no further. So if the list makes of no token
two tokens that come before it, there is no such pair. A word that is a token as a whole is that
token for tiktoken; for `tokenizers` only if the list makes it, or if `ignore_merges` says so.
"""

import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Fast = Callable[[str], list[int] | None]  # ids; None where only the library knows

_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
_WORDS_AND_LINES = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}++|{}"
_WORDS_AND_LINES += r"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
# How files say that text is split, and the same without backtracking. GPT-2's has no words there.
GPT2, DIGITS = "gpt2", "digits"
_THEIRS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    GPT2: _WORDS + r"|\s++$|\s+(?!\S)|\s",
    # Each digit by itself before the rest is split.
    DIGITS: r"\p{N}|" + _WORDS.replace(r"| ?\p{N}++", "") + r"|\s++(?=\p{N})|\s++$|\s+(?!\S)|\s",
    _THEIRS.format(r"\p{N}{1,3}"): _WORDS_AND_LINES.format(r"\p{N}{1,3}+"),  # Llama 3's
    _THEIRS.format(r"\p{N}"): _WORDS_AND_LINES.format(r"\p{N}"),  # Qwen's
}


def byte_letters() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def merged_bytes(
    ids: dict[str, int], pairs: Sequence[tuple[str, ...]], pattern: str, whole_words: bool = False
) -> Any | None:
    """A tiktoken.Encoding for a vocabulary and its list of pairs; None where it might differ.

    whole_words: a word that is a token is that token, whatever the pairs (`ignore_merges`). Texts
    with bytes that are no token (`left_to_the_library`) are none of its business.
    """
    import tiktoken
    import tokenizers

    letters = {letter: byte for letter, byte in byte_letters().items() if letter in ids}
    if not all(len(pair) == 2 for pair in pairs):
        return None
    made = list(dict.fromkeys("".join(pair) for pair in pairs))
    known = {*letters, *made}
    if not known <= ids.keys() or (whole_words and len(known) < len(ids)):
        return None
    order = [ids["".join(pair)] for pair in pairs]
    if any(b < a for a, b in itertools.pairwise(order)):
        return None
    if len({ids[token] for token in known}) < len(known):
        return None
    model = tokenizers.Tokenizer(tokenizers.models.BPE(ids, list(pairs)))
    encoded = model.encode_batch_fast(made, add_special_tokens=False)
    for token, found in zip(made, (one.ids for one in encoded), strict=True):
        if found != [ids[token]] and not whole_words:
            return None
        if len(found) == 2 and max(found) < ids[token]:
            return None
    ranks = {bytes(letters[c] for c in token): ids[token] for token in known}
    return tiktoken.Encoding(
        "merged", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
    )


def left_to_the_library(vocabulary: Iterable[str]) -> np.ndarray | None:
    """Whether a text with this character is, by its code; None where all are.

    Characters with bytes that are no token, and those this Python's Unicode does not know yet, of
    which libraries may have tables of different years.
    """
    letters = byte_letters()
    missing = [letters[letter] for letter in letters.keys() - set(vocabulary)]
    found = np.array([unicodedata.category(chr(code)) == "Cn" for code in range(0x110000)])
    for byte in missing:
        if 0x80 <= byte < 0xC0:
            return None
        if byte < 0x80:
            found[byte] = True
        elif byte < 0xE0:
            found[max((byte & 0x1F) << 6, 0x80) : ((byte & 0x1F) + 1) << 6] = True
        elif byte < 0xF0:
            found[max((byte & 0x0F) << 12, 0x800) : ((byte & 0x0F) + 1) << 12] = True
        elif byte < 0xF5:
            found[max((byte & 0x07) << 18, 0x10000) : ((byte & 0x07) + 1) << 18] = True
    return found


def of_gpt2(vocabulary: bytes, merges: bytes) -> Fast | None:
    """By GPT-2's vocab.json and merges.txt."""
    lines = [line for line in merges.decode("utf-8").split("\n") if line]
    pairs = [tuple(line.split(" ")) for line in lines if not line.startswith("#version")]
    ids = json.loads(vocabulary)
    return _fast(merged_bytes(ids, pairs, GPT2), left_to_the_library(ids), [], None)


def of_tokenizer_json(data: bytes) -> Fast | None:
    """By a tokenizer.json of byte-level pairs; texts with added tokens are left to the library."""
    import tokenizers

    settings = json.loads(data)
    model, pattern = settings["model"], _pattern(settings["pre_tokenizer"])
    asked = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or pattern is None or model.get("byte_fallback"):
        return None
    if any(model.get(name) for name in asked):
        return None
    merges = model["merges"]
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in merges]
    encoding = merged_bytes(model["vocab"], pairs, pattern, bool(model.get("ignore_merges")))
    normalizer = tokenizers.Tokenizer.from_str(data.decode("utf-8")).normalizer
    added = [token["content"] for token in settings.get("added_tokens") or ()]
    return _fast(encoding, left_to_the_library(model["vocab"]), added, normalizer)


def _fast(
    encoding: Any, is_foreign: np.ndarray | None, added: list[str], normalizer: Any
) -> Fast | None:
    if encoding is None or is_foreign is None:
        return None
    names = {*added, *(normalizer.normalize_str(name) for name in added if normalizer)}
    # (?!) is nowhere.
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
    """Which of PATTERNS a tokenizer.json splits text by."""
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
