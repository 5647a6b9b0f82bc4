"""The text of a reply as it grows: never taken back, and at the end that of all its tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.text import Text

KINDS = ("bytes", "sentencepiece", "huggingface", "gpt2", "tiktoken", "wordpiece", "null")
TEXTS = st.text(st.sampled_from(" aeé東京🎉\n'word,."), max_size=40)
SHARED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def grown(text: Text, ids) -> list[str]:
    """What is shown after each token, up to a stop string, and at the end."""
    shown = []
    for token in ids:
        is_stopped = text.add(int(token))
        shown.append(text.shown)
        if is_stopped:
            return shown
    text.finish()
    return [*shown, text.shown]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_whole_text(kind, vocabularies):
    tokenizer, first = load_tokenizer(vocabularies[kind]), "1 " if kind == "null" else "word "

    @SHARED
    @given(TEXTS, TEXTS)
    def check(before, after):
        if kind == "null":
            before, after = ("".join(f"{ord(c) % 1000} " for c in t) for t in (before, after))
        prompt, ids = tokenizer.encode(first + before), tokenizer.encode(after)
        shown = grown(Text(tokenizer, prompt.tolist()), ids)
        assert all(b.startswith(a) for a, b in itertools.pairwise(shown))
        assert not any(text.endswith("\ufffd") for text in shown)
        told = tokenizer.decode(prompt)
        whole = tokenizer.decode(np.concatenate((prompt, ids)))
        assert whole.startswith(told) and shown[-1] == whole[len(told) :]

    check()


@SHARED
@given(TEXTS, st.lists(st.text(" aeé東🎉", min_size=1, max_size=3), max_size=3))
def test_a_text_ends_before_the_stop_string_that_is_complete_first(whole, stops):
    tokenizer = load_tokenizer("bytes")
    text = Text(tokenizer, [], tuple(stops))
    places = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    shown = grown(text, tokenizer.encode(whole))
    assert shown[-1] == (whole[: min(places)[1]] if places else whole)
    assert all(b.startswith(a) for a, b in itertools.pairwise(shown))


@SHARED
@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_are_shown_in_the_end(data):
    tokenizer = load_tokenizer("bytes")
    shown = grown(Text(tokenizer, []), data)
    assert all(b.startswith(a) for a, b in itertools.pairwise(shown))
    assert len(data) < 16 or any(shown[:-1])
    if len(data) < 16:
        assert shown[-1] == data.decode("utf-8", "replace")


def test_a_text_keeps_the_space_that_a_tokenizer_drops_at_its_start():
    class Drops:
        def decode(self, ids):
            return "".join(f" {i}" for i in ids).lstrip()

    assert grown(Text(Drops(), [1, 2]), [3])[-1] == " 3"  # pyright: ignore
