"""Continue prompts or chats: python -m maxmeg.generate --run_dir=runs/gpt --prompt="def main"

Repeat --prompt for several prompts, or give --prompts=FILE.jsonl with one {"prompt": ...} or
{"messages": [{"role": "user", "content": ...}, ...]} per line; --output=FILE.jsonl repeats
each line with its "completion". --chat turns every prompt into a user's message.
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
    """Prompts, model and sampling."""

    prompt: Sequence[str] = setting((), "text to continue; may be given several times")
    prompts: str = setting(
        "", "file of prompts and chats, one JSON object per line, instead of --prompt"
    )
    output: str = setting(
        "", "file for the completions, one JSON object per line; empty: the screen"
    )
    chat: bool = setting(False, "prompts are user messages; use the chat template")
    system: str = setting("", "system message for chats without one")
    opening: bool = setting(True, "begin prompts with the special tokens of the tokenizer.json")
    run_dir: str = setting("runs/gpt", "folder of the run, or of a converted model")
    step: int = setting(-1, "step of the checkpoint; -1: the newest intact one")
    num_tokens: int = setting(100, "most tokens to generate per prompt, >= 1")
    batch: int = setting(BATCH, "number of prompts per batch")
    temperature: float = setting(0.8, "sampling temperature; 0: always the most likely token")
    top_k: int = setting(0, "sample from the k most likely tokens; 0: all")
    top_p: float = setting(1.0, "sample from the most likely tokens with this total probability")
    seed: int = setting(0, "seed of the sampling")
    dtype: str = setting("", "compute dtype, float32 or bfloat16; empty: the run's")
    tensor: int = setting(1, "number of tensor-parallel devices")


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
