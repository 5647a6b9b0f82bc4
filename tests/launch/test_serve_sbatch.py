"""launch/serve.sbatch as Slurm starts it, with programs of Slurm's names that note their calls."""

import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from slurm_cluster import wait_until

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "launch/serve.sbatch"
# Ends with code 0 when scancel passes the signal on, as the server does.
SRUN = """#!/bin/bash
echo "$@" > "$CALLS"
trap 'exit 0' TERM
echo $$ > "$CALLS.pid"
while true; do sleep 0.1; done
"""
SCANCEL = '#!/bin/bash\necho "$@" > "$CALLS.cancelled"; kill -TERM "$(cat "$CALLS.pid")"\n'


def submitted(folder: Path, srun: str, *arguments: str) -> subprocess.Popen:
    for name, text in (("srun", srun), ("scancel", SCANCEL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "HOME": str(folder),
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
    }
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_sigterm_reaches_the_server_and_its_end_is_the_jobs(tmp_path):
    job = submitted(tmp_path, SRUN, "--run_dir=runs/gpt", "--tensor=4")
    wait_until((tmp_path / "calls.pid").exists, 30)
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=30)
    assert (job.returncode, err) == (0, "")
    assert (tmp_path / "calls.cancelled").read_text() == "--signal=TERM 7\n"
    key = tmp_path / ".maxmeg_key"
    options = (tmp_path / "calls").read_text().split()
    asked = ["--ntasks=1", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1"]
    assert options[:8] == [*asked, "python", "-u", "-m", "maxmeg.serve"]
    served = ["--host=0.0.0.0", "--port=8000", f"--api_key=@{key}"]
    assert options[8:] == [*served, "--run_dir=runs/gpt", "--tensor=4"]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_text()) == 48
    assert ":8000/v1 (API)" in out and key.read_text() not in out


@pytest.mark.parametrize("code", [0, 2])
def test_the_exit_code_is_the_servers_and_a_key_is_kept(tmp_path, code):
    (tmp_path / ".maxmeg_key").write_text("secret")
    job = submitted(tmp_path, f"#!/bin/bash\nexit {code}\n")
    assert "exit code 2" * (code == 2) in job.communicate(timeout=30)[1]
    assert job.returncode == code
    assert (tmp_path / ".maxmeg_key").read_text() == "secret"
