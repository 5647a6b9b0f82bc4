"""What to generate for a prompt, and the answer."""

import dataclasses
import typing

import numpy as np

from maxmeg.config.model import ModelConfig
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.grammar import Grammar
from maxmeg.inference.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Request:
    """What to generate for a prompt: at most `num_tokens` tokens.

    ends: tokens that end the reply. stops: strings that end its text, and are not part of it.
    grammar: that the reply follows. prompt_logprobs: whether the log-probabilities of the prompt's
    tokens are returned; num_tokens may then be 0. adapter: its name, "" for the base model.
    """

    num_tokens: int
    sampling: Sampling
    ends: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    grammar: Grammar | None = None
    prompt_logprobs: bool = False
    adapter: str = ""

    def __post_init__(self):
        least = 0 if self.prompt_logprobs else 1
        if self.num_tokens < least:
            raise ValueError(f"num_tokens={self.num_tokens} must be at least {least}")
        if not all(self.stops):
            raise ValueError(f"stops={self.stops}: a stop string is empty")


@dataclasses.dataclass
class Reply:
    """The answer to a request, as far as it is known.

    tokens: new ones, without the end token. logprobs: of each. top: (token, log-probability) of the
    most likely ones at each place, if the request asks for them. prompt_logprobs, prompt_top: the
    same for the prompt's tokens after the first, if the request asks for them. text: of the tokens;
    it only grows (`Text`). reason: why the reply ended: "stop" (an end token, a stop string, or a
    complete grammar), "length", "cancelled", "grammar" (it became too complex to be followed) or
    "error" (the engine failed); empty while it goes on. error: what went wrong.
    """

    prompt: tuple[int, ...]
    request: Request
    seed: int
    number: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    text: str = ""
    reason: str = ""
    error: str = ""


def sampling_columns(reply: Reply, step: int) -> dict[str, typing.Any]:
    """How token number `step` of a reply is sampled: the fields of `sampling.Rows` by name."""
    sampling, seed = reply.request.sampling, np.uint32(reply.seed & 0xFFFFFFFF).view(np.int32)
    floats = {n: float(getattr(sampling, n)) for n in ("temperature", "top_p", "min_p")}
    return {**floats, "top_k": sampling.top_k, "seed": seed, "number": reply.number, "step": step}


def check_alone(model: ModelConfig) -> None:
    """ValueError for an encoder-decoder."""
    if model.has_source:
        raise ValueError(
            f"model.layers={model.layers!r}: an encoder-decoder reads a source beside the target, "
            "and this takes one text; generate from it, or measure its loss (maxmeg evaluate)"
        )


def check_causal(model: ModelConfig) -> None:
    """ValueError for a model that does not predict next tokens."""
    if model.has_neighbours:
        raise ValueError(
            f"model.layers={model.layers!r}: RETRO reads neighbours of its own text, which only "
            "`maxmeg generate RUN_DIR --encoder=RUN_DIR` looks up; its loss can be measured "
            "(maxmeg evaluate)"
        )
    if model.head.num_classes:
        raise ValueError(
            f"model.head.num_classes={model.head.num_classes}: a classifier does not continue "
            "text; maxmeg.load(...).classify returns classes"
        )
    if not model.attention.causal:
        raise ValueError(
            "model.attention.causal=false: a bidirectional model predicts masked tokens and does "
            "not continue text; its loss can be measured (maxmeg evaluate)"
        )


def check_length(prompt_length: int, num_tokens: int, max_position: int, where: str = "") -> None:
    """ValueError if a prompt is empty, or exceeds the context with its new tokens."""
    if prompt_length == 0:
        raise ValueError(f"{where}the prompt is empty: give at least one token to continue")
    if prompt_length + num_tokens > max_position:
        raise ValueError(
            f"{where}a prompt of {prompt_length} tokens and {num_tokens} new ones exceed the "
            f"context of {max_position}: shorten the prompt or ask for at most "
            f"{max(max_position - prompt_length, 0)} tokens"
        )


def check_source(length: int, prompt_logprobs: bool, longest: int, where: str = "") -> None:
    """ValueError if a source is empty or too long, or its log-probabilities are asked for."""
    if prompt_logprobs:
        raise ValueError(
            f"{where}prompt_logprobs=true: an encoder-decoder has no log-probabilities of its "
            "source; ask for those of the reply"
        )
    if not 0 < length <= longest:
        raise ValueError(
            f"{where}the source has {length} tokens, and the encoder takes 1 to {longest}: "
            "shorten it"
        )


def check_ids(
    ids: np.ndarray, vocab_size: int, where: str = "", tokenizer: Tokenizer | None = None
) -> None:
    """ValueError if a token has no embedding. tokenizer: names the token."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        token = int(ids.max())
        is_named = tokenizer is not None and vocab_size <= token < tokenizer.vocab_size
        name = f" ({tokenizer.decode([token])!r})" if is_named else ""  # pyright: ignore
        raise ValueError(
            f"{where}token {token}{name} is not in the model's vocabulary of {vocab_size}: leave "
            "this token out of the text, or use the model's own tokenizer"
        )
