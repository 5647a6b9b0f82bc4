"""Agreement between the processes of a run, usable from a background thread.

It goes through the coordinator's key-value store: device collectives may only be issued by the
main thread, and a process that fails must be able to tell the others instead of leaving them at a
barrier.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")

TIMEOUT_SECONDS = 1800
_instances = itertools.count()


class Processes:
    """One channel; every process creates its channels, and uses each, in the same order."""

    def __init__(self) -> None:
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._name = f"maxmeg/checkpoint/{next(_instances)}"
        self._rounds: Counter[str] = Counter()

    @property
    def primary(self) -> bool:
        return self.index == 0

    def together(self, tag: str, function: Callable[[], T], failure: type[Exception]) -> T:
        """Calls the function; raises `failure` in every process if it raised in any."""
        value, _ = self._call(tag, function, failure, share=False)
        return value

    def gather(self, tag: str, function: Callable[[], T], failure: type[Exception]) -> list[T]:
        """As `together`, with JSON-able values: all on process 0, only its own elsewhere."""
        _, values = self._call(tag, function, failure, share=True)
        return values

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
        client = _client()
        number = self._rounds[tag]
        self._rounds[tag] += 1
        here = f"{self._name}/{tag}/{number}"
        timeout = TIMEOUT_SECONDS * 1000
        client.key_value_set(f"{here}/{self.index}", json.dumps([error, payload]))
        if not self.primary:
            together, first = json.loads(client.blocking_key_value_get(f"{here}/all", 2 * timeout))
            return together, [first]
        answers = []
        for index in range(self.count):
            try:
                answers.append(
                    json.loads(client.blocking_key_value_get(f"{here}/{index}", timeout))
                )
            except jax.errors.JaxRuntimeError:
                answers.append([f"no answer to {tag!r} in {TIMEOUT_SECONDS} s", None])
        errors = [f"process {index}: {text}" for index, (text, _) in enumerate(answers) if text]
        together = "; ".join(errors[:4]) + (f"; and {len(errors) - 4} more" * (len(errors) > 4))
        client.key_value_set(f"{here}/all", json.dumps([together, payload]))
        if number:  # whoever answered this round has read the last
            client.key_value_delete(f"{self._name}/{tag}/{number - 1}")
        return together, [payload for _, payload in answers]


def describe(problem: BaseException) -> str:
    """One line: the kind of an exception and the start of its text."""
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:1000]}"


def _client() -> Any:
    from jax._src import distributed  # no public access to the key-value store

    return distributed.global_state.client
