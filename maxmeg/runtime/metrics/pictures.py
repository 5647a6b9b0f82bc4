"""The pictures that a run leaves in its folder."""

import os

from maxmeg.runtime.metrics.curve import write_curve
from maxmeg.runtime.metrics.loads import write_loads


def write_pictures(run_dir: str) -> dict[str, str]:
    """Draw what a run has measured. Returns the paths of the PNG files by what they show."""
    title = os.path.basename(os.path.normpath(run_dir))
    pictures = {"loss curve": os.path.join(run_dir, "loss.png")}
    write_curve(os.path.join(run_dir, "metrics.jsonl"), pictures["loss curve"], title)
    loads = os.path.join(run_dir, "experts.json")
    if os.path.exists(loads):
        pictures["loads of experts"] = os.path.join(run_dir, "experts.png")
        write_loads(loads, pictures["loads of experts"], title)
    return pictures
