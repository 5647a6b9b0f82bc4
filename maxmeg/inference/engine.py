"""Generate text for many requests at once, each as if it were alone.

`Engine.submit` takes a request, and `Engine.step` runs all of them by one step: a chunk of a
prompt, or a token of each lane. A reply depends on its prompt, settings, seed and number, and not
on what else runs. The next step is started before the results of the last one are read.
"""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from maxmeg.config.mixers import RotaryScaling
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.load import Trained, load_run, without_pipeline
from maxmeg.inference.programs import Programs, Read
from maxmeg.inference.prompts import end_tokens
from maxmeg.inference.requests import Request, check_causal, check_ids, check_length, text_after
from maxmeg.inference.sampling import Sampling
from maxmeg.inference.scheduler import Chunk, Job, Limits, Scheduler, Token
from maxmeg.models.lm import LM

LANES = 8  # requests at a time on each replica
CPU_LANES = 2  # at least: XLA multiplies one row by a matrix 20 times slower than two
SLOTS = 32  # tokens of a page
CHUNK = 256  # most tokens of a prompt that are read at once
PREFILL_TOKENS = 2048  # of prompts that are read while other requests wait for a token
SAMPLE_TOKENS = 200  # that a run generates when training ends
_INCOMPLETE = "\ufffd"  # decoded from the first bytes of a character


Step = dict[int, Chunk | Token]  # its rows, by their index in the array that the programs get


@dataclasses.dataclass
class Reply:
    """The answer to a request, as far as it is known.

    tokens: new ones, without the end token. logprobs: of each. top: (token, log-probability) of the
    likeliest ones in place of each, if the request asks for them. reason: why it ended: "stop" (an
    end token), "length" or "cancelled"; empty while it goes on.
    """

    prompt: tuple[int, ...]
    request: Request
    seed: int
    number: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    reason: str = ""


