"""A jax.profiler trace of some steps, for TensorBoard, XProf or Perfetto."""

import os

import jax

from maxmeg.processes import multihost
from maxmeg.runtime.metrics.hooks import Hook
from maxmeg.runtime.screen import say


def profile_hook(folder: str | os.PathLike, start: int, num_steps: int) -> Hook:
    """Hook that traces steps start to start + num_steps - 1 into `folder`.

    The trace starts before the dispatch of the first step and stops when the metrics of the last
    step have arrived, or with the run. Raises ValueError for an impossible range.
    """
    if start < 1 or num_steps < 1:
        raise ValueError(
            f"log.profile_start={start}, log.profile_steps={num_steps}: give a start of at least 1"
            " and at least one step"
        )
    tracing = []

    def before(step):
        if step == start:
            jax.profiler.start_trace(os.fspath(folder))
            tracing.append(step)

    def stop():
        if tracing:
            tracing.clear()
            jax.profiler.stop_trace()
            if multihost.is_primary():
                say(
                    f"profile: {folder}: xprof --logdir={folder} (pip install xprof), or open its "
                    "trace.json.gz in ui.perfetto.dev"
                )

    def call(step, metrics):
        if step >= start + num_steps - 1:
            stop()

    return Hook(call, before=before, close=stop)
