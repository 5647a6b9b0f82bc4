"""When Python collects garbage. A collection that one process begins by itself delays all others,
which wait for it in the next collective; here all processes collect after the same step."""

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def collected_every(interval: int) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of steps made after each step: it collects after the first
    step and after every `interval` steps. 0: Python collects when it chooses, and the function does
    nothing.

    What the first collection keeps (modules, compiled programs) is not looked at again. Python's
    own settings return at the end.
    """
    if not interval:
        yield lambda steps: None
        return
    was_enabled, frozen = gc.isenabled(), False

    def after(steps: int) -> None:
        nonlocal frozen
        if not frozen:
            gc.disable()
            gc.collect()
            gc.freeze()
            frozen = True
        elif steps % interval == 0:
            gc.collect()

    try:
        yield after
    finally:
        if frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
