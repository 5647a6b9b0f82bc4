"""Generate text for many requests at once, each as if it were alone.

`Engine.submit` takes a request, and `Engine.step` runs all of them by one step: a chunk of a
prompt, or a token of each lane. A reply depends on its prompt, settings, seed and number, and not
on what else runs. The next step is started before the results of the last one are read.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from maxmeg.config.options import LongRope
from maxmeg.config.positions import RotaryScaling
from maxmeg.data.chat.ends import end_tokens
from maxmeg.inference.grammar import Grammars, Masks, Matcher
from maxmeg.inference.load import Trained
from maxmeg.inference.programs import Programs, Read
from maxmeg.inference.prompts import prompt_tokens
from maxmeg.inference.requests import (
    Reply,
    Request,
    check_causal,
    check_ids,
    check_length,
    check_source,
    sampling_columns,
)
from maxmeg.inference.sampling import Sampling
from maxmeg.inference.scheduler import Chunk, Job, Limits, Scheduler, Token
from maxmeg.inference.speculation import NGrams
from maxmeg.inference.text import Text

LANES = 8  # requests at a time on each replica
CPU_LANES = 2  # at least: XLA multiplies one row by a matrix 20 times slower than two
CPU_CHUNK = 64  # at most: padding takes as long as tokens
SLOTS = 32  # tokens of a page
CHUNK = 256  # most tokens of a prompt that are read at once
START_TOKENS = 2  # of a target, read with its source: the first and, since CPUs like it, padding
PREFILL_TOKENS = 2048  # of prompts that are read while other requests wait for a token
DEFAULT_TOKENS = 100  # of a reply
TURN = 256  # later requests that may go before the next reply of a request, or a slow grammar's
MASK_SECONDS = 0.001  # that a step waits for masks of grammars that are not slow
FORMER_NAMES = {
    "lanes": "max_num_seqs",
    "slots": "block_size",
    "proposals": "num_speculative_tokens",
}
IDLE_SECONDS = 0.02  # that a step waits for a mask if there is nothing else to do

P = typing.ParamSpec("P")
T = typing.TypeVar("T")
Step = dict[int, Chunk | Token]  # its rows, by their index in the array that the programs get


@dataclasses.dataclass
class Active:
    """A reply that goes on: its text, how far it has followed its grammar, the mask of its next
    token, and its proposals. is_late: whether it goes behind TURN later requests, since its grammar
    is slow."""

    reply: Reply
    text: Text
    matcher: Matcher | None
    proposer: NGrams | None
    mask: "concurrent.futures.Future[np.ndarray] | None" = None
    is_late: bool = False


@dataclasses.dataclass
class Started:
    """A step on the devices: the rows whose results have not been taken, and the arrays to read."""

    rows: Step
    arrays: tuple[jax.Array, ...]


def with_former_names(function: Callable[P, T]) -> Callable[P, T]:
    """Accept the former names of arguments too, with a warning, until the next release."""

    @functools.wraps(function)
    def renamed(*arguments: P.args, **settings: P.kwargs) -> T:
        for former in settings.keys() & FORMER_NAMES.keys():
            name = FORMER_NAMES[former]
            text = f"{former}= is now {name}=; the old name ends with the next release"
            if name in settings:
                raise TypeError(f"{text}: give one of them")
            warnings.warn(text, FutureWarning, stacklevel=2)
            settings[name] = settings.pop(former)
        return function(*arguments, **settings)

    return renamed


class Engine:
    """Serves a model on its mesh; if that has several processes, each makes the same calls, or the
    others follow process 0 (`followers`).

    max_num_seqs: most requests at a time on each replica of the model, along data, fsdp and expert;
    on a CPU at least 2. pages: number of KV-cache pages per replica; 0: as many as max_num_seqs and
    memory allow. block_size: number of tokens per page. chunk: number of tokens of a prompt that
    are read at once, on a CPU at most 64. prefill_tokens: largest number of prompt tokens that are
    read while other requests wait for their next token. share: prefix caching, reuse the KV
    cache of a common prompt prefix. num_speculative_tokens: speculative decoding, number of draft
    tokens per step: fewer steps, and the same reply but for rounding. They come from the model's
    MTP layers, one from each, or if it has none from the text before (`NGrams`). The prompt of an
    encoder-decoder is its source, which is read at once, and is not shared. ValueError for a model
    that is not causal, for more draft tokens than MTP layers, and for draft tokens of a model with
    states that cannot be taken back.
    """

    @with_former_names
    def __init__(
        self,
        trained: Trained,
        max_num_seqs: int = LANES,
        pages: int = 0,
        block_size: int = SLOTS,
        chunk: int = CHUNK,
        prefill_tokens: int = PREFILL_TOKENS,
        share: bool = True,
        num_speculative_tokens: int = 0,
    ) -> None:
        self.trained, self.model = trained, trained.config.model
        check_causal(self.model)
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={max_num_seqs} must be at least 1")
        lanes, slots, proposals = max_num_seqs, block_size, num_speculative_tokens
        if self.trained.mesh.devices.flat[0].platform == "cpu":
            lanes, chunk = max(lanes, CPU_LANES), min(chunk, CPU_CHUNK)
        self.start = trained.start_token if self.model.has_source else None
        if 0 < self.model.mtp.num_layers < proposals:
            raise ValueError(
                f"{proposals} draft tokens exceed the {self.model.mtp.num_layers} MTP layers, each "
                "of which makes one: ask for fewer, or load the model without them"
            )
        row_pages = -(-self.model.max_position // slots)
        chunk = max(min(chunk // slots, row_pages), 1) * slots
        chunk = chunk if self.start is None else START_TOKENS
        self.programs = Programs(trained, lanes, pages, slots, row_pages, chunk, proposals)
        if proposals and self.programs.has_states:
            raise ValueError(
                f"{proposals} draft tokens: this model has layers with states (conv, mamba, "
                "gated_delta, kda), which would keep the tokens that are not taken: ask for 0"
            )
        self.programs.allocate()
        share &= not self.programs.has_states  # a page does not hold the states at its end
        share &= self.start is None  # keys of a target depend on its source
        chunks = max(1, prefill_tokens // max(chunk, self.programs.source))
        sizes = self.programs.replicas, lanes, self.programs.size.pages, slots
        self.scheduler = Scheduler(Limits(*sizes, chunk, chunks, share))
        self._active: dict[Job, Active] = {}
        self._started: collections.deque[Started] = collections.deque()
        self._masks = Masks()
        self._arrivals = itertools.count()
        self.adapters = ("", *trained.adapters)  # by number
        ends = end_tokens(trained.tokenizer, trained.config.data, self.model.vocab_size)
        self.ends = tuple(dict.fromkeys((*ends, *trained.ends)))  # of a reply
        self.decode_steps = self.decoded = 0  # steps, and new tokens of all lanes in them

    def check(self, prompt: Sequence[int] | np.ndarray, request: Request, where: str = "") -> None:
        """ValueError for an unknown adapter, for a prompt that is empty, too long, or has tokens
        without embedding, and if the log-probabilities of a source are asked for."""
        if request.adapter not in self.adapters:
            served = ", ".join(map(repr, self.adapters))
            raise ValueError(f"{where}adapter={request.adapter!r} is not one of {served}")
        longest, length = self.model.max_position, len(prompt)
        if self.start is not None:
            check_source(length, request.prompt_logprobs, longest, where)
            length = 1
        check_length(length, request.num_tokens, longest, where)
        biased = [token for token, _ in request.sampling.logit_bias]
        ids, tokenizer = np.array([*prompt, *biased]), self.trained.tokenizer
        check_ids(ids, self.model.vocab_size, where, tokenizer)
        size = self.programs.size
        if length + request.num_tokens > size.pages * size.slots:
            raise ValueError(
                f"{where}{length} tokens and {request.num_tokens} new ones exceed the cache, "
                f"{size.pages} pages of {size.slots} tokens: raise pages, or ask for fewer"
            )

    def submit(
        self, prompt: Sequence[int] | np.ndarray, request: Request, seed: int = 0, number: int = 0
    ) -> Reply:
        """Return the reply that `step` fills. number: of the reply among those with the same seed;
        for a lane it waits as if it had come `number` times TURN requests later. ValueError as
        `check`."""
        self.check(prompt, request)
        reply = Reply(tuple(map(int, prompt)), request, seed, number)
        before = reply.prompt if self.start is None else (self.start,)
        place = next(self._arrivals) + number * TURN
        job = Job(place, before, request.num_tokens, self._salt(reply))
        # The log-probabilities of a prompt, and its part in penalties, are known once it is read.
        job.shares = not request.prompt_logprobs and request.sampling.repetition_penalty == 1
        is_sequential = request.grammar is not None or self._may_turn_long(reply)
        job.most_proposals = 0 if is_sequential else self.programs.proposals
        job.waits = is_sequential or self.programs.proposals > 0
        context = before if self.start is None else ()
        text = Text(self.trained.tokenizer, context, request.stops)
        matcher = request.grammar and request.grammar.matcher()
        looks_back = job.most_proposals > self.programs.drafts
        proposer = NGrams(reply.prompt) if looks_back else None
        self._active[job] = Active(reply, text, matcher, proposer)
        self._start_mask(job)
        self.scheduler.add(job)
        return reply

    def cancel(self, reply: Reply) -> None:
        """End a reply, if it has not ended."""
        for job, active in self._active.items():
            if active.reply is reply:
                self._end(job, "cancelled")
                return

    def reset(self) -> None:
        """Begin with an empty cache, after an error: all replies that go on end with "error"."""
        for job in [*self._active]:
            self._end(job, "error", "the engine failed and was reset: try again")
        self._started.clear()
        self.scheduler = Scheduler(self.scheduler.limits)
        self.programs.allocate()

    def warm_up(self) -> None:
        """Compile the programs, which otherwise the first request waits for."""
        self.generate([np.zeros(1, np.int32)], Request(2, Sampling()))

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars for requests."""
        return Grammars(self.trained.tokenizer, self.model.vocab_size, self.ends)

    def step(self) -> bool:
        """Start the next step, and read the one before it. False if nothing is left to do.

        Requests whose next token depends on the last one, as with a grammar, get that token before
        the next step is started; the others do not wait for what the host does with theirs. A
        request whose mask takes longer than MASK_SECONDS misses steps.
        """
        if self._started:
            self._finish(self._started[0], lambda row: row.job.waits)
        self._take_masks(MASK_SECONDS)
        rows = {self._place(row): row for row in self.scheduler.next()}
        if rows:
            self._started.append(Started(rows, self._start(rows)))
        elif not self._started:
            self._take_masks(IDLE_SECONDS, slow=True)
        if self._started and (len(self._started) > 1 or not rows):
            self._finish(self._started.popleft())
        return bool(self._active or self._started)

    @property
    def _decides(self) -> bool:
        """Whether this process alone decides what the next step is, as time may then do, too."""
        return self.programs.leads or not self.trained.mesh.is_multi_process

    def _take_masks(self, seconds: float, slow: bool = False) -> None:
        """Mark the requests that have their masks. Waits at most `seconds`: for all masks of
        grammars that are not slow, or, with `slow`, for any mask. If several processes run the same
        steps, it waits for all masks, so that the steps do not depend on time."""
        lacking = {job: active for job, active in self._active.items() if job.needs_mask}
        awaited = [
            active.mask
            for job, active in lacking.items()
            if active.mask and active.matcher
            if not self._decides or (job.lane is not None and (slow or not active.matcher.is_slow))
        ]
        until = concurrent.futures.FIRST_COMPLETED if slow else concurrent.futures.ALL_COMPLETED
        concurrent.futures.wait(awaited, seconds if self._decides else None, until)
        for job, active in lacking.items():
            job.needs_mask = active.mask is None or not active.mask.done()
            is_slow = active.matcher is not None and active.matcher.is_slow
            if is_slow and not active.is_late and job.lane is not None and self._decides:
                active.is_late, job.number = True, job.number + TURN

    def generate(
        self, prompts: Sequence[np.ndarray | str], request: Request | Sampling, seed: int = 0
    ) -> list[Reply]:
        """Return the replies to prompts, token ids or texts, whose numbers are 0, 1, ...

        With a Sampling, replies have at most DEFAULT_TOKENS tokens. ValueError as `check`.
        """
        if isinstance(request, Sampling):
            request = Request(DEFAULT_TOKENS, request, self.ends)
        rows = [
            prompt_tokens(self.trained.tokenizer, self.trained.config, prompt)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        for number, ids in enumerate(rows, 1):
            where = f"prompt {number} of {len(rows)}: " if len(rows) > 1 else ""
            self.check(ids, request, where)
        replies = [self.submit(ids, request, seed, i) for i, ids in enumerate(rows)]
        while not all(reply.reason for reply in replies):
            self.step()
        return replies

    def stream(self, prompt: np.ndarray, request: Request, seed: int = 0) -> Iterator[str]:
        """Return the pieces of the text after a prompt, as they are known; ValueError as `check`.

        Requests that were submitted before go on meanwhile. Closing the iterator cancels.
        """
        return self._pieces(self.submit(prompt, request, seed))

    def _pieces(self, reply: Reply) -> Iterator[str]:
        length = 0
        try:
            while not reply.reason:
                self.step()
                if len(reply.text) > length:
                    yield reply.text[length:]
                    length = len(reply.text)
        finally:
            self.cancel(reply)

    def _start(self, rows: Step) -> tuple[jax.Array, ...]:
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
        job, active = row.job, self._active[row.job]
        assert job.lane is not None
        reply = active.reply
        sampling = reply.request.sampling
        columns = {
            "start": row.start,
            "lane": job.lane % self.programs.size.lanes,
            "row_length": self._row_length(reply, row.start),
            "adapter": self.adapters.index(reply.request.adapter),
            "wants_top": sampling.top_logprobs > 0,
            "penalises": sampling.penalises,
            "prompt_length": len(job.prompt),
            "repetition": sampling.repetition_penalty,
            "frequency": sampling.frequency_penalty,
            "presence": sampling.presence_penalty,
            "scores": reply.request.prompt_logprobs,
            "is_biased": bool(sampling.logit_bias),
            "biased": [token for token, _ in sampling.logit_bias],
            "biases": [bias for _, bias in sampling.logit_bias],
            "pages": job.pages,
            "source": 0 if self.start is None else len(reply.prompt),
        }
        index = row.index if isinstance(row, Token) else 0
        columns |= sampling_columns(reply, index)
        if active.mask and index == len(job.tokens):  # else the token is known, or there is none
            columns |= {"is_masked": True, "allowed": active.mask.result()}
        if isinstance(row, Chunk):
            extra = max(1, self.programs.drafts)
            tokens = job.prompt[row.start : row.start + row.count + extra]
            columns |= {"count": row.count, "is_last": row.is_last, "tokens": tokens}
            return columns | {"source_tokens": () if self.start is None else reply.prompt}
        if index <= len(job.tokens):
            columns["token"] = job.tokens[index - 1]
        return columns | {"count": 1 + len(row.drafts), "tokens": row.drafts}

    def _finish(
        self, started: Started, chosen: Callable[[Chunk | Token], bool] = lambda row: True
    ) -> None:
        """Read the results of a step, and take those of the chosen rows."""
        rows = {place: row for place, row in started.rows.items() if chosen(row)}
        if not rows:
            return
        started.rows = {i: row for i, row in started.rows.items() if i not in rows}
        read = self.programs.read(started.arrays[0])
        is_scored = any(isinstance(row, Chunk) and self._scores(row.job) for row in rows.values())
        scores = self.programs.read(started.arrays[1]) if is_scored else None
        for place, row in rows.items():
            job = row.job
            if job not in self._active:
                continue
            if scores and isinstance(row, Chunk) and self._scores(job):
                self._score(row, Read(*(array[place] for array in scores)))
            if isinstance(row, Token):
                self._take(row, Read(*(array[place] for array in read)))
            elif row.is_last and not job.limit:
                self._end(job, "length")
            elif row.is_last and not job.tokens:
                self._add(job, Read(*(array[place, 0] for array in read)))

    def _take(self, row: Token, read: Read) -> None:
        """Add the sampled tokens, as long as those before them are the proposed ones."""
        job, end = row.job, row.index + len(row.drafts) + 1
        for i, index in enumerate(range(row.index, end)):
            if index >= len(job.tokens):  # else it is known
                self.decoded += 1
                self._add(job, Read(*(array[i] for array in read)))
            if job not in self._active or [job.tokens[index]] != [*row.drafts[i : i + 1]]:
                break
        if job.sampled == end:  # the next step goes on after the tokens that were taken
            job.sampled = min(end, len(job.tokens))

    def _scores(self, job: Job) -> bool:
        return job in self._active and self._active[job].reply.request.prompt_logprobs

    def _score(self, chunk: Chunk, scores: Read) -> None:
        """Add the log-probabilities of the prompt's tokens after those of a chunk."""
        reply = self._active[chunk.job].reply
        first, end = len(reply.prompt_logprobs) - chunk.start, chunk.count - chunk.is_last
        for i in range(max(first, 0), end):  # a prompt that is read again has them
            reply.prompt_logprobs.append(float(scores.logprobs[i]))
            reply.prompt_top += top_of(reply.request, scores.top_tokens[i], scores.top_logprobs[i])

    def _add(self, job: Job, read: Read) -> None:
        """Add the next token of a job."""
        active, token = self._active[job], int(read.tokens)
        reply, request = active.reply, active.reply.request
        job.tokens.append(token)
        job.proposals = read.drafts.tolist()
        if active.proposer:
            active.proposer.add(token)
            job.proposals = active.proposer.propose(job.most_proposals)
        if token in request.ends:
            return self._end(job, "stop")
        reply.tokens.append(token)
        reply.logprobs.append(float(read.logprobs))
        reply.top += top_of(request, read.top_tokens, read.top_logprobs)
        is_stopped = active.text.add(token)
        reply.text = active.text.output
        try:
            is_complete = active.matcher is not None and active.matcher.add(token)
        except ValueError as error:
            return self._end(job, "grammar", str(error))
        if is_stopped or is_complete:
            return self._end(job, "stop")
        if len(job.tokens) == request.num_tokens:
            return self._end(job, "length")
        if self._may_turn_long(reply) and (salt := self._salt(reply)) != job.salt:
            job.salt = salt
            self.scheduler.preempt(job)  # its keys are computed again, with the long factors
        self._start_mask(job)

    def _row_length(self, reply: Reply, cached: int) -> int:
        """Return the row length that determines the rotation of the token after `cached` tokens.

        LongRoPE: the maximum length of the row, or its current length (`longrope=current`);
        dynamic: the current length; 0: the rotation does not depend on the length.
        """
        rotary, length = self.model.rotary, len(reply.prompt)
        if rotary.scaling is RotaryScaling.longrope:
            is_current = self.trained.longrope is LongRope.current
            length += len(reply.tokens) if is_current else reply.request.num_tokens
            return rotary.original_length + (length > rotary.original_length)
        return max(length, cached + 1) if rotary.scaling is RotaryScaling.dynamic else 0

    def _may_turn_long(self, reply: Reply) -> bool:
        """Whether a row may begin with the short factors of LongRoPE and exceed their length."""
        is_current = self.trained.longrope is LongRope.current
        short, length = self.model.rotary.original_length, len(reply.prompt)
        return is_current and length <= short < length + reply.request.num_tokens

    def _salt(self, reply: Reply) -> bytes:
        """Return what keys and values depend on beside the tokens."""
        return f"{self._row_length(reply, 0)} {reply.request.adapter}".encode()

    def _start_mask(self, job: Job) -> None:
        """Compute the mask of a job's next token, if it follows a grammar."""
        active = self._active[job]
        if active.matcher:
            active.mask, job.needs_mask = self._masks.start(active.matcher), True

    def _end(self, job: Job, reason: str, error: str = "") -> None:
        active = self._active.pop(job)
        if active.mask:
            active.mask.cancel()
        is_stopped = active.text.finish()
        active.reply.text, active.reply.error = active.text.output, error
        active.reply.reason = "stop" if is_stopped and reason == "length" else reason
        self.scheduler.remove(job)


def top_of(request: Request, tokens: np.ndarray, logprobs: np.ndarray) -> list:
    """[the most likely tokens with their log-probabilities]; [] if the request wants none."""
    count = request.sampling.top_logprobs
    pairs = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    return [list(itertools.islice(pairs, count))] if count else []
