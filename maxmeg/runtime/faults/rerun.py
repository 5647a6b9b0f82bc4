"""Runs a skipped step again, to tell a transient hardware fault from a persistent one.

It follows Megatron-LM's rerun state machine. On working hardware a step is a deterministic function
of state and batch (on GPUs with train.deterministic).
"""

import dataclasses
import logging
from collections.abc import Callable

import numpy as np

log = logging.getLogger("maxmeg")
COMPARED = ("loss", "grad_norm")


def with_rerun(train_step: Callable) -> Callable:
    """`train_step` that runs again when it skips its update; it waits for every step's metrics.

    The second result is kept. metrics["rerun"]: 0 if the step ran once, 1 if both results were
    equal (persistent), 2 if they differed (transient).
    """

    def step(state, batch, controls):
        state, first = train_step(state, batch, controls)
        if not float(first["skipped"]):
            return state, {**first, "rerun": 0.0}
        number = int(state.step)
        # A skipped step changes the step number alone: this is the state before it.
        state = dataclasses.replace(state, step=state.step - 1)
        state, second = train_step(state, batch, controls)
        results = [{name: np.asarray(m[name]) for name in COMPARED} for m in (first, second)]
        differs = any(results[0][name].tobytes() != results[1][name].tobytes() for name in COMPARED)
        log.warning(
            "step %d ran twice from the same state and batch: %s, then %s: %s",
            *(number, _text(results[0]), _text(results[1])),
            "the results differ, a transient fault of the hardware"
            if differs
            else "the same result, so the cause is the data, the numerics or a persistent fault",
        )
        return state, {**second, "rerun": 1.0 + differs}

    return step


def _text(result: dict[str, np.ndarray]) -> str:
    return ", ".join(f"{name}={float(value)!r}" for name, value in result.items())