class Engine:
    """Serves a model on its mesh; if that has several processes, each makes the same calls.

    lanes: most requests at a time on each replica of the model, along data, fsdp and expert; on a
    CPU at least 2. pages: of the cache on each replica; 0: as many as lanes and memory allow.
    slots: number of tokens in a page. chunk: number of tokens of a prompt that are read at once.
    prefill_tokens: largest number of prompt tokens that are read while other requests wait for
    their next token. share: prompts with the same beginning share its pages. ValueError for a model
    that is not causal.
    """

    def __init__(
        self,
        trained: Trained,
        lanes: int = LANES,
        pages: int = 0,
        slots: int = SLOTS,
        chunk: int = CHUNK,
        prefill_tokens: int = PREFILL_TOKENS,
        share: bool = True,
    ) -> None:
        self.trained, self.model = trained, trained.config.model
        check_causal(self.model)
        if lanes < 1:
            raise ValueError(f"lanes={lanes} must be at least 1")
        if self.trained.mesh.devices.flat[0].platform == "cpu":
            lanes = max(lanes, CPU_LANES)
        row_pages = -(-self.model.max_position // slots)
        chunk = max(min(chunk // slots, row_pages), 1) * slots
        self.programs = Programs(trained, lanes, pages, slots, row_pages, chunk)
        self.programs.allocate()
        share &= not self.programs.has_states  # a page does not hold the states at its end
        chunks = max(1, prefill_tokens // chunk)
        sizes = self.programs.replicas, lanes, self.programs.size.pages, slots
        self.scheduler = Scheduler(Limits(*sizes, chunk, chunks, share))
        self._replies: dict[Job, Reply] = {}
        self._started: collections.deque[tuple[Step, jax.Array]] = collections.deque()
        self._arrivals = itertools.count()
        self.decode_steps = self.decoded = 0  # steps, and new tokens of all lanes in them

    def check(self, prompt: Sequence[int] | np.ndarray, request: Request, where: str = "") -> None:
        """ValueError for a prompt that is empty, too long, or has tokens without embedding."""
        check_length(len(prompt), request.num_tokens, self.model.max_position, where)
        check_ids(np.asarray(prompt), self.model.vocab_size, where)
        size = self.programs.size
        if len(prompt) + request.num_tokens > size.pages * size.slots:
            raise ValueError(
                f"{where}{len(prompt)} tokens and {request.num_tokens} new ones exceed the cache, "
                f"{size.pages} pages of {size.slots} tokens: raise pages, or ask for fewer"
            )

    def submit(
        self, prompt: Sequence[int] | np.ndarray, request: Request, seed: int = 0, number: int = 0
    ) -> Reply:
        """Return the reply that `step` fills. number: of the request among those with the same
        seed. ValueError as `check`."""
        self.check(prompt, request)
        reply = Reply(tuple(map(int, prompt)), request, seed, number)
        salt = str(row_length(self.model, reply, 0)).encode()  # keys depend on it
        job = Job(next(self._arrivals), reply.prompt, request.num_tokens, salt)
        self._replies[job] = reply
        self.scheduler.add(job)
        return reply

    def cancel(self, reply: Reply) -> None:
        """End a reply, if it has not ended."""
        for job, other in self._replies.items():
            if other is reply:
                self._end(job, "cancelled")
                return

    def step(self) -> bool:
        """Start the next step, and read the one before it. False if nothing is left to do."""
        rows = {self._place(row): row for row in self.scheduler.next()}
        if rows:
            self._started.append((rows, self._start(rows)))
        if self._started and (len(self._started) > 1 or not rows):
            rows, sampled = self._started.popleft()
            self._finish(rows, self.programs.read(sampled))
        return bool(self._replies or self._started)

    def generate(
        self, prompts: Sequence[np.ndarray], request: Request, seed: int = 0
    ) -> list[Reply]:
        """Return the replies to prompts, whose numbers are 0, 1, ...; ValueError as `check`."""
        for number, ids in enumerate(prompts, 1):
            where = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
            self.check(ids, request, where)
        replies = [self.submit(ids, request, seed, i) for i, ids in enumerate(prompts)]
        while not all(reply.reason for reply in replies):
            self.step()
        return replies

    def stream(self, prompt: np.ndarray, request: Request, seed: int = 0) -> Iterator[str]:
        """Return the pieces of the text after a prompt, as they are known; ValueError as `check`.

        Requests that were submitted before go on meanwhile. Closing the iterator cancels.
        """
        return self._pieces(self.submit(prompt, request, seed))

    def text(self, reply: Reply) -> str:
        return text_after(self.trained, np.array(reply.prompt), np.array(reply.tokens, np.int32))

    def _pieces(self, reply: Reply) -> Iterator[str]:
        shown, known = "", 0
        try:
            while not reply.reason:
                self.step()
                if len(reply.tokens) == known and not reply.reason:
                    continue
                text, known = self.text(reply), len(reply.tokens)
                text = text if reply.reason else text.rstrip(_INCOMPLETE)
                same = sum(itertools.takewhile(bool, map(operator.eq, shown, text)))
                shown = text
                yield text[same:]
        finally:
            self.cancel(reply)

    def _start(self, rows: Step) -> jax.Array:
        columns = {place: self._columns(row) for place, row in rows.items()}
        if any(isinstance(row, Chunk) for row in rows.values()):
            return self.programs.prefill(columns)
        self.decode_steps += 1
        return self.programs.decode(columns)

    def _place(self, row: Chunk | Token) -> int:
        """The row of the array that the host sends: one per lane, or per replica in prefill."""
        assert row.job.lane is not None
        return row.job.lane // self.programs.size.lanes if isinstance(row, Chunk) else row.job.lane

    def _columns(self, row: Chunk | Token) -> dict:
        job, reply = row.job, self._replies[row.job]
        assert job.lane is not None
        sampling = reply.request.sampling
        columns = {
            "start": row.start,
            "lane": job.lane % self.programs.size.lanes,
            "row_length": row_length(self.model, reply, row.start),
            "top_k": sampling.top_k,
            "seed": np.uint32(reply.seed & 0xFFFFFFFF).view(np.int32),
            "number": reply.number,
            "wants_top": sampling.top_logprobs > 0,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "pages": job.pages,
        }
        if isinstance(row, Chunk):
            tokens = job.prompt[row.start : row.start + row.count]
            rest = {"token": -1, "is_last": row.is_last, "step": 0, "tokens": tokens}
            return columns | {"count": row.count} | rest
        known = job.tokens[row.index - 1] if row.index <= len(job.tokens) else -1
        return columns | {"count": 1, "token": known, "is_last": False, "step": row.index}

    def _finish(self, rows: Step, read: Read) -> None:
        for place, row in rows.items():
            job, reply = row.job, self._replies.get(row.job)
            index = row.index if isinstance(row, Token) else 0
            if (
                reply is None
                or index < len(job.tokens)
                or (isinstance(row, Chunk) and not row.is_last)
            ):
                continue  # it has ended, or the token is known, or there is none
            token, request = int(read.tokens[place]), reply.request
            job.tokens.append(token)
            self.decoded += isinstance(row, Token)
            if token in request.ends:
                self._end(job, "stop")
                continue
            reply.tokens.append(token)
            reply.logprobs.append(float(read.logprobs[place]))
            if count := request.sampling.top_logprobs:
                pairs = zip(read.top_tokens[place], read.top_logprobs[place], strict=True)
                reply.top.append([(int(i), float(x)) for i, x in itertools.islice(pairs, count)])
            if len(job.tokens) == request.num_tokens:
                self._end(job, "length")

    def _end(self, job: Job, reason: str) -> None:
        self._replies.pop(job).reason = reason
        self.scheduler.remove(job)


def row_length(model: ModelConfig, reply: Reply, cached: int) -> int:
    """A length for which the rotation is that of a row with `cached` tokens before its next one.

    LongRoPE: by the most tokens that it may have; dynamic: by those so far; 0: it does not matter.
    """
    rotary, length = model.rotary, len(reply.prompt)
    if rotary.scaling is RotaryScaling.longrope:
        longest = length + reply.request.num_tokens
        return rotary.original_length + (longest > rotary.original_length)
    return max(length, cached + 1) if rotary.scaling is RotaryScaling.dynamic else 0


def continue_text(
    trained: Trained, prompt: str, num_tokens: int, sampling: Sampling, seed: int
) -> str:
    """Return the continuation of a prompt up to the first end of a document.

    No BOS token is prepended: documents in training have none.
    """
    ids = trained.tokenizer.encode(prompt)
    ends = end_tokens(trained.tokenizer, trained.config.model.vocab_size)
    engine = Engine(trained, lanes=1)
    return engine.text(engine.generate([ids], Request(num_tokens, sampling, ends), seed)[0])


def sample_at_end(
    model: LM, config: Config, tokenizer: Tokenizer, step: int, mesh: Mesh, saved: bool
) -> str:
    """Return how the trained model continues log.sample_prompt.

    saved: whether there is a checkpoint of `step`. From it the model is read onto one device if the
    devices are virtual ones of this process's CPU, and with a pipeline onto a mesh without one;
    "" for a pipeline that is not saved.
    """
    prompt, pipelined = config.log.sample_prompt, mesh.shape["pipe"] > 1
    trained = Trained(model, config, tokenizer, step, mesh)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if saved and on_cpu and mesh.size > 1 and not mesh.is_multi_process:
        # XLA may start collectives that do not depend on each other, as small steps of decoding
        # have many, in another order on each virtual device of a busy CPU: they wait forever.
        trained = load_run(config.run_dir, step)
    elif saved and pipelined:
        trained = load_run(config.run_dir, step, without_pipeline(mesh, config.model.hidden_size))
    elif pipelined:
        return ""
    room = config.model.max_position - len(tokenizer.encode(prompt))
    sampling = Sampling(temperature=0.5, top_k=40)
    return continue_text(trained, prompt, min(SAMPLE_TOKENS, room), sampling, config.seed)
