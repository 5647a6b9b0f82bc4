"""Continue prompts or chats: python -m maxmeg.generate --run_dir=runs/gpt --prompt="def main"

Several at once: --prompt again, or --prompts=FILE.jsonl with a {"prompt": ...} or {"messages":
[{"role": "user", "content": ...}, ...]} a line; --output=FILE.jsonl holds each line again with its
"completion". --chat makes a message of the user of every prompt.
"""

import dataclasses
import json
import typing
from collections.abc import Sequence

import numpy as np

from maxmeg.config.flags import run_command
from maxmeg.config.schema import setting
from maxmeg.inference.chat import end_tokens, load_chat_template, with_system
from maxmeg.inference.decode import BATCH, Request, Writer, text_after
from maxmeg.inference.load import Trained, load_run
from maxmeg.inference.sampling import Sampling
from maxmeg.parallel import multihost
from maxmeg.parallel.mesh import local_mesh

Record = dict[str, typing.Any]  # has a "prompt", or "messages"


@dataclasses.dataclass
class Options:
    """What to continue, and how tokens are chosen."""

    prompt: Sequence[str] = setting((), "text to continue; may be given several times")
    prompts: str = setting("", "file of prompts and chats, JSON a line, in place of --prompt")
    output: str = setting("", "file for what is written, JSON a line; empty: the screen")
    chat: bool = setting(False, "prompts are messages of a user, answered by the chat template")
    system: str = setting("", "message of the system before chats that have none")
    opening: bool = setting(True, "prompts open with the tokens that the tokenizer.json asks for")
    run_dir: str = setting("runs/gpt", "folder of the run, or of a converted model")
    step: int = setting(-1, "of the checkpoint; -1: the newest intact one")
    num_tokens: int = setting(100, "tokens to write at most after each prompt, >= 1")
    batch: int = setting(BATCH, "prompts continued at once")
    temperature: float = setting(0.8, "0: always the likeliest token")
    top_k: int = setting(0, "only the k likeliest tokens; 0: all")
    top_p: float = setting(1.0, "only the likeliest tokens with that much probability together")
    seed: int = setting(0, "of the choice")
    tensor: int = setting(1, "devices that share the model")


def read_records(options: Options) -> list[Record]:
    """What to continue, from either flag; ValueError for lines that say neither or both."""
    if bool(options.prompt) == bool(options.prompts):
        raise ValueError(
            "give --prompt=TEXT, once or more, or --prompts=FILE.jsonl, one of the two"
        )
    records: list[Record] = [{"prompt": text} for text in options.prompt]
    if options.prompts:
        with open(options.prompts, encoding="utf-8") as file:
            lines = list(enumerate(file, 1))
        for number, line in lines:
            if line.strip():
                records.append(read_record(line, f"{options.prompts} line {number}"))
        if not records:
            raise ValueError(f"{options.prompts} holds no prompt: write a JSON object a line")
    if options.chat:
        records = [as_chat(record) for record in records]
    return records


def read_record(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise ValueError(f'{where} is not an object with either "prompt" or "messages"')
    if not isinstance(record.get("prompt", ""), str):
        raise ValueError(f"{where}: prompt={record['prompt']!r} is not text")
    return record


def as_chat(record: Record) -> Record:
    if "messages" in record:
        return record
    rest = {name: value for name, value in record.items() if name != "prompt"}
    return {"messages": [{"role": "user", "content": record["prompt"]}], **rest}


def encoded(trained: Trained, records: Sequence[Record], options: Options) -> list[np.ndarray]:
    """Tokens of each record; a chat template's text names all of its special tokens itself."""
    tokenizer = trained.tokenizer
    opening = np.array(tokenizer.opening if options.opening else (), np.int32)
    chats = [with_system(r["messages"], options.system) for r in records if "messages" in r]
    texts = iter(load_chat_template(tokenizer).render(chats) if chats else [])
    return [
        tokenizer.encode(next(texts))
        if "messages" in record
        else np.concatenate((opening, tokenizer.encode(record["prompt"])))
        for record in records
    ]


def main(options: Options) -> None:
    multihost.order_cpu_collectives()
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    records = read_records(options)
    step = None if options.step < 0 else options.step
    trained = load_run(options.run_dir, step, local_mesh(options.tensor))
    ends = end_tokens(trained.tokenizer, trained.config.model.vocab_size)
    write = Writer(trained, Request(options.num_tokens, sampling, ends), options.batch)
    prompts = encoded(trained, records, options)
    found = write(prompts, options.seed)
    texts = [text_after(trained, ids, new) for ids, new in zip(prompts, found, strict=True)]
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            for record, text in zip(records, texts, strict=True):
                print(json.dumps(record | {"completion": text}), file=file)
        return
    for number, (record, text) in enumerate(zip(records, texts, strict=True)):
        print("\n---\n" * (number > 0) + record.get("prompt", "") + text)


if __name__ == "__main__":
    run_command(main, Options, needs_config=False)
