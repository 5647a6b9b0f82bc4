"""Grammars that a reply must follow: JSON schemas, regular expressions, Lark (llguidance)."""

import concurrent.futures
import contextlib
import dataclasses
import enum
import functools
import json
import math
import os
import re
import sys
import threading
import time
import typing
from collections.abc import Iterator, Sequence

import numpy as np

from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.schemas import escapes, prepared

# Between the parts of JSON: a space, or a line break and the next line's indentation. Without a
# limit, a model may write spaces forever.
JSON_SPACE = r"[ ]?|\n[ ]{0,32}"
ONE_OF = (  # llguidance's words, with an option that is refused
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with "
    "anyOf"
)
THREADS = max(1, (os.cpu_count() or 1) // 2)  # for masks of grammars that are not slow
SLOW_SECONDS = 0.0005  # CPU time of a mask, on average of the newest ones; usual ones take 0.0001
PRIORITY = 10  # of the thread for slow grammars: 0 is that of other threads, 19 the lowest
NEWEST = 8  # masks, about, in that average


class Kind(enum.Enum):
    json_schema = "json_schema"
    json_object = "json_object"
    regex = "regex"
    lark = "lark"


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """A checked grammar; any number of replies can follow it.

    seconds: most CPU time that one reply may take for it.
    """

    start: typing.Any  # llguidance's LLMatcher before the first token
    vocab_size: int
    seconds: float = math.inf

    def matcher(self) -> "Matcher":
        return Matcher(self.start.deep_copy(), self.vocab_size, self.seconds)


class Matcher:
    """How far one reply has followed its grammar.

    spent: CPU seconds so far. mean: those of the newest masks, on average.
    """

    def __init__(self, state: typing.Any, vocab_size: int, seconds: float):
        self._state, self._words = state, -(-vocab_size // 32)
        self._seconds, self.spent, self.mean = seconds, 0.0, 0.0

    @property
    def is_slow(self) -> bool:
        return self.mean > SLOW_SECONDS

    def add(self, token: int) -> bool:
        """Add a token that `mask` allows; return whether the text is complete. ValueError if the
        grammar is too complex to go on, or takes too long."""
        with self._timed():
            self._state.consume_token(token)
        if self._state.is_error():
            problem = self._state.get_error().splitlines()[0]  # the rest is llguidance's state
            raise ValueError(f"the grammar cannot be followed: {problem}")
        if self.spent > self._seconds:
            raise ValueError(
                f"the grammar cannot be followed: it has taken more than {self._seconds:g} s for "
                "this reply; use one with fewer ways to read a text"
            )
        return self._state.is_stopped()

    def mask(self) -> np.ndarray:
        """The tokens that may come next, a bit for each: int32 [vocabulary / 32]."""
        before = self.spent
        with self._timed():
            bits = self._state.compute_bitmask()
        self.mean += (self.spent - before - self.mean) / NEWEST
        return np.frombuffer(bits, np.int32)[: self._words]  # it has a bit for one more token

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.spent += time.thread_time() - start


class Masks:
    """Computes masks in threads, beside the step of the devices: llguidance releases Python's lock.

    All slow grammars share half of the time of one thread, so that nothing else waits for them.
    """

    def __init__(self) -> None:
        self._usual = concurrent.futures.ThreadPoolExecutor(THREADS, "masks")
        self._slow = concurrent.futures.ThreadPoolExecutor(1, "slow masks", yield_to_others)

    def start(self, matcher: Matcher) -> "concurrent.futures.Future[np.ndarray]":
        if not matcher.is_slow:
            return self._usual.submit(matcher.mask)
        mask = self._slow.submit(matcher.mask)
        self._slow.submit(lambda: time.sleep(matcher.mean))
        return mask


def yield_to_others() -> None:
    """Lower this thread's priority, where the system has one for each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRIORITY)


class Grammars:
    """Compiles grammars for a model's vocabulary.

    ends: tokens that end a reply. ValueError for a tokenizer whose ids do not determine bytes, and
    without llguidance.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]):
        try:
            import llguidance
        except ImportError:
            raise ValueError("grammars need llguidance: pip install 'maxmeg[serve]'") from None
        token_bytes = tokenizer.token_bytes()
        if token_bytes is None:
            raise ValueError(
                f"tokenizer {tokenizer.spec!r}: its ids do not determine the bytes of the text, "
                "which grammars need: serve the model without them"
            )
        self.vocab_size = vocab_size
        words = llguidance.TokenizerWrapper(_Words(tokenizer, token_bytes, vocab_size, ends))
        self._tokenizer = llguidance.LLTokenizer(words, eos_token=list(ends))

    def compile(self, kind: str, text: str = "") -> Grammar:
        """kind: see `Kind`. text: a JSON schema as JSON, a regular expression, or a Lark grammar.

        ValueError for one that is wrong, or needs more than llguidance has.
        """
        from llguidance import LLMatcher

        match Kind(kind):
            case Kind.regex:
                source = LLMatcher.grammar_from_regex(text)
            case Kind.lark:
                source = LLMatcher.grammar_from_lark(text)
            case _:
                schema = text if kind == "json_schema" else '{"type": "object"}'
                source = LLMatcher.grammar_from_json_schema(*_schema(schema))
        if problem := LLMatcher.validate_grammar(source, self._tokenizer):
            problem = " ".join(re.split(r"\n +\d+ \| ", problem)[0].split())  # without the source
            problem = problem.replace(ONE_OF, "oneOf with options that overlap is not supported")
            raise ValueError(f"the {kind} cannot be followed: {problem}")
        return Grammar(LLMatcher(self._tokenizer, source, log_level=0), self.vocab_size)


def _schema(text: str) -> tuple[str, typing.Any]:
    """A JSON schema for llguidance, and its options; ValueError for one that is wrong."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the JSON schema is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("the JSON schema is nested too deep") from None
    options = {"whitespace_pattern": JSON_SPACE, "json_allowed_escapes": escapes(schema)}
    return json.dumps(prepared(schema)), options


class _Words:
    """The vocabulary, with the attributes that llguidance reads."""

    def __init__(
        self, tokenizer: Tokenizer, texts: dict[int, bytes], vocab_size: int, ends: Sequence[int]
    ):
        self._token_bytes = {i: texts[i] for i in range(vocab_size) if i in texts}
        self.tokens = [self._token_bytes.get(i, b"") for i in range(vocab_size)]
        self.special_token_ids = [i for i in range(vocab_size) if i not in texts]
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Token ids whose bytes are the text's, which a grammar forces.

        They are the tokenizer's; of a tokenizer that puts a space before a text, those after a line
        break; else, if these have special tokens, the longest token at each place.
        """
        data, encode = text.encode("utf-8"), self._tokenizer.encode
        ids, after = encode(text).tolist(), encode("\n" + text).tolist()
        for candidate in (ids, *(after[number:] for number in range(1, 4))):
            if self._spells(candidate, data):
                return candidate
        return self._longest(data)

    def _spells(self, ids: list[int], data: bytes) -> bool:
        parts = [self._token_bytes.get(i) for i in ids]
        return None not in parts and b"".join(parts) == data  # pyright: ignore

    def _longest(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._most), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), at)
            if end == at:
                break  # the vocabulary cannot write the rest
            ids.append(self._ids[data[at:end]])
            at = end
        return ids

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        return {text: i for i, text in self._token_bytes.items()}

    @functools.cached_property
    def _most(self) -> int:
        return max(map(len, self._ids), default=0)
