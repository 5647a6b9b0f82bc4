"""What to generate for a prompt, and the text of the new tokens."""

import dataclasses

import numpy as np

from maxmeg.config.model import ModelConfig
from maxmeg.inference.load import Trained
from maxmeg.inference.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Request:
    """What to generate for each prompt: at most `num_tokens`, stopping at a token in `ends`."""

    num_tokens: int
    sampling: Sampling
    ends: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens={self.num_tokens} must be at least 1")


def check_causal(model: ModelConfig) -> None:
    """ValueError for a model that does not predict next tokens."""
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


def check_ids(ids: np.ndarray, vocab_size: int, where: str = "") -> None:
    """ValueError if a token has no embedding."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"{where}token {ids.max()} is not in the model's vocabulary of {vocab_size}: the "
            "tokenizer is not the model's, or has grown since"
        )


def text_after(trained: Trained, prompt: np.ndarray, following: np.ndarray) -> str:
    """Decode the tokens `following` a prompt together with it, which keeps a leading space."""
    decode = trained.tokenizer.decode
    before, whole = decode(prompt), decode(np.concatenate((prompt, following)))
    return whole.removeprefix(before) if whole.startswith(before) else decode(following)
