"""The text of new tokens, as far as it is known, and the strings that end it."""

from collections.abc import Sequence

from maxmeg.data.tokenizers.tokenizer import Tokenizer

CONTEXT = 8  # earlier tokens that are decoded with new ones: spaces depend on them
MOST_WAITING = 16  # tokens that may wait for the rest of a character
MOST_PARTS = 4  # tokens of a character, each a byte
_INCOMPLETE = "\ufffd"  # decoded from the first bytes of a character


class Text:
    """The text of tokens that follow a prompt.

    `output` only grows, and at the end it is the whole text: it has no half of a character, nothing
    that may be the beginning of a stop string, and nothing from the first stop string on.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, stops
        self._follow(list(prompt[-CONTEXT:]))
        self._text = self.output = ""
        self.begin = 0

    def add(self, token: int) -> bool:
        """Add a token; return whether a stop string is complete, which ends the text."""
        before = self._decoded() if self._waiting else ""
        self._waiting.append(token)
        text = self._decoded()
        # Bytes that still are U+FFFD when the text goes on were not the beginning of a character.
        stays = not text.endswith(_INCOMPLETE) and text.startswith(before)
        self.begin = len(self._text) + len(before if stays else before.rstrip(_INCOMPLETE))
        if text.endswith(_INCOMPLETE) and len(self._waiting) < MOST_WAITING:
            return False
        return self._append(text)

    def finish(self) -> bool:
        """Show what still waits; return as `add`."""
        if self._append(self._decoded()):
            return True
        self.output = self._text
        return False

    def _decoded(self) -> str:
        """The text of the waiting tokens after their context."""
        decode, before = self.tokenizer.decode, self._before
        text = decode(self._context + self._waiting)
        return text.removeprefix(before) if text.startswith(before) else decode(self._waiting)

    def _follow(self, ids: list[int]) -> None:
        """Let new tokens follow the last of these, from the beginning of a character on: some
        tokenizers decode all bytes in a row to U+FFFD if one of them belongs to none."""
        newest = ids[-CONTEXT:]
        starts = range(min(MOST_PARTS, len(newest)))
        for context in (*(newest[start:] for start in starts), newest):
            self._context, self._before = context, self.tokenizer.decode(context)
            if _INCOMPLETE not in self._before:
                break
        self._waiting: list[int] = []

    def _append(self, text: str) -> bool:
        length = len(self._text)
        self._text += text
        self._follow(self._context + self._waiting)
        places = [
            place
            for stop in self.stops
            if (place := self._text.find(stop, max(length - len(stop) + 1, 0))) >= 0
        ]
        if places:
            self.output = self._text = self._text[: min(places)]
            return True
        self.output = self._text[: len(self._text) - self._overlap()]
        return False

    def _overlap(self) -> int:
        """The most characters at the end of the text with which a stop string begins."""
        most = max(map(len, self.stops), default=1) - 1
        for count in range(min(most, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-count:]) for stop in self.stops):
                return count
        return 0
