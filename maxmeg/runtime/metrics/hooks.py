"""Hooks: callbacks with the metrics of finished steps."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Hook:
    """Runs `call(step, metrics)` on every `every`-th step, counted from 0; every=0: never.

    first, last: whether it also runs on step 0 and on the last step of the run. `before(step)` runs
    before the dispatch of each step, `close()` at the end of the run.
    """

    call: Callable[[int, Metrics], None]
    every: int = 1
    first: bool = True
    last: bool = True
    before: Callable[[int], None] | None = None
    close: Callable[[], None] | None = None

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether the hook runs after step `step` of `num_steps`."""
        if self.every <= 0:
            return False
        if step == num_steps - 1:
            return self.last or (step > 0 and step % self.every == 0)
        return self.first if step == 0 else step % self.every == 0


class Hooks:
    """Hooks in order; a context manager that closes all of them, the last one first.

    All hooks share a step's dict of metrics: later hooks see what earlier ones add to it.
    """

    def __init__(self, hooks: Sequence[Hook], num_steps: int):
        self._hooks = tuple(hooks)
        self._num_steps = num_steps
        self._closing = contextlib.ExitStack()

    def before(self, step: int) -> None:
        """Call before the dispatch of step `step`."""
        for hook in self._hooks:
            if hook.before is not None:
                hook.before(step)

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Call with the metrics of step `step`, as Python floats."""
        for hook in self._hooks:
            if hook.is_due(step, self._num_steps):
                hook.call(step, metrics)

    def __enter__(self) -> "Hooks":
        for hook in self._hooks:
            if hook.close is not None:
                self._closing.callback(hook.close)
        return self

    def __exit__(self, *exception) -> bool | None:
        return self._closing.__exit__(*exception)
