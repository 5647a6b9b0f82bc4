"""LAMBADA's cloze accuracy and WikiText's word-level perplexity, without training, as Megatron-LM
measures them (tasks LAMBADA and WIKITEXT103)."""

import math
import re
from collections.abc import Callable
from pathlib import Path

from maxmeg.data.prepare.documents import decode, read_records
from maxmeg.evals.harness import HarnessModel, Pair
from maxmeg.inference.load import Trained

# WikiText's text with spaces around punctuation -> plain text, in this order. The pattern between
# slashes is a slip of the original, which matches nothing; scores are comparable with it in place.
WIKITEXT = (
    *(("s '", "s'"), (re.compile("/' [0-9]/"), "/'[0-9]/")),
    *((f" @{mark}@ ", mark) for mark in "-,."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
    *(("= = = =", "===="), ("= = =", "==="), ("= =", "==")),
    *((" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"), (" \n", "\n"), ("\n ", "\n")),
    *((" N ", " 1 "), (" 's", "'s")),
)


def plain_wikitext(text: str) -> str:
    """The text of a WikiText file without the spaces around punctuation."""
    for old, new in WIKITEXT:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text


def lambada(model: HarnessModel, path: str, limit: int = 0) -> dict[str, float]:
    """Return the share of passages whose last word greedy decoding gives, all of its tokens, and
    the perplexity of last words.

    path: JSON lines with text, as OpenAI published them. limit: number of passages; 0: all.
    ValueError for a row without a text of two words.
    """
    pairs: list[Pair] = []
    for record in read_records([path]):
        try:
            row = record.value()
        except ValueError as error:
            raise ValueError(f"{record.place}: {error}") from None
        text = row.get("text") if isinstance(row, dict) else None
        text = text if isinstance(text, str) else ""
        words = text.split()
        if len(words) < 2:
            raise ValueError(f"{record.place}: a passage is an object with a text of two words")
        before = text[: text.rfind(words[-1])].strip()
        pairs.append(model.encode_pair(before, f" {words[-1]}"))
        if len(pairs) == limit:
            break
    if not pairs:
        raise ValueError(f"{path} holds no passage")
    scores = model.scores(pairs)
    nats = -sum(value for value, _ in scores) / len(scores)
    right = sum(is_greedy for _, is_greedy in scores)
    shares = {"accuracy": right / len(scores), "word_perplexity": math.exp(min(nats, 700))}
    return shares | {"passages": len(scores)}


def wikitext(model: HarnessModel, path: str, limit: int = 0, stride: int = 32) -> dict[str, float]:
    """Return the perplexity per token and per word of the original text, split at spaces.

    Windows of the model's context advance by `stride` tokens; each token is scored once, after at
    least context - stride others where the text has them. limit: number of windows; 0: all.
    ValueError for a text that is shorter than two tokens.
    """
    try:
        text = decode(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    ids = model.trained.tokenizer.encode(plain_wikitext(text)).tolist()
    num_words, length = len(text.strip().split(" ")), model.max_length
    if len(ids) < 2 or num_words < 2:
        raise ValueError(f"{path} holds no text of two words")
    stride = min(max(stride, 1), length)
    pairs: list[Pair] = [(ids[:1], ids[1 : length + 1])]
    for start in range(stride, max(len(ids) - 1 - length, 0) + stride, stride):
        middle = start + length - stride + 1
        pairs.append((ids[start:middle], ids[middle : middle + stride]))
        if len(pairs) == limit:
            break
    pairs = pairs[: limit or None]
    nats = -sum(value for value, _ in model.scores(pairs))
    scored = sum(len(following) for _, following in pairs)
    ratio = (len(ids) - 1) / (num_words - 1)
    means = {"token_perplexity": nats / scored, "word_perplexity": nats / scored * ratio}
    perplexities = {name: math.exp(min(value, 700)) for name, value in means.items()}
    return perplexities | {"tokens": scored, "tokens_per_word": ratio}


TASKS: dict[str, Callable[..., dict[str, float]]] = {"lambada": lambada, "wikitext": wikitext}


def is_task(name: str) -> bool:
    """Whether the name of a task is one of these, with its file: lambada:FILE."""
    return name.partition(":")[0] in TASKS and ":" in name


def run_zero_shot(trained: Trained, tasks: list[str], batch: int, limit: int = 0) -> list[str]:
    """Return a line of scores for each task NAME:FILE."""
    model, lines = HarnessModel(trained, batch), []
    for task in tasks:
        name, _, path = task.partition(":")
        if not Path(path).is_file():
            raise ValueError(f"task {task}: there is no file {path}")
        scores = TASKS[name](model, path, limit)
        lines.append(f"{name}: " + ", ".join(f"{key} {value:.6g}" for key, value in scores.items()))
    return lines
