"""How well the engine's scheduler uses the lanes of a decode step: `python benchmarks/serving.py`.

    python benchmarks/serving.py [--requests=1000] [--lanes=8,64] [--pages=0] [--rate=0]

Counts, exactly and without a model: new tokens over lanes times decode steps. The lengths of
prompts and replies are drawn like those of ShareGPT in the paper of vLLM (means of 161 and 338
tokens; here log-normal with sigma 1, at most 2,048). All requests are there at the beginning, or
arrive at random, `rate` of them a decode step. Beside it static batches of prompts sorted by
length, in which each waits for the longest reply.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from maxmeg.inference.engine import CHUNK, PREFILL_TOKENS, SLOTS
from maxmeg.inference.scheduler import Chunk, Job, Limits, Scheduler

MEANS, SIGMA, MOST = (161, 338), 1.0, 2048


def lengths(count: int, seed: int = 0) -> np.ndarray:
    """Tokens of each prompt and of each reply, [2, count]."""
    rng = np.random.default_rng(seed)
    rows = [rng.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, count) for mean in MEANS]
    return np.clip(np.array(rows), 1, MOST).astype(int)


def served(prompts, replies, lanes: int, pages: int, rate: float) -> tuple[float, int, int]:
    """(share of lanes used, decode steps, preemptions)."""
    pages = pages or lanes * (2 * MOST // SLOTS)
    chunks = PREFILL_TOKENS // CHUNK
    scheduler = Scheduler(Limits(1, lanes, pages, SLOTS, CHUNK, chunks))
    gaps = np.random.default_rng(1).exponential(1 / rate, len(prompts)) if rate else [0]
    arrivals = np.cumsum(gaps) if rate else np.zeros(len(prompts))
    steps = tokens = added = done = 0
    while done < len(prompts):
        while added < len(prompts) and arrivals[added] <= steps:
            prompt = tuple(range(added * MOST, added * MOST + prompts[added]))
            scheduler.add(Job(added, prompt, int(replies[added])))
            added += 1
        rows = scheduler.next()
        if not rows:
            steps += 1
        elif not isinstance(rows[0], Chunk):
            steps, tokens = steps + 1, tokens + len(rows)
        for row in rows:
            job = row.job
            if job.is_read and len(job.tokens) < job.sampled:
                job.tokens.append(0)
            if len(job.tokens) == job.limit and job.lane is not None:
                scheduler.remove(job)
                done += 1
    return tokens / (lanes * steps), steps, scheduler.preemptions


def static(prompts, replies, lanes: int) -> float:
    """The share of lanes that batches of prompts sorted by length use."""
    order = np.argsort(prompts, kind="stable")
    batches = [replies[order[i : i + lanes]] for i in range(0, len(order), lanes)]
    return float(replies.sum() / sum(lanes * batch.max() for batch in batches))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--lanes", default="8,64")
    parser.add_argument("--pages", type=int, default=0, help="of the cache; 0: as many as needed")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a decode step; 0: all")
    options = parser.parse_args()
    prompts, replies = lengths(options.requests)
    for lanes in map(int, options.lanes.split(",")):
        used, steps, preemptions = served(prompts, replies, lanes, options.pages, options.rate)
        print(
            f"{lanes} lanes: {used:.3f} used in {steps:,} decode steps, {preemptions} preemptions; "
            f"static batches {static(prompts, replies, lanes):.3f}"
        )


if __name__ == "__main__":
    main()
