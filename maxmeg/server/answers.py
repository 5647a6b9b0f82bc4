"""Replies as the JSON objects of OpenAI's API."""

import secrets
import string
import typing

from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.text import Text
from maxmeg.server.tools import ToolForm
from maxmeg.server.worker import Update

LEAST = -9999.0  # log-probability in an answer
ID_SIZE, ID_LETTERS = 9, string.ascii_letters + string.digits  # Mistral's templates take no others
Top = list[tuple[int, float]]


class TextChoice:
    """A choice of /v1/completions. echo: whether it begins with the prompt."""

    object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, prompt: typing.Sequence[int], echo: bool) -> None:
        self.tokenizer, self.prompt, self.echo = tokenizer, prompt, echo
        self._text, self._start = Text(tokenizer, prompt), 0

    def update(self, update: Update, logprobs: bool) -> dict:
        tokens, values, top = update.tokens, update.logprobs, update.top
        text, echo, self.echo = update.text, self.echo, False
        begins = []
        if echo:
            before = self.tokenizer.decode(self.prompt)
            text, self._start = before + text, len(before)
            begins = _begins(Text(self.tokenizer, []), self.prompt) if logprobs else []
            tokens, values = [*self.prompt, *tokens], [None, *update.prompt_logprobs, *values]
            top = [None, *update.prompt_top, *top] if update.prompt_top or top else []
        logprobs_of_text = None
        if logprobs:
            begins += [self._start + begin for begin in _begins(self._text, update.tokens)]
            logprobs_of_text = self._logprobs(tokens, values, top) | {"text_offset": begins}
        return {"text": text, "logprobs": logprobs_of_text, "finish_reason": update.reason or None}

    def _logprobs(self, tokens, values, top) -> dict:
        names = [name_of(self.tokenizer, token) for token in tokens]
        likeliest = [
            None if value is None else self._likeliest(pairs or [], token, value)
            for token, value, pairs in zip(tokens, values, top or [None] * len(tokens), strict=True)
        ]
        values = [None if value is None else finite(value) for value in values]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": likeliest}

    def _likeliest(self, pairs: Top, token: int, value: float) -> dict[str, float]:
        """Log-probabilities by text: the largest of tokens with the same text, and `token`'s."""
        logprobs: dict[str, float] = {}
        for other, logprob in [*pairs, (token, value)]:
            logprobs.setdefault(name_of(self.tokenizer, other), finite(logprob))
        return logprobs


class ChatChoice:
    """A choice of /v1/chat/completions. form: of tool calls that are looked for in the text.
    is_single: the reply has at most one call, the first one."""

    object = "chat.completion"

    def __init__(
        self, tokenizer: Tokenizer, form: ToolForm | None, is_single: bool = False
    ) -> None:
        self.tokenizer, self.form, self.is_single = tokenizer, form, is_single
        self.text, self.content, self.calls = "", "", 0
        self.is_first = True

    def update(self, update: Update, logprobs: bool) -> dict:
        self.text += update.text
        content, calls, reason = self.text, [], update.reason
        if self.form:
            content, calls = self.form.parse(self.text, bool(reason))
            calls = calls[:1] if self.is_single else calls
        new = [
            {"id": call_id(), "type": "function", "index": index, "function": call}
            for index, call in enumerate(calls[self.calls :], self.calls)
        ]
        delta: dict = {"role": "assistant"} if self.is_first else {}
        piece, self.content = content[len(self.content) :], content
        delta |= {"content": piece} if piece or (self.is_first and not new) else {}
        delta |= {"tool_calls": new} if new else {}
        self.calls, self.is_first = len(calls), False
        reason = "tool_calls" if calls and reason == "stop" else reason
        contents = {"content": self._logprobs(update), "refusal": None} if logprobs else None
        return {"delta": delta, "logprobs": contents, "finish_reason": reason or None}

    def _logprobs(self, update: Update) -> list[dict]:
        top = update.top or [[]] * len(update.tokens)
        rows = zip(update.tokens, update.logprobs, top, strict=True)
        return [
            self._token(token, value) | {"top_logprobs": [self._token(*pair) for pair in pairs]}
            for token, value, pairs in rows
        ]

    def _token(self, token: int, logprob: float) -> dict:
        name, bytes = name_of(self.tokenizer, token), self.tokenizer.known_bytes.get(token)
        if bytes is None and "\ufffd" not in name:  # a special token, or a whole word
            bytes = name.encode("utf-8", "surrogatepass")
        bytes = None if bytes is None else [*bytes]
        return {"token": name, "logprob": finite(logprob), "bytes": bytes}


Choice = TextChoice | ChatChoice


def call_id() -> str:
    """A new id of a tool call."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_SIZE))


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token inside a text; U+FFFD for a part of a character."""
    token_bytes = tokenizer.known_bytes.get(token)
    return (
        tokenizer.decode_after([token])
        if token_bytes is None
        else token_bytes.decode("utf-8", "replace")
    )


def _begins(text: Text, tokens: typing.Sequence[int]) -> list[int]:
    """The character at which each token begins in a text that grows by them."""
    begins = []
    for token in tokens:
        text.add(token)
        begins.append(text.begin)
    return begins


def finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(LEAST, logprob)


def usage(prompts: typing.Sequence[typing.Sequence[int]], new: int) -> dict[str, int]:
    old = sum(map(len, prompts))
    return {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
