"""Lanes that the scheduler uses, and latencies of a server: `python benchmarks/serving.py`.

    python benchmarks/serving.py [--requests=1000] [--lanes=8,64] [--pages=0] [--rate=0]
    python benchmarks/serving.py --run_dir=RUN [--rate=0,2] [--means=161,338] [--quick]

Without a run it counts, exactly and without a model: new tokens over lanes times decode steps. The
lengths of prompts and replies are drawn like those of ShareGPT in the paper of vLLM (means of 161
and 338 tokens; here log-normal with sigma 1, at most 2,048). All requests are there at the
beginning, or arrive at random, `rate` of them a decode step. Beside it static batches of prompts
sorted by length, in which each waits for the longest reply.

With a run, a server of it answers requests of random tokens with at most such lengths: all at once,
or arriving at random, `rate` of them a second. A table tells new tokens a second and a CPU-second
of the server's process, the share of lanes used, and seconds to the first token and between pieces
of text (p50, p99). Needs maxmeg[serve] and openai; CPU-seconds need Linux.
"""

import argparse
import asyncio
import contextlib
import functools
import math
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from maxmeg.inference.engine import CHUNK, PREFILL_TOKENS, SLOTS
from maxmeg.inference.scheduler import Chunk, Job, Limits, Scheduler

SIGMA, MOST = 1.0, 2048
NAME = "measured"
ROW = "{:>5} {:>5} {:>7} {:>8} {:>7} {:>10} {:>15} {:>15}"
NAMES = ("lanes", "rate", "tokens", "tokens/s", "/CPU-s", "lanes used", "first p50,p99")
NAMES += ("next p50,p99",)


def lengths(count: int, means: list[int], most: int = MOST) -> np.ndarray:
    """Tokens of each prompt and of each reply, [2, count]."""
    rng = np.random.default_rng(0)
    rows = [rng.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, count) for mean in means]
    return np.clip(np.array(rows), 1, most).astype(int)


def arrivals(count: int, rate: float) -> np.ndarray:
    """When each request arrives: all at 0, or `rate` of them on average in a unit of time."""
    gaps = np.random.default_rng(1).exponential(1 / rate, count) if rate else np.zeros(count)
    return np.cumsum(gaps)


