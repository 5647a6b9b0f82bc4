"""Pages of the cache: which are free, who reads them, and which a new prompt can share.

A page that prefill has filled is found again by its tokens and all tokens before them. It stays
after its last reader has gone, until its place is needed: then the page unused for longest goes.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Sequence

ROOT = b""  # the digest before a prompt's first page


@dataclasses.dataclass
class Page:
    """readers: number of requests that use it. digest: of its tokens and all before them, if it can
    be shared; tokens: of it, compared at every hit; before: the digest of the page before it."""

    readers: int = 0
    digest: bytes = ROOT
    before: bytes = ROOT
    tokens: tuple[int, ...] = ()


class Pages:
    """Pages 0 .. count - 1 of `slots` tokens each."""

    def __init__(self, count: int, slots: int):
        self.slots = slots
        self.pages = [Page() for _ in range(count)]
        self.free = list(range(count))[::-1]  # taken from the end
        self.unused: collections.OrderedDict[int, None] = collections.OrderedDict()
        self.numbers: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Number of pages that can be taken."""
        return len(self.free) + len(self.unused)

    def take(self) -> int:
        """A page for one reader; the caller has seen that one is available."""
        if self.free:
            number = self.free.pop()
        else:
            number, _ = self.unused.popitem(last=False)
            del self.numbers[self.pages[number].digest]
        self.pages[number] = Page(readers=1)
        return number

    def release(self, number: int) -> None:
        """One reader less."""
        page = self.pages[number]
        page.readers -= 1
        if not page.readers:
            if page.digest:
                self.unused[number] = None
            else:
                self.free.append(number)

    def share(self, tokens: Sequence[int], salt: bytes = ROOT) -> list[int]:
        """The known pages that begin with these tokens, each with one reader more.

        salt: what else the keys and values depend on.
        """
        numbers, before = [], salt
        for page_tokens in self._whole_pages(tokens):
            number = self.numbers.get(digest := digest_of(before, page_tokens))
            if number is None:
                break
            page = self.pages[number]
            if (page.before, page.tokens) != (before, page_tokens):
                break
            page.readers += 1
            self.unused.pop(number, None)
            numbers.append(number)
            before = digest
        return numbers

    def publish(self, numbers: Sequence[int], tokens: Sequence[int], salt: bytes = ROOT) -> None:
        """Let others share the pages that these tokens fill; of equal ones the first is kept."""
        before = salt
        for number, page_tokens in zip(numbers, self._whole_pages(tokens), strict=False):
            digest = digest_of(before, page_tokens)
            page = self.pages[number]
            if not page.digest and digest not in self.numbers:
                page.digest, page.before, page.tokens = digest, before, page_tokens
                self.numbers[digest] = number
            before = digest

    def _whole_pages(self, tokens: Sequence[int]):
        for start in range(0, len(tokens) - self.slots + 1, self.slots):
            yield tuple(tokens[start : start + self.slots])


def digest_of(before: bytes, tokens: Sequence[int]) -> bytes:
    hashed = hashlib.blake2b(before, digest_size=16)
    hashed.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    return hashed.digest()
