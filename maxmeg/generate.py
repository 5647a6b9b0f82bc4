"""Continue prompts or chats, or write what an encoder-decoder (T5) makes of each prompt:
maxmeg generate runs/gpt --prompt="def main("

Repeat --prompt for several prompts, or give --prompts=FILE.jsonl with one {"prompt": ...} or
{"messages": [{"role": "user", "content": ...}, ...]} per line; --output=FILE.jsonl repeats
each line with its "completion". --chat turns every prompt into a user's message. A RETRO run
needs --encoder=RUN_DIR, the encoder that found its neighbours.
"""

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    run_module("generate")

import dataclasses
import itertools
import json
import sys
from pathlib import Path

from maxmeg.config.options import Generate as Options
from maxmeg.config.retro import Neighbours
from maxmeg.data.chat.ends import end_tokens
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import Trained, load_chosen
from maxmeg.inference.prompts import as_chat, encoded, read_records
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.processes import multihost
from maxmeg.retrieval.generation import Generator
from maxmeg.retrieval.neighbours import load_encoder, open_search
from maxmeg.runtime.faults.out_of_memory import explains_out_of_memory
from maxmeg.runtime.gpu_environment import set_gpu_environment


def make_engine(trained: Trained, options: Options, lanes: int) -> Engine | Generator:
    """Return an Engine, or for RETRO a Generator. ValueError for RETRO without --encoder, and for
    --encoder with a model that reads no neighbours."""
    config, kind = trained.config, trained.config.data.read_neighbours
    looks_up = config.model.has_neighbours and kind is not Neighbours.none
    if (options.encoder or options.pooling) and not looks_up:
        raise ValueError(
            f"--encoder={options.encoder} --pooling={options.pooling}: the model, with model."
            f"layers={config.model.layers!r}, reads no neighbours: leave both out"
        )
    if not config.model.has_neighbours:
        return Engine(trained, max_num_seqs=lanes)
    if not looks_up:
        return Generator(trained, None, lanes)
    if kind is Neighbours.shuffled:
        raise ValueError(
            f"data.read_neighbours={kind.value}: the run was trained with neighbours of other "
            "chunks, which generation cannot look up: choose a run trained with nearest"
        )
    if not options.encoder:
        raise ValueError(
            "RETRO reads neighbours of its text: give --encoder=RUN_DIR, the model with which "
            "`maxmeg neighbours` found those of the corpus"
        )
    encoder = load_encoder(options.encoder, options.pooling or "mean")
    return Generator(trained, open_search(config, encoder), lanes)


@explains_out_of_memory("lower --batch, set --dtype=bfloat16 or raise --tensor")
def main(options: Options) -> None:
    set_gpu_environment()
    multihost.use_one_process()
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    request = Request(options.num_tokens, sampling)
    records = read_records(options.prompt, options.prompts)
    records = [as_chat(record) for record in records] if options.chat else records
    trained = load_chosen(options)
    tokenizer, config = trained.tokenizer, trained.config
    prompts = encoded(tokenizer, config, records, options.system, options.opening)
    ends = end_tokens(tokenizer, config.data, config.model.vocab_size)
    request = dataclasses.replace(request, ends=ends)
    is_shown = not config.model.has_source_text
    beginnings = [record.get("prompt", "") if is_shown else "" for record in records]
    engine = make_engine(trained, options, lanes=min(options.batch, len(prompts)))
    if len(prompts) == 1 and not options.output and sys.stdout.isatty():
        pieces = engine.stream(prompts[0], request, options.seed)
        for piece in itertools.chain(beginnings, pieces):
            print(piece, end="", flush=True)
        print()
        return
    texts = [reply.text for reply in engine.generate(prompts, request, options.seed)]
    if options.output:
        lines = [
            json.dumps(r | {"completion": t}, default=str)
            for r, t in zip(records, texts, strict=True)
        ]
        Path(options.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    for number, (before, text) in enumerate(zip(beginnings, texts, strict=True)):
        print("\n---\n" * (number > 0) + before + text)
