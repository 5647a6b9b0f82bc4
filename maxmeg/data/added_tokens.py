"""Tokens that a tokenizer's spec adds after the vocabulary of its files.

`special_tokens=<image>,<|end|>` by name, `extra_ids=100` T5's sentinels, `bos=<s>` and other roles
the token that has one. Names the vocabulary has keep their ids; the others follow its last.
"""

import urllib.parse
from collections.abc import Iterable, Mapping

import numpy as np

from maxmeg.data.tokenizers import (
    ROLES,
    SENTINEL,
    Spec,
    Tokenizer,
    find_sentinels,
    identity_of,
)

MAX_EXTRA_IDS = 2**16


class ExtendedTokenizer(Tokenizer):
    """A tokenizer and more tokens, which no text makes unless the caller marks them."""

    def __init__(self, base: Tokenizer, names: list[str], roles: Mapping[str, str]) -> None:
        self.base, self.spec = base, base.spec
        self._new: dict[str, int] = {}
        # An end that was appended for want of one gives its place to the end that is named.
        first = base.model_size if "eod" in roles else base.vocab_size
        added = {}
        for name in dict.fromkeys([*names, *roles.values()]):
            found = base.token_id(name)
            if found is None:
                found = self._new[name] = first + len(self._new)
            elif name in names or name == roles.get("eod"):
                _check_no_text(base, name, found)
            added[name] = found
        self.added = added
        self._names = {i: name for name, i in self._new.items()}
        self.vocab_size = self.model_size = first + len(self._new)
        self.eod = added[roles["eod"]] if "eod" in roles else base.eod
        for role in ROLES[1:]:
            setattr(self, role, added[roles[role]] if role in roles else getattr(base, role))
        self.unk, self.opening = base.unk, base.opening
        kept = {i for i in base.special_ids if i < first}
        named = (added[name] for name in names)
        self.special_ids = frozenset({*kept, *self._new.values(), *named, self.eod})
        self.sentinels = find_sentinels(self.token_id)
        self.identity = self._identity()

    def _identity(self) -> str:
        """The files' own where nothing has changed."""
        given = [getattr(self, role) for role in ROLES]
        if not self._new and given == [getattr(self.base, role) for role in ROLES]:
            return self.base.identity
        kind, _, digest = self.base.identity.partition(":")
        return identity_of(kind, digest.encode(), repr((sorted(self._new.items()), given)).encode())

    def encode(self, text: str) -> np.ndarray:
        return self.base.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.base.decode_marked(ids, self._names)

    def token_id(self, name: str) -> int | None:
        return self._new.get(name, self.base.token_id(name))

    def encode_marked(self, text: str, marks: Mapping[str, int]) -> np.ndarray:
        return self.base.encode_marked(text, marks)


class ExtendedSpansTokenizer(ExtendedTokenizer):
    """Of one that knows where its tokens lie in a text."""

    def encode_spans(
        self, text: str, marks: Mapping[str, int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        return self.base.encode_spans(text, marks)  # pyright: ignore[reportAttributeAccessIssue]


def extended(base: Tokenizer, spec: Spec) -> Tokenizer:
    """`base` with what the options of its spec add."""
    spans = hasattr(base, "encode_spans")
    made = ExtendedSpansTokenizer if spans else ExtendedTokenizer
    return made(base, wanted_names(spec.options), spec.roles)


def wanted_names(options: Mapping[str, str]) -> list[str]:
    """special_tokens and extra_ids, in the order of their ids."""
    words = options["special_tokens"].split(",") if "special_tokens" in options else []
    names = list(map(urllib.parse.unquote, words))
    if not all(names) or len(set(names)) < len(names):
        twice = [name for name in names if names.count(name) > 1]
        raise ValueError(
            f"tokenizer option special_tokens={options['special_tokens']} "
            + (f"names {twice[0]!r} twice" if any(twice) else "has an empty name")
            + ": write each name once, with commas between (a comma itself is %2C)"
        )
    count = options.get("extra_ids", "0")
    if not count.isdecimal() or int(count) > MAX_EXTRA_IDS:
        raise ValueError(
            f"tokenizer option extra_ids={count} must be a whole number up to {MAX_EXTRA_IDS}"
        )
    extra = map(SENTINEL.format, range(int(count)))
    return list(dict.fromkeys([*names, *extra]))


def _check_no_text(base: Tokenizer, name: str, token: int) -> None:
    if token not in base.special_ids and token != base.unk and token in base.encode(name):
        raise ValueError(
            f"tokenizer {base.spec!r}: its vocabulary makes {name!r} of text already, so text "
            "would forge it: leave it out, or choose another name"
        )