def served(prompts, replies, lanes: int, pages: int, rate: float) -> tuple[float, int, int]:
    """(share of lanes used, decode steps, preemptions)."""
    pages = pages or lanes * (2 * MOST // SLOTS)
    chunks = PREFILL_TOKENS // CHUNK
    scheduler = Scheduler(Limits(1, lanes, pages, SLOTS, CHUNK, chunks))
    times = arrivals(len(prompts), rate)
    steps = tokens = added = done = 0
    while done < len(prompts):
        while added < len(prompts) and times[added] <= steps:
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


class Server:
    """A process that serves a run."""

    def __init__(self, process: subprocess.Popen, url: str) -> None:
        self.process, self.url = process, url

    def read(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def counts(self) -> np.ndarray:
        """CPU-seconds of the process, new tokens of decode steps, and lanes of these steps."""
        lines = [line.rsplit(" ", 1) for line in self.read("/metrics").splitlines()]
        values = {k.removeprefix("maxmeg:"): float(v) for k, v in lines if k.startswith("maxmeg:")}
        firsts = values["time_to_first_token_seconds_count"]  # these come from prefill
        decoded = values["generation_tokens_total"] - firsts
        usage = values["lane_usage_perc"]
        return np.array([self.cpu_seconds(), decoded, decoded / usage if usage else 0])

    def cpu_seconds(self) -> float:
        stat = Path(f"/proc/{self.process.pid}/stat")
        if not stat.exists():
            return math.nan
        user, system = stat.read_text().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(run_dir: str, flags: list[str]) -> Iterator[Server]:
    """A warm server, which ends with the block."""
    command = [sys.executable, "-m", "maxmeg.serve", f"--run_dir={run_dir}", "--port=0", *flags]
    environment = os.environ | {"PYTHONPATH": sys.path[0]}
    process = subprocess.Popen(
        [*command, f"--name={NAME}"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+:\d+", process.stdout.readline())
        if found is None:
            sys.exit(process.wait() or 1)
        server = Server(process, found[0])
        while True:
            with contextlib.suppress(urllib.error.HTTPError):
                server.read("/health")
                break
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait()


async def ask(client, prompt: list[int], count: int, wait: float) -> tuple[int, list[float]]:
    """(new tokens, seconds at which the request was sent and each piece of text came)."""
    await asyncio.sleep(wait)
    times, tokens = [time.perf_counter()], 0
    pieces = await client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=count,
        seed=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for piece in pieces:
        if piece.usage:
            tokens = piece.usage.completion_tokens
        else:
            times.append(time.perf_counter())
    return tokens, times


async def measured(server: Server, prompts, replies, rate: float) -> list:
    """Cells of the table after lanes and rate."""
    import openai

    rng, waits = np.random.default_rng(2), arrivals(len(prompts), rate)
    ids = [rng.integers(32, 256, length).tolist() for length in prompts]
    before, started = server.counts(), time.perf_counter()
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=None) as client:
        calls = map(functools.partial(ask, client), ids, replies.tolist(), waits)
        found = await asyncio.gather(*calls)
    seconds = time.perf_counter() - started
    cpu, decoded, places = server.counts() - before
    total = sum(tokens for tokens, _ in found)
    first = [times[1] - times[0] for _, times in found if len(times) > 1]
    between = np.concatenate([np.diff(times[1:]) for _, times in found])
    quantiles = [np.nanpercentile([*values, math.nan], (50, 99)) for values in (first, between)]
    cells = [f"{p50:.3f}, {p99:.3f}" for p50, p99 in quantiles]
    used = f"{decoded / max(places, 1):.3f}"
    return [total, f"{total / seconds:.1f}", f"{total / cpu:.1f}", used, *cells]


def parsed() -> tuple[argparse.Namespace, list[str]]:
    """The options, and those for maxmeg.serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--lanes", default="8,64")
    parser.add_argument("--pages", type=int, default=0, help="of the cache; 0: as many as needed")
    parser.add_argument("--rate", default="0", help="requests a decode step or second; 0: all")
    parser.add_argument("--means", default="161,338", help="mean tokens of prompts and replies")
    parser.add_argument("--most", type=int, default=MOST, help="largest number of each")
    parser.add_argument(
        "--run_dir", default="", help="to serve; further options are maxmeg.serve's"
    )
    parser.add_argument("--quick", action="store_true", help="few and short requests")
    options, others = parser.parse_known_args()
    if others and not options.run_dir:
        parser.error(f"{others} are options of maxmeg.serve: give --run_dir as well")
    if options.quick:
        options.requests, options.means = 8, "8,24"
    return options, others


def main() -> None:
    options, others = parsed()
    means = [*map(int, options.means.split(","))]
    prompts, replies = lengths(options.requests, means, options.most)
    rates = [*map(float, options.rate.split(","))]
    if options.run_dir:
        print(ROW.format(*NAMES))
    for lanes in map(int, options.lanes.split(",")):
        if options.run_dir:
            sizes = f"--max_num_seqs={lanes}", f"--pages={options.pages}"
            flags = [*others, *sizes, f"--max_queue={options.requests}"]
            with serving(options.run_dir, flags) as server:
                for rate in rates:
                    row = asyncio.run(measured(server, prompts, replies, rate))
                    print(ROW.format(lanes, rate, *row), flush=True)
            continue
        for rate in rates:
            used, steps, lost = served(prompts, replies, lanes, options.pages, rate)
            print(
                f"{lanes} lanes: {used:.3f} used in {steps:,} decode steps, {lost} preemptions; "
                f"static batches {static(prompts, replies, lanes):.3f}"
            )


if __name__ == "__main__":
    main()
