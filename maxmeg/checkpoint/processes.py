"""Agreement between the processes of a run, usable from a background thread.

It uses the coordinator's key-value store, because only the main thread may issue device
collectives, and because a failing process must be able to notify the others, which would otherwise
wait at a barrier.
"""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from maxmeg.checkpoint.integrity import some
from maxmeg.parallel import multihost

T = TypeVar("T")

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

    def together(self, tag: str, function: Callable[[], T], failure: type[Exception]) -> T:
        """Call the function; raise `failure` on all processes if it raised on any of them."""
        value, _ = self._call(tag, function, failure, share=False)
        return value

    def gather(self, tag: str, function: Callable[[], T], failure: type[Exception]) -> list[T]:
        """As `together`; return all processes' JSON values on process 0, elsewhere its value."""
        _, values = self._call(tag, function, failure, share=True)
        return values

    def broadcast(self, tag: str, function: Callable[[], T], failure: type[Exception]) -> T:
        """Return the JSON value of the function, which process 0 calls; `failure` if it raised."""

        def decide() -> Any:
            return function() if self.primary else None

        _, values = self._call(tag, decide, failure, share=True)
        return values[0]

    def _call(
        self, tag: str, function: Callable[[], T], failure: type[Exception], share: bool
    ) -> tuple[T, list[T]]:
        value: Any = None
        cause, error = None, ""
        try:
            value = function()
        except Exception as problem:
            cause = problem
            error = str(problem) if isinstance(problem, failure) else describe(problem)
        if self.count > 1:
            error, values = self._exchange(tag, error, value if share else None)
        else:
            values = [value]
        if error:
            raise failure(error) from cause
        return value, values

    def _exchange(self, tag: str, error: str, payload: Any) -> tuple[str, list[Any]]:
        client = multihost.store()
        channel = f"{self._name}/{tag}"
        number = _rounds[channel, self.index]
        _rounds[channel, self.index] += 1
        here = f"{channel}/{number}"
        timeout = self.timeout_seconds * 1000
        client.key_value_set(f"{here}/{self.index}", json.dumps([error, payload]))
        if not self.primary:
            problems, first = json.loads(client.blocking_key_value_get(f"{here}/all", 2 * timeout))
            return problems, [first]
        answers = []
        for index in range(self.count):
            try:
                answers.append(
                    json.loads(client.blocking_key_value_get(f"{here}/{index}", timeout))
                )
            except jax.errors.JaxRuntimeError:
                answers.append([f"no answer to {tag!r} in {self.timeout_seconds} s", None])
        errors = [f"process {index}: {text}" for index, (text, _) in enumerate(answers) if text]
        problems = some(errors, "; ", 4)
        client.key_value_set(f"{here}/all", json.dumps([problems, payload]))
        if number:  # all processes have read the previous round
            client.key_value_delete(f"{channel}/{number - 1}")
        return problems, [payload for _, payload in answers]


def describe(problem: BaseException) -> str:
    """Return one line: the type of an exception and the start of its message."""
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:1000]}"
