"""What every process that reads or tokenizes for another does first."""

import multiprocessing
import os
import signal
import threading


def follow_parent() -> None:
    """Leaves signals to the parent process, which ends its workers; ends when the parent is gone.

    A terminal and Slurm signal the whole group, and the parent may want to finish its step first;
    a parent that was killed would leave its workers waiting for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
