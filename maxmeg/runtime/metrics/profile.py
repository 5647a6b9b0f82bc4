"""A jax.profiler trace of chosen steps, for TensorBoard, XProf or Perfetto."""

import os

from maxmeg.runtime.metrics.hooks import Hook


def profile_hook(folder: str | os.PathLike, start: int, num_steps: int) -> Hook:
    """Hook that traces steps start to start + num_steps - 1 into `folder`.

    The trace begins before the first of them is dispatched and ends when the metrics of the last
    have arrived; it also ends with the run. Raises ValueError for an impossible range.
    """
    if start < 0 or num_steps < 1:
        raise ValueError(
            f"log.profile_start={start}, log.profile_steps={num_steps}: give a start of at least 1"
            " and at least one step"
        )
    tracing = []

    def before(step):
        if step == start:
            import jax

            jax.profiler.start_trace(os.fspath(folder))
            tracing.append(step)

    def stop():
        if tracing:
            import jax

            tracing.clear()
            jax.profiler.stop_trace()

    def call(step, metrics):
        if step >= start + num_steps - 1:
            stop()

    return Hook(call, before=before, close=stop)
