"""The text of a reply as it grows: never taken back, and at the end that of all its tokens."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_files import decoding_kinds

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.text import Text
from maxmeg.server.answers import ChatChoice, TextChoice
from maxmeg.server.worker import Update

KINDS = ("bytes", "sentencepiece", "huggingface", "gpt2", "tiktoken", "wordpiece", "null", "llama")
TEXTS = st.text(st.sampled_from(" aeé東京🎉\n'word,."), max_size=40)
SHARED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def grown(text: Text, ids, begins: list[int] | None = None) -> list[str]:
    """What is shown after each token, up to a stop string, and at the end."""
    shown = []
    for token in ids:
        is_stopped = text.add(int(token))
        shown.append(text.output)
        if begins is not None:
            begins.append(text.begin)
        if is_stopped:
            return shown
    text.finish()
    return [*shown, text.output]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_whole_text(kind, vocabularies, tmp_path):
    spec = decoding_kinds(tmp_path)[kind] if kind == "llama" else vocabularies[kind]
    tokenizer, first = load_tokenizer(spec), "1 " if kind == "null" else "word "

    @SHARED
    @given(TEXTS, TEXTS)
    def check(before, after):
        if kind == "null":
            before, after = ("".join(f"{ord(c) % 1000} " for c in t) for t in (before, after))
        prompt, ids = tokenizer.encode(first + before), tokenizer.encode(after)
        shown = grown(Text(tokenizer, prompt.tolist()), ids, begins := [])
        for token, begin in zip(ids.tolist(), begins, strict=True):
            known = tokenizer.known_bytes.get(token, b"")
            with contextlib.suppress(UnicodeDecodeError):  # a part of a character
                assert shown[-1][begin:].startswith(known.decode())
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


@pytest.mark.parametrize("echo", [False, True])
def test_the_tokens_of_a_character_share_a_place_and_have_bytes(echo):
    """In the log-probabilities of both APIs, which come in two pieces."""
    ids, begins = [*"Héllo 👍".encode()], [0, 1, 1, 2, 3, 4, 5, 6, 6, 6, 6]
    parts = ids[:8], ids[8:]
    before = [-1.0] * (len(ids) - 1) * echo
    updates = [Update(0, "", part, [-1.0] * len(part), [], before, [], "", "") for part in parts]
    choice = TextChoice(load_tokenizer("bytes"), ids, echo)
    found = (choice.update(update, True)["logprobs"]["text_offset"] for update in updates)
    assert [*itertools.chain(*found)] == begins * echo + [7 * echo + begin for begin in begins]
    chat = ChatChoice(load_tokenizer("bytes"), None)
    entries = (chat.update(update, True)["logprobs"]["content"] for update in updates)
    assert [entry["bytes"] for entry in itertools.chain(*entries)] == [[i] for i in ids]
