"""launch/slurm.sbatch as Slurm starts it, with programs of Slurm's names that note their calls."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SRUN = """#!/bin/bash
echo srun >> "$CALLS"; echo "$@" >> "$CALLS.options"
code=$(head -n 1 "$CODES"); sed -i 1d "$CODES"
[ "$code" = preempted ] && { kill -USR1 "$PPID"; sleep 0.3; code=0; }
exit "$code"
"""


def submitted(folder: Path, codes: list[str], **variables: str) -> subprocess.CompletedProcess:
    """Run the script as in a job; srun ends with `codes`, one after the other."""
    (folder / "codes").write_text("\n".join(codes) + "\n")
    for name in ("scancel", "scontrol"):
        (folder / name).write_text(f'#!/bin/bash\necho {name} "$@" >> "$CALLS"\n')
    (folder / "srun").write_text(SRUN)
    for name in ("srun", "scancel", "scontrol"):
        (folder / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "CODES": str(folder / "codes"),
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_JOB_ID": "7",
        "MAXMEG_LOGS": str(folder / "logs"),
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        **variables,
    }
    script = ["bash", str(REPOSITORY / "launch" / "slurm.sbatch"), "--config=x.py"]
    return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)


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
    done = submitted(tmp_path, codes, MAXMEG_RESTARTS="2")
    noted = (tmp_path / "calls").read_text().splitlines()
    assert (done.returncode, noted) == (code, calls), done.stderr


@pytest.mark.parametrize(
    ("variables", "ntasks", "per_node"),
    [
        ({"SLURM_GPUS_PER_NODE": "8", "SLURM_JOB_NUM_NODES": "4"}, 32, 8),
        ({"SLURM_GPUS_PER_NODE": "h100:4", "SLURM_JOB_NUM_NODES": "1"}, 4, 4),
        (
            {
                "SLURM_GPUS_PER_NODE": "8",
                "SLURM_JOB_NUM_NODES": "4",
                "SLURM_NTASKS_PER_NODE": "1",
            },
            4,
            1,
        ),
        ({"SLURM_JOB_NUM_NODES": "3"}, 3, 1),  # nodes without GPUs
    ],
)
def test_slurm_starts_a_process_per_gpu_unless_told_otherwise(
    tmp_path, variables, ntasks, per_node
):
    done = submitted(tmp_path, ["0"], **variables)
    assert done.returncode == 0, done.stderr
    options = (tmp_path / "calls.options").read_text().split()
    chosen = [option for option in options if option.startswith(("--ntasks", "--cpu-bind"))]
    assert chosen == [f"--ntasks={ntasks}", f"--ntasks-per-node={per_node}", "--cpu-bind=none"]
