"""Tokens that the options of a tokenizer's spec add to its vocabulary.

`special_tokens=<image>,<|end|>` adds tokens by name, `extra_ids=100` adds T5's sentinels, and
`bos=<s>` and other roles name the token for that role. Names in the vocabulary keep their ids;
other names get new ids after the last one.
"""

import urllib.parse
from collections.abc import Iterable, Mapping

from maxmeg.data.tokenizers.tokenizer import (
    ROLES,
    SENTINEL,
    Tokenizer,
    identity_of,
    without,
)

MAX_EXTRA_IDS = 2**16


class ExtendedTokenizer(Tokenizer):
    """A tokenizer with added tokens, which text contains only where the caller marks them."""

    def __init__(self, base: Tokenizer, names: list[str], roles: Mapping[str, str]) -> None:
        self.base, self.spec = base, base.spec
        self.encode, self.encode_marked = base.encode, base.encode_marked
        self.encode_spans = base.encode_spans
        self._new: dict[str, int] = {}
        # If eod is named, its id replaces the appended end-of-document id.
        first = base.model_size if "eod" in roles else base.vocab_size
        self.added = added = {}
        for name in dict.fromkeys([*names, *roles.values()]):
            token = base.token_id(name)
            if token is None:
                token = self._new[name] = first + len(self._new)
            elif name in names or name == roles.get("eod"):
                _check_no_text(base, name, token)
            added[name] = token
        self._names = {i: name for name, i in self._new.items()}
        self.vocab_size = self.model_size = first + len(self._new)
        self.eod = added[roles["eod"]] if "eod" in roles else base.eod
        for role in ROLES[1:]:
            setattr(self, role, added[roles[role]] if role in roles else getattr(base, role))
        self.unk, self.opening = base.unk, base.opening
        base_ids = {i for i in base.special_ids if i < first}
        named = (added[name] for name in names)
        self.special_ids = frozenset({*base_ids, *self._new.values(), *named, self.eod})
        self.identity = self._identity()

    def _identity(self) -> str:
        """The identity of the base tokenizer where nothing has changed."""
        roles = [getattr(self, role) for role in ROLES]
        if not self._new and roles == [getattr(self.base, role) for role in ROLES]:
            return self.base.identity
        kind, _, digest = self.base.identity.partition(":")
        return identity_of(kind, digest.encode(), repr((sorted(self._new.items()), roles)).encode())

    @property
    def required_size(self) -> int:
        """With the tokens that the options name."""
        return max(self.base.required_size, self.eod + 1, *(i + 1 for i in self.added.values()))

    def decode(self, ids: Iterable[int]) -> str:
        return self.base.decode_marked(ids, self._names)

    def token_bytes(self) -> dict[int, bytes] | None:
        token_bytes = self.base.token_bytes()
        return None if token_bytes is None else without(self.special_ids, token_bytes)

    def token_id(self, name: str) -> int | None:
        return self._new.get(name, self.base.token_id(name))


def added_names(options: Mapping[str, str]) -> list[str]:
    """The names of special_tokens and extra_ids, in the order of their ids."""
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
            f"tokenizer {base.spec!r} already encodes the plain text {name!r} as this token, so "
            "text could forge it: leave it out, or choose another name"
        )
