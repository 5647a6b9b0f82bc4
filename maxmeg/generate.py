"""Continue prompts or chats: python -m maxmeg.generate --run_dir=runs/gpt --prompt="def main"

Several at once: --prompt again, or --prompts=FILE.jsonl with a {"prompt": ...} or {"messages":
[{"role": "user", "content": ...}, ...]} a line; --output=FILE.jsonl holds each line again with its
"completion". --chat makes a message of the user of every prompt.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from maxmeg.config import files
from maxmeg.config.flags import run_command
from maxmeg.config.model import DType
from maxmeg.config.setting import setting
from maxmeg.inference.decode import BATCH, Request, Writer, text_after
from maxmeg.inference.load import load_run
from maxmeg.inference.prompts import as_chat, encoded, end_tokens, read_records
from maxmeg.inference.sampling import Sampling
from maxmeg.parallel import multihost
from maxmeg.parallel.mesh import local_mesh
from maxmeg.runtime.faults.out_of_memory import explains_out_of_memory
from maxmeg.runtime.gpu_environment import set_gpu_environment


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
    dtype: str = setting("", "to compute in, float32 or bfloat16; empty: the run's")
    tensor: int = setting(1, "devices that share the model")


@explains_out_of_memory("lower --batch, set --dtype=bfloat16 or raise --tensor")
def main(options: Options) -> None:
    set_gpu_environment()
    multihost.order_cpu_collectives()
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    request = Request(options.num_tokens, sampling)
    records = read_records(options.prompt, options.prompts)
    records = [as_chat(record) for record in records] if options.chat else records
    step = None if options.step < 0 else options.step
    dtype = files.convert("dtype", options.dtype, DType) if options.dtype else None
    trained = load_run(options.run_dir, step, local_mesh(options.tensor))
    trained.config.model.dtype = dtype or trained.config.model.dtype
    ends = end_tokens(trained.tokenizer, trained.config.model.vocab_size)
    write = Writer(trained, dataclasses.replace(request, ends=ends), options.batch)
    template = trained.config.data.chat_template
    prompts = encoded(trained.tokenizer, records, options.system, options.opening, template)
    found = write(prompts, options.seed)
    texts = [text_after(trained, ids, new) for ids, new in zip(prompts, found, strict=True)]
    if options.output:
        lines = [json.dumps(r | {"completion": t}) for r, t in zip(records, texts, strict=True)]
        Path(options.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    for number, (record, text) in enumerate(zip(records, texts, strict=True)):
        print("\n---\n" * (number > 0) + record.get("prompt", "") + text)


if __name__ == "__main__":
    run_command(main, Options, needs_config=False)
