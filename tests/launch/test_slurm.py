"""launch/slurm.sbatch as Slurm starts it, with programs of Slurm's names that note their calls."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SRUN = """#!/bin/bash
echo srun >> "$CALLS"
code=$(head -n 1 "$CODES"); sed -i 1d "$CODES"
[ "$code" = preempted ] && { kill -USR1 "$PPID"; sleep 0.3; code=0; }
exit "$code"
"""


@pytest.mark.parametrize(
    ("codes", "calls", "code"),
    [
        (["0"], ["srun"], 0),
        (["2"], ["srun"], 2),  # an error of the user's
        (["1"], ["srun"], 1),
        (["143"], ["srun"], 143),  # stopped on purpose
        (["75", "137", "0"], ["srun"] * 3, 0),
        (["75", "75", "75"], ["srun"] * 3, 75),
        (["75", "preempted"], ["srun", "srun", "scancel --signal=TERM 7", "scontrol requeue 7"], 0),
    ],
)
def test_slurm_restarts_a_run_that_hung_or_lost_a_process(tmp_path, codes, calls, code):
    noted = tmp_path / "calls"
    (tmp_path / "codes").write_text("\n".join(codes) + "\n")
    for name in ("scancel", "scontrol"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >> "$CALLS"\n')
    (tmp_path / "srun").write_text(SRUN)
    for name in ("srun", "scancel", "scontrol"):
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(noted),
        "CODES": str(tmp_path / "codes"),
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_JOB_ID": "7",
        "MAXMEG_RESTARTS": "2",
    }
    script = ["bash", str(REPOSITORY / "launch" / "slurm.sbatch"), "--config=x.py"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, noted.read_text().splitlines()) == (code, calls), done.stderr
