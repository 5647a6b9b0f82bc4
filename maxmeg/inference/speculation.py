"""Speculative decoding: several proposed tokens are checked by one decode step."""

from collections.abc import Sequence

LONGEST = 3  # tokens whose earlier occurrence is looked up


class NGrams:
    """Proposes what followed the newest tokens where they occurred last (Saxena, 2023, prompt
    lookup decoding). Longer matches win."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # place after an n-gram's last occurrence
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        place = len(self.tokens)
        for count in range(1, min(LONGEST, place) + 1):
            self._after[tuple(self.tokens[place - count :])] = place
        self.tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """At most this number of tokens; [] if none of the newest tokens occurred before."""
        for count in range(LONGEST, 0, -1):
            place = self._after.get(tuple(self.tokens[-count:]))
            if place is not None:
                return self.tokens[place : place + most]
        return []
