"""Which job of a Slurm array this process belongs to."""

import os


def array_task() -> int | None:
    """The job's number in its array; None outside of one."""
    found = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    return int(found) if found.isdecimal() else None
