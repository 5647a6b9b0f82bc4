"""What the environment of a Slurm job says: its end, its number in an array."""

import logging
import os
import time

log = logging.getLogger("maxmeg")


def warn_of_late_save(save_seconds: float | None) -> None:
    """Warn if a save that takes `save_seconds`, like the last one, would outlast the Slurm job."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if save_seconds is None or not end.isdecimal():
        return
    left = int(end) - time.time()
    if save_seconds > left:
        log.warning(
            "the job ends in %.0f s and the last save took %.0f s: this save may be lost. Ask for "
            "more notice: #SBATCH --signal=B:USR1@%d",
            *(left, save_seconds, int(2 * save_seconds) + 60),
        )


def resuming_words() -> str:
    """How a run that was stopped is resumed."""
    if os.environ.get("SLURM_JOB_ID"):
        return "the job resumes from there once it runs again"
    return "the same command resumes from there"


def array_task() -> int | None:
    """Number of this job in its Slurm array; None outside of an array."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    return int(task) if task.isdecimal() else None
