"""Checks real chat templates: `python benchmarks/chat_templates.py TOKENIZER TEMPLATE.jinja [...]`.

TOKENIZER is a spec as in `data.tokenizer`. For each template, 200 random conversations are made
ready for training; the tokens before each trained turn must be those of `generate` and the server
for the messages before it, and the turn must be the text that the template writes after them; or
the end of this text, in templates that change the last question as soon as its answer follows. The
counts of conversations, texts and turns are printed, with the first reason for a refusal, and the
end of the template's turns.
"""

import collections
import json
import random
import sys
from pathlib import Path

import numpy as np

from maxmeg.config.data import DataConfig, Objective
from maxmeg.config.schema import Config
from maxmeg.data.chat.answers import encode_turns
from maxmeg.data.chat.ends import end_tokens
from maxmeg.data.chat.template import ChatTemplate, load_chat_template
from maxmeg.data.chat.turns import BadRow, find_turns
from maxmeg.data.prepare.documents import Record
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer, special_name
from maxmeg.inference.prompts import encoded

WORDS = ["the", " fox", "\n", "\n\n", "  ", "naïve", "東京", "🎉", ".", "1234", "<b>", "'s", "\t"]
NUM_CONVERSATIONS = 200
SYSTEM, QUESTION = {"role": "system", "content": "a"}, {"role": "user", "content": "b"}


def conversation(rng: random.Random) -> list[dict]:
    """One to four questions, some with a system message, some answers with thoughts."""

    def text() -> str:
        return "".join(rng.choices(WORDS, k=rng.randint(1, 9)))

    messages = [{"role": "system", "content": text()}] * rng.randint(0, 1)
    thinks = rng.random() < 0.5
    for _ in range(rng.randint(1, 4)):
        thought = f"<think>\n{text().strip()}\n</think>\n\n" * thinks
        messages += [{"role": "user", "content": text()}]
        messages += [{"role": "assistant", "content": thought + text()}]
    return messages


def trained_turns(tokenizer: Tokenizer, turns) -> dict[tuple[int, ...], str]:
    """The text of each trained turn by the tokens before it."""
    found = {}
    for ids, has_loss in encode_turns(tokenizer, turns):
        edges = np.flatnonzero(np.diff(has_loss, prepend=0, append=0))
        for begin, end in edges.reshape(-1, 2):
            found[tuple(ids[:begin].tolist())] = tokenizer.decode(ids[begin:end])
    return found


def wanted_turns(
    tokenizer: Tokenizer, config: Config, template: ChatTemplate, messages: list[dict]
) -> dict[tuple[int, ...], tuple[str, str]]:
    """The prompt for each answer and the text up to its end, by the tokens of the prompt."""
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = encoded(tokenizer, config, [{"messages": messages[:end]} for end in ends])
    asked = template.render([messages[:end] for end in ends])
    wholes = template.render([messages[: end + 1] for end in ends], add_generation_prompt=False)
    return {
        tuple(ids.tolist()): (before, whole)
        for ids, before, whole in zip(prompts, asked, wholes, strict=True)
    }


def check(tokenizer: Tokenizer, path: Path) -> str:
    """The counts of a template as text."""
    rng = random.Random(0)
    data = DataConfig(objective=Objective.sft, chat_template=str(path))
    config, template = Config(data=data), load_chat_template(tokenizer, str(path))
    chats = [conversation(rng) for _ in range(NUM_CONVERSATIONS)]
    if "error" in template.answer([{"messages": [SYSTEM, QUESTION]}]):
        chats = [messages[messages[0]["role"] == "system" :] for messages in chats]
    rows = [json.dumps({"messages": messages}).encode() for messages in chats]
    records = [Record("chats", i, row) for i, row in enumerate(rows, 1)]
    counts: collections.Counter[str] = collections.Counter()
    reason = ""
    for messages, (_, turns) in zip(chats, find_turns(template, records), strict=True):
        if isinstance(turns, BadRow):
            counts["refused"] += 1
            reason = reason or str(turns)
            continue
        found = trained_turns(tokenizer, turns)
        wanted = wanted_turns(tokenizer, config, template, messages)
        counts["trained"] += 1
        counts["texts"] += len(encode_turns(tokenizer, turns))
        counts["turns"] += len(wanted)
        counts["other prompt"] += len(found.keys() ^ wanted.keys())
        for ids in found.keys() & wanted.keys():
            (before, whole), text = wanted[ids], found[ids]
            is_same = whole.removeprefix(before).strip() == text.strip()  # decoding drops spaces
            counts["other text"] += not is_same and whole.startswith(before)
            counts["changed question"] += not whole.startswith(before) and whole.endswith(text)
    ends = end_tokens(tokenizer, data, tokenizer.vocab_size)
    names = ", ".join(special_name(tokenizer, i) for i in ends)
    shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{path.stem}: {shown}; ends: {names} {reason}"


def main(spec: str, *paths: str) -> None:
    tokenizer = load_tokenizer(spec)
    for path in map(Path, paths):
        print(check(tokenizer, path), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
