"""vLLM's losses and greedy tokens of the models in some folders, in a process of its own: it binds
its threads to cores and logs much. python vllm_child.py JOBS.json ANSWERS.json"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # tiny models; and the cores may be busy
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch

# vLLM's kernel for int8 products on processors with AMX refuses float32, in which we compare.
torch.cpu._is_amx_tile_supported = lambda: False

import vllm  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402


def answer(folder: str, prompts: list[list[int]], count: int) -> dict:
    """Of each prompt, in float32: the tokens after it, and the mean loss of its own."""
    model = vllm.LLM(folder, dtype="float32", enforce_eager=True, max_num_seqs=len(prompts))
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    greedy = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
    actual = model.generate(given, vllm.SamplingParams(**greedy, prompt_logprobs=0), use_tqdm=False)
    losses = []
    for prompt, one in zip(prompts, actual, strict=True):
        rows = zip(prompt[1:], one.prompt_logprobs[1:], strict=True)
        losses.append(-sum(row[token].logprob for token, row in rows) / (len(prompt) - 1))
    return {"tokens": [list(one.outputs[0].token_ids) for one in actual], "losses": losses}


def main(jobs: str, answers: str) -> None:
    actual = {}
    for name, (folder, prompts, count) in json.loads(Path(jobs).read_text()).items():
        try:
            actual[name] = answer(folder, prompts, count)
        except Exception as error:  # whatever it is, the other models are asked too
            actual[name] = {"error": repr(error)}
        cleanup_dist_env_and_memory()
    Path(answers).write_text(json.dumps(actual))


if __name__ == "__main__":
    main(*sys.argv[1:])
