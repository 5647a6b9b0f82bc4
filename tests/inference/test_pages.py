"""Pages are neither lost nor given twice, and are shared by equal beginnings alone."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from maxmeg.inference import pages as module
from maxmeg.inference.pages import Pages

COUNT, SLOTS = 6, 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)  # few, so that prompts are alike
SALTS = st.sampled_from([b"", b"long"])


class Requests(RuleBasedStateMachine):
    """Requests take pages, publish what they have read, and leave."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.pages, self.held_pages = Pages(COUNT, SLOTS), {}
        self.contents: dict[int, tuple] = {}  # what has been read into each page
        self.numbers = iter(range(10**6))

    @rule(target=held, tokens=TOKENS, salt=SALTS, publishes=st.booleans())
    def enter(self, tokens, salt, publishes):
        shared = self.pages.share(tokens, salt)
        for i, page in enumerate(shared):
            assert self.contents[page] == (salt, tuple(tokens[: (i + 1) * SLOTS]))
        missing = -(-len(tokens) // SLOTS) - len(shared)
        number = next(self.numbers)
        self.held_pages[number] = shared
        if missing <= self.pages.available:
            new = [self.pages.take() for _ in range(missing)]
            others = [page for pages in self.held_pages.values() for page in pages]
            assert len({*new}) == missing and not {*new} & {*others}
            self.held_pages[number] = shared + new
            for i in range(len(shared), len(shared) + missing):
                filled = tuple(tokens[: (i + 1) * SLOTS])
                self.contents[self.held_pages[number][i]] = salt, filled
            if publishes:
                self.pages.publish(self.held_pages[number], tokens, salt)
        return number

    @rule(number=consumes(held))
    def leave(self, number):
        for page in reversed(self.held_pages.pop(number)):
            self.pages.release(page)

    @invariant()
    def all_pages_are_accounted_for(self):
        readers = [page for pages in self.held_pages.values() for page in pages]
        assert [page.readers for page in self.pages.pages] == [*map(readers.count, range(COUNT))]
        used, free, unused = {*readers}, {*self.pages.free}, {*self.pages.unused}
        assert len(used) + len(free) + len(unused) == COUNT == len(used | free | unused)
        assert unused <= {*self.pages.numbers.values()} <= used | unused


Requests.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestRequests = Requests.TestCase


def test_equal_digests_of_other_tokens_are_no_hit(monkeypatch):
    monkeypatch.setattr(module, "digest_of", lambda before, tokens: b"same")
    pages = Pages(4, SLOTS)
    pages.publish([pages.take()], [1, 1])
    assert pages.share([0, 0]) == [] and pages.share([1, 1], b"salt") == []
    assert pages.share([1, 1]) == [0]


def test_the_page_unused_for_longest_is_given_away():
    pages = Pages(2, SLOTS)
    for tokens in ([0, 0], [1, 1]):
        page = pages.take()
        pages.publish([page], tokens)
        pages.release(page)
    pages.release(*pages.share([0, 0]))
    pages.take()
    assert pages.share([1, 1]) == [] and len(pages.share([0, 0])) == 1
