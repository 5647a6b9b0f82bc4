"""Talk with a model in the terminal: maxmeg chat runs/smollm2

Answers appear while they are written. /reset begins a new conversation; Ctrl-C ends an answer;
/exit or Ctrl-D leaves. The model needs a tokenizer with a chat template, or a run with
data.chat_template; `maxmeg generate` continues plain text.
"""

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    run_module("chat")

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from maxmeg.config.options import Chat as Options
from maxmeg.data.chat.ends import end_tokens
from maxmeg.data.chat.template import load_chat_template
from maxmeg.inference.conversation import converse
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import load_chosen
from maxmeg.inference.prompts import encoded
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.processes import multihost
from maxmeg.runtime.faults.out_of_memory import explains_out_of_memory
from maxmeg.runtime.gpu_environment import set_gpu_environment

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (input() then has a history and can be edited)

PROMPT = "> "


@explains_out_of_memory("set --dtype=bfloat16 or raise --tensor")
def main(options: Options) -> None:
    set_gpu_environment()
    multihost.use_one_process()
    request = Request(
        options.num_tokens, Sampling(options.temperature, options.top_k, options.top_p)
    )
    trained = load_chosen(options)
    config, tokenizer = trained.config, trained.tokenizer
    load_chat_template(tokenizer, config.data.chat_template)  # refuses a model without one
    ends = end_tokens(tokenizer, config.data, config.model.vocab_size)
    engine = Engine(trained, max_num_seqs=1)
    room = config.model.max_position

    def encode(messages: list[dict[str, str]]) -> np.ndarray:
        return encoded(tokenizer, config, [{"messages": messages}], options.system)[0]

    def answer(messages: list[dict[str, str]], turn: int) -> Iterator[str]:
        ids = encode(messages)
        if len(ids) >= room:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, and the context {room}: /reset begins a "
                "new one"
            )
        count = min(options.num_tokens, room - len(ids))
        limited = dataclasses.replace(request, num_tokens=count, ends=ends)
        yield from engine.stream(ids, limited, options.seed + turn)

    print(f"{options.run_dir}, step {trained.step}. /reset: new conversation, /exit: leave")
    converse(answer, lambda: input(PROMPT))
