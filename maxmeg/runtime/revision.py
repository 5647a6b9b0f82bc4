"""Which version of maxmeg runs."""

import subprocess
from pathlib import Path

import maxmeg

_COMMAND = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def commit() -> str:
    """Commit of the checkout that maxmeg is imported from, with "-dirty" if files were changed.

    Empty for an installed package.
    """
    folder = Path(maxmeg.__file__).parents[1]
    if not (folder / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(folder), *_COMMAND]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
