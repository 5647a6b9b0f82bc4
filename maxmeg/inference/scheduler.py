"""Which requests run in the next step: pure Python, and the same for the same calls.

Requests are admitted in the order of their numbers. A prompt is read in chunks of fixed size, which
begin at multiples of it; between chunks all requests that have been read get their next token. A
request needs a lane, and pages for its tokens. If pages run out, or a request with a lower number
waits for a lane, the request with the highest number gives up its own and waits: later its prompt
is read again, and its tokens are decoded again. It then meets the same programs with the same
values, so its reply does not change.
"""

import bisect
import dataclasses
from collections.abc import Sequence

from maxmeg.inference.pages import ROOT, Pages


@dataclasses.dataclass(eq=False)
class Job:
    """A request in the scheduler.

    number: its place in the order of requests. limit: most new tokens. salt: of shared pages
    (`Pages.share`). lane: None while it waits. read: number of tokens of the prompt in the cache.
    sampled: number of decode steps scheduled since the job got its lane. tokens: generated so far;
    more than `sampled` after a preemption, while they are recomputed.
    shares: whether it may begin with pages that others have filled. waits: a new token is sampled
    only when all before it are known. needs_mask: the mask of the next unknown token is not there
    yet. most_proposals: largest number of proposed tokens that a decode step checks; such a job
    waits. proposals: of the next tokens.
    """

    number: int
    prompt: tuple[int, ...]
    limit: int
    salt: bytes = ROOT
    shares: bool = True
    waits: bool = False
    needs_mask: bool = False
    most_proposals: int = 0
    proposals: list[int] = dataclasses.field(default_factory=list)
    lane: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    read: int = 0
    sampled: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_read(self) -> bool:
        return self.read == len(self.prompt)

    @property
    def is_ready(self) -> bool:
        """Whether a decode step can sample its next token."""
        is_known = not self.waits or self.sampled <= len(self.tokens)
        return self.is_read and self.sampled < self.limit and is_known and not self.lacks_mask

    @property
    def lacks_mask(self) -> bool:
        """Whether its next step samples a token whose mask is not there yet."""
        return self.needs_mask and self.sampled >= len(self.tokens)

    @property
    def length(self) -> int:
        """Number of its tokens in the cache, after the whole prompt."""
        return len(self.prompt) + self.sampled - 1

    def drafts(self) -> list[int]:
        """What the next decode step checks: known tokens after a loss of pages, or proposals."""
        tokens = self.tokens[self.sampled :] or self.proposals
        return tokens[: min(self.most_proposals, self.limit - self.sampled - 1)]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Read tokens start .. start + count - 1 of a prompt."""

    job: Job
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.start + self.count == len(self.job.prompt)


@dataclasses.dataclass(frozen=True)
class Token:
    """Sample new token number `index` of a job, whose cache has `start` tokens, and a token after
    each of `drafts`, which are proposed to follow."""

    job: Job
    index: int
    start: int
    drafts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Limits:
    """replicas: number of copies of the model, each with its own lanes and pages. lanes, pages:
    numbers of them on one replica. slots: number of tokens per page. chunk: number of prompt
    tokens that one prefill step reads, a multiple of slots. chunks: largest number of prefill steps
    between two decode steps. shares: whether requests share pages.
    """

    replicas: int
    lanes: int
    pages: int
    slots: int
    chunk: int
    chunks: int
    shares: bool = True


class Scheduler:
    def __init__(self, limits: Limits):
        self.limits = limits
        self.waiting: list[Job] = []
        self.lanes: list[Job | None] = [None for _ in range(limits.replicas * limits.lanes)]
        self.pages = [Pages(limits.pages, limits.slots) for _ in range(limits.replicas)]
        self.chunks_in_a_row = 0
        self.preemptions = self.shared_tokens = 0

    def add(self, job: Job) -> None:
        bisect.insort(self.waiting, job, key=lambda waiting: waiting.number)

    def remove(self, job: Job) -> None:
        """Take out a job that has ended or was cancelled."""
        if job.lane is None:
            self.waiting.remove(job)
        else:
            self._leave_lane(job)

    def next(self) -> list[Chunk] | list[Token]:
        """The rows of the next step; empty if there is nothing to do."""
        self._admit()
        reading: dict[int, Job] = {}
        for job in self._running():
            if not job.is_read and not job.lacks_mask:
                reading.setdefault(self._replica(job), job)
        ready = [job for job in self._running() if job.is_ready]
        if reading and (not ready or self.chunks_in_a_row < self.limits.chunks):
            self.chunks_in_a_row += 1
            return [self._chunk(job) for job in reading.values()]
        self.chunks_in_a_row = 0
        return self._tokens(ready)

    def _running(self) -> list[Job]:
        """Jobs with a lane, the oldest first."""
        return sorted((job for job in self.lanes if job), key=lambda job: job.number)

    def _replica(self, job: Job) -> int:
        assert job.lane is not None
        return job.lane // self.limits.lanes

    def _admit(self) -> None:
        """Give waiting jobs lanes and the pages of their prompts, while the first of them fits."""
        while self.waiting and (self._enter_lane(self.waiting[0]) or self._make_room()):
            del self.waiting[0]

    def _make_room(self) -> bool:
        """Let jobs with higher numbers wait until the first waiting job has a lane; whether it has
        got one."""
        first = self.waiting[0]
        while (newest := self._running()[-1:]) and newest[0].number > first.number:
            self.preempt(newest[0])
            if self._enter_lane(first):
                return True
        return False

    def _enter_lane(self, job: Job) -> bool:
        size = self.limits.lanes
        free: dict[int, int] = {}  # the first free lane of each replica
        for lane, other in enumerate(self.lanes):
            if other is None:
                free.setdefault(lane // size, lane)
        for replica in sorted(free, key=lambda r: (-self.pages[r].available, r)):
            pages, shared = self.pages[replica], self._shared(job, replica)
            missing = -(-len(job.prompt) // self.limits.slots) - len(shared)
            lost_pages = -(-len(job.tokens) // self.limits.slots)  # decoded a second time
            if missing + lost_pages + self._headroom(replica) <= pages.available:
                job.lane, self.lanes[free[replica]] = free[replica], job
                job.pages = shared + [pages.take() for _ in range(missing)]
                job.read, job.sampled = len(shared) * self.limits.slots, 0
                self.shared_tokens += job.read
                return True
            self._release(shared, replica)
        return False

    def _headroom(self, replica: int) -> int:
        """Pages that stay free for the next tokens of running jobs: one for each."""
        size = self.limits.lanes
        return sum(job is not None for job in self.lanes[replica * size : (replica + 1) * size])

    def _shared(self, job: Job, replica: int) -> list[int]:
        """Known pages of the whole chunks that the prompt begins with, without its last token."""
        if not (self.limits.shares and job.shares):
            return []
        chunk, per_chunk = self.limits.chunk, self.limits.chunk // self.limits.slots
        pages = self.pages[replica].share(
            job.prompt[: (len(job.prompt) - 1) // chunk * chunk], job.salt
        )
        num_shared = len(pages) // per_chunk * per_chunk
        self._release(pages[num_shared:], replica)
        return pages[:num_shared]

    def _leave_lane(self, job: Job) -> None:
        assert job.lane is not None
        self._release(job.pages, self._replica(job))
        self.lanes[job.lane] = None
        job.lane, job.pages, job.read = None, [], 0

    def preempt(self, job: Job) -> None:
        """Make a running job wait: it loses its lane and its pages, and is read again later."""
        self._leave_lane(job)
        self.add(job)
        self.preemptions += 1

    def _release(self, numbers: Sequence[int], replica: int) -> None:
        for number in reversed(numbers):  # the end of a prompt is forgotten before its beginning
            self.pages[replica].release(number)

    def _chunk(self, job: Job) -> Chunk:
        start = job.read
        job.read = min(start + self.limits.chunk, len(job.prompt))
        job.sampled += job.is_read
        if self.limits.shares:
            self.pages[self._replica(job)].publish(job.pages, job.prompt[: job.read], job.salt)
        return Chunk(job, start, job.read - start)

    def _tokens(self, ready: list[Job]) -> list[Token]:
        jobs = [job for job in ready if job.lane is not None and self._has_page(job)]
        rows = [
            Token(job, job.sampled, job.length, tuple(job.drafts()))
            for job in jobs
            if job.lane is not None
        ]
        for row in rows:
            row.job.sampled += 1 + len(row.drafts)
        return rows

    def _has_page(self, job: Job) -> bool:
        """Make sure that what the next step feeds has pages; False if the job had to give up its
        own."""
        pages = self.pages[self._replica(job)]
        while len(job.pages) * self.limits.slots <= job.length + len(job.drafts()):
            if pages.available:
                job.pages.append(pages.take())
                continue
            replica = self._replica(job)
            newest = [other for other in self._running() if self._replica(other) == replica][-1]
            self.preempt(newest)
            if newest is job:
                return False
        return True
