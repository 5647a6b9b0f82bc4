"""Agreement between the processes of a run, usable from a background thread.

It uses the coordinator's key-value store, because only the main thread may issue device
collectives, and because a failing process must be able to notify the others, which would otherwise
wait at a barrier.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from maxmeg.checkpoint.integrity import CorruptCheckpointError, some
from maxmeg.processes import multihost

T = TypeVar("T")

# Exception types that are raised unchanged on all processes; others become a RuntimeError. If
# processes raise different types, the first in this table is raised: out of memory before damage.
KINDS: dict[str, type[Exception]] = {
    "MemoryError": MemoryError,
    "JaxRuntimeError": jax.errors.JaxRuntimeError,
    "TimeoutError": TimeoutError,
    "OSError": OSError,
    "CorruptCheckpointError": CorruptCheckpointError,
    "ValueError": ValueError,
}

TIMEOUT_SECONDS = 1800
# Rounds so far of each (channel, process), shared by all objects of a channel.
_rounds: Counter[tuple[str, int]] = Counter()


class Processes:
    """Calls that all processes make together, in the same order for each name and tag.

    name: the same on all processes. Objects of different names count calls independently, so
    processes may create them in different orders.
    timeout_seconds: how long process 0 waits for the others in each call.
    """

    def __init__(self, name: str, timeout_seconds: int = TIMEOUT_SECONDS) -> None:
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._name = f"maxmeg/{name}"
        self.timeout_seconds = timeout_seconds

    @property
    def primary(self) -> bool:
        return self.index == 0

    def together(
        self, tag: str, function: Callable[[], T], failure: type[Exception] | None = None
    ) -> T:
        """Call the function; if it raised on any process, raise the same exception on all.

        failure: of this type, whatever the function raised; None: of the type that it raised.
        """
        value, _ = self._call(tag, function, failure, share=False)
        return value

    def gather(
        self, tag: str, function: Callable[[], T], failure: type[Exception] | None = None
    ) -> list[T]:
        """As `together`; return all processes' JSON values on process 0, elsewhere its value."""
        _, values = self._call(tag, function, failure, share=True)
        return values

    def broadcast(
        self, tag: str, function: Callable[[], T], failure: type[Exception] | None = None
    ) -> T:
        """As `together`, but process 0 alone calls the function; return its JSON value."""

        def decide() -> Any:
            return function() if self.primary else None

        _, values = self._call(tag, decide, failure, share=True)
        return values[0]

    def _call(
        self, tag: str, function: Callable[[], T], failure: type[Exception] | None, share: bool
    ) -> tuple[T, list[T]]:
        value: Any = None
        cause, problem = None, None
        try:
            value = function()
        except Exception as error:
            cause = error
            problem = Problem.of(error, failure)
        if self.count > 1:
            problem, values = self._exchange(tag, problem, value if share else None)
        else:
            values = [value]
        if cause and self.count == 1 and isinstance(cause, failure or Exception):
            raise cause
        if problem and failure:
            raise failure(problem.text) from cause
        if problem:
            raise problem.error() from cause
        return value, values

    def _exchange(
        self, tag: str, problem: "Problem | None", payload: Any
    ) -> tuple["Problem | None", list[Any]]:
        client = multihost.store()
        channel = f"{self._name}/{tag}"
        number = _rounds[channel, self.index]
        _rounds[channel, self.index] += 1
        here = f"{channel}/{number}"
        timeout = self.timeout_seconds * 1000
        client.key_value_set(f"{here}/{self.index}", json.dumps([problem, payload]))
        if not self.primary:
            worst_problem, first = json.loads(
                client.blocking_key_value_get(f"{here}/all", 2 * timeout)
            )
            return worst_problem and Problem(*worst_problem), [first]
        problems, payloads = {}, []
        for index in range(self.count):
            try:
                answer = json.loads(client.blocking_key_value_get(f"{here}/{index}", timeout))
            except jax.errors.JaxRuntimeError:
                silent = f"no answer to {tag!r} in {self.timeout_seconds} s"
                answer = [Problem("TimeoutError", silent), None]
            if answer[0]:
                problems[index] = Problem(*answer[0])
            payloads.append(answer[1])
        worst_problem = worst(problems)
        client.key_value_set(f"{here}/all", json.dumps([worst_problem, payload]))
        if number:  # all processes have read the previous round
            client.key_value_delete(f"{channel}/{number - 1}")
        return worst_problem, payloads


class Problem(NamedTuple):
    """An exception in a form that can be sent to other processes. number: errno of an OSError, or
    0."""

    kind: str
    text: str
    number: int = 0

    @classmethod
    def of(cls, error: Exception, failure: type[Exception] | None) -> "Problem":
        kind = next((name for name, each in KINDS.items() if isinstance(error, each)), "")
        text = str(error) if isinstance(error, failure or (*KINDS.values(),)) else describe(error)
        if failure is None and isinstance(error, OSError) and error.strerror:
            text = ": ".join([error.strerror, *([str(error.filename)] if error.filename else [])])
        return cls(kind, text, getattr(error, "errno", None) or 0)

    def error(self) -> Exception:
        kind = KINDS.get(self.kind, RuntimeError)
        if self.number and issubclass(kind, OSError):
            return kind(self.number, self.text)
        return kind(self.text)


def worst(problems: Mapping[int, Problem]) -> Problem | None:
    """Combine the errors of all processes into one, whose kind comes first in KINDS."""
    if not problems:
        return None
    kinds = [*KINDS, ""]
    first = min(problems.values(), key=lambda problem: kinds.index(problem.kind))
    texts = [f"process {i}: {each.text}" for i, each in problems.items() if each.kind == first.kind]
    return first._replace(text=some(texts, "; ", 4))


def describe(problem: BaseException) -> str:
    """Return one line: the type of an exception and the start of its message."""
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:1000]}"
