"""Hooks: callbacks with the metrics of finished steps.

Hooks, logs and metrics count steps as users do: step n is the n-th update, from 1, and the
checkpoint after it has its number. The loop and `Schedules` count the updates before a step.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Hook:
    """Runs `call(step, metrics)` when the metrics of a step have arrived, in every step.

    `before(step)` runs before the dispatch of each step, `close()` at the end of the run.
    """

    call: Callable[[int, Metrics], None]
    before: Callable[[int], None] | None = None
    close: Callable[[], None] | None = None


class Hooks:
    """Hooks in order; a context manager that closes all of them, the last one first.

    All hooks share a step's dict of metrics: later hooks see what earlier ones add to it.
    """

    def __init__(self, hooks: Sequence[Hook]):
        self._hooks = tuple(hooks)
        self._closing = contextlib.ExitStack()

    def before(self, step: int) -> None:
        """Call before the dispatch of step `step`."""
        for hook in self._hooks:
            if hook.before is not None:
                hook.before(step)

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Call with the metrics of step `step`, as Python floats."""
        for hook in self._hooks:
            hook.call(step, metrics)

    def __enter__(self) -> "Hooks":
        for hook in self._hooks:
            if hook.close is not None:
                self._closing.callback(hook.close)
        return self

    def __exit__(self, *exception) -> bool | None:
        return self._closing.__exit__(*exception)
