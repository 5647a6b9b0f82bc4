"""The thread that owns the engine. The event loop sends it tickets, and it sends back updates."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import queue
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence

from maxmeg.inference.engine import Engine, Reply
from maxmeg.inference.requests import Request
from maxmeg.server.errors import ApiError

logger = logging.getLogger(__name__)


class Update(typing.NamedTuple):
    """What is new in reply number `index` of a ticket. `prompt_logprobs` come with the first."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    prompt_logprobs: list[float]
    prompt_top: list[list[tuple[int, float]]]
    reason: str
    error: str


@dataclasses.dataclass(eq=False)
class Ticket:
    """`n` replies to each prompt of an HTTP request. streams: with updates before replies end.

    grammar: kind and text of the request's. The rest belongs to the engine's thread. sent: number
    of characters and tokens of each reply in updates. reported: number of its tokens, and when.
    """

    id: str
    prompts: Sequence[Sequence[int]]
    request: Request
    seed: int
    n: int = 1
    streams: bool = False
    grammar: tuple[str, str] | None = None
    updates: asyncio.Queue = dataclasses.field(default_factory=asyncio.Queue)
    accepted: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    refusal: ApiError | None = None
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    replies: list[Reply] = dataclasses.field(default_factory=list)
    sent: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    reported: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.prompts) * self.n


class Observer(typing.Protocol):
    """Is told of new tokens (seconds: since those before), of ended tickets, and of steps."""

    def token(self, count: int, seconds: float, is_first: bool) -> None: ...
    def ended(self, ticket: Ticket, seconds: float) -> None: ...
    def stepped(self, engine: Engine, seconds: float) -> None: ...


class Worker:
    """capacity: largest number of replies at a time, in lanes and waiting."""

    def __init__(self, engine: Engine, capacity: int, observers: Sequence[Observer] = ()) -> None:
        self.engine, self.capacity, self.observers = engine, capacity, observers
        self.replies = 0  # of the event loop: those submitted that have not ended
        self.is_warm, self.failure = False, None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: list[Ticket] = []
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop, failed: Callable[[], None]) -> None:
        self._loop, self._failed = loop, failed
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step."""
        self._inbox.put(functools.partial(setattr, self, "_stops", True))
        self._thread.join()

    @contextlib.contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Take places in the queue for the replies that are submitted in the block; they are free
        again if it raises. ApiError if the queue is full."""
        if not self.is_warm:
            raise ApiError(503, "the engine is not ready", retry=5)
        if self.replies + count > self.capacity:
            raise ApiError(429, f"{self.replies} replies are under way: try again later", retry=1)
        self.replies += count
        try:
            yield
        except BaseException:
            self.replies -= count
            raise

    async def submit(self, ticket: Ticket) -> None:
        """Start a ticket in `places`; ApiError if the engine refuses a prompt."""
        self._inbox.put(functools.partial(self._begin, ticket))
        await ticket.accepted.wait()
        if ticket.refusal:
            raise ticket.refusal

    def cancel(self, ticket: Ticket) -> None:
        self._inbox.put(functools.partial(self._cancel, ticket))

    def _run(self) -> None:
        try:
            self.engine.warm_up()
            self._report(0.0)
            self.is_warm = True
            while not self._stops:
                self._take(wait=not self._step())
        except Exception as error:
            logger.exception("the engine has ended")
            self.failure = error
            self._call(self._failed)
        finally:
            self.is_warm = False

    def _take(self, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._stops:
                self._inbox.get(block=wait)()
                wait = False

    def _step(self) -> bool:
        """Run a step and send what is new; whether there is more to do."""
        start = time.monotonic()
        try:
            busy = self.engine.step()
        except Exception:
            if self.engine.trained.mesh.is_multi_process:  # the others may have started the step
                raise
            logger.exception("a step failed: its requests end, and the engine goes on")
            self.engine.reset()
            busy = False
        if self._open:
            self._report(time.monotonic() - start)
        return busy

    def _begin(self, ticket: Ticket) -> None:
        try:
            for ids in ticket.prompts:
                self.engine.check(ids, ticket.request)
            for number in range(ticket.count):
                ids = ticket.prompts[number // ticket.n]
                reply = self.engine.submit(ids, ticket.request, ticket.seed, number)
                ticket.replies.append(reply)
                ticket.sent.append((0, 0))
                ticket.reported.append((0, ticket.arrived))
            self._open.append(ticket)
        except Exception as error:
            for reply in ticket.replies:
                self.engine.cancel(reply)
            ticket.refusal = ApiError(400, str(error))
            if not isinstance(error, ValueError):
                logger.exception("a request failed")
                ticket.refusal = ApiError(500, f"the engine failed: {type(error).__name__}")
        self._call(self._accept, ticket)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket in self._open:
            for reply in ticket.replies:
                self.engine.cancel(reply)
            self._report(0.0)

    def _report(self, seconds: float) -> None:
        updates, now = [], time.monotonic()
        for ticket in [*self._open]:
            for number, reply in enumerate(ticket.replies):
                self._observe(ticket, number, now)
                characters, tokens = ticket.sent[number]
                is_new = bool(reply.reason) or (ticket.streams and len(reply.tokens) > tokens)
                if characters >= 0 and is_new:
                    updates.append((ticket, self._update(ticket, number)))
            if all(reply.reason for reply in ticket.replies):
                self._open.remove(ticket)
                for observer in self.observers:
                    observer.ended(ticket, now - ticket.arrived)
        for observer in self.observers:
            observer.stepped(self.engine, seconds)
        self._call(self._deliver, updates)

    def _observe(self, ticket: Ticket, number: int, now: float) -> None:
        count, before = len(ticket.replies[number].tokens), ticket.reported[number]
        if count > before[0]:
            ticket.reported[number] = count, now
            for observer in self.observers:
                observer.token(count - before[0], now - before[1], not before[0])

    def _update(self, ticket: Ticket, number: int) -> Update:
        reply, (characters, tokens) = ticket.replies[number], ticket.sent[number]
        prompt = (reply.prompt_logprobs, reply.prompt_top) if not tokens else ([], [])
        text = reply.text
        ticket.sent[number] = (-1 if reply.reason else len(text)), len(reply.tokens)
        new = (reply.tokens[tokens:], reply.logprobs[tokens:], reply.top[tokens:])
        return Update(number, text[characters:], *new, *prompt, reply.reason, reply.error)

    def _deliver(self, updates: Sequence[tuple[Ticket, Update]]) -> None:
        for ticket, update in updates:
            self.replies -= bool(update.reason)
            ticket.updates.put_nowait(update)

    def _accept(self, ticket: Ticket) -> None:
        ticket.accepted.set()

    def _call(self, function: Callable, *arguments: typing.Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)
