"""launch/*.sbatch as Slurm starts them, with programs of Slurm's names that note their calls."""

import json
import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from slurm_cluster import wait_until

from maxmeg.__main__ import main
from maxmeg.data.prepare.encoding import Options
from maxmeg.data.prepare.merge import merge
from maxmeg.data.prepare.run import prepare

REPOSITORY = Path(__file__).parents[2]
# Ends with the next code of $CODES; "preempted CODE": as Slurm takes the job's node away.
TRAINS = """echo srun >> "$CALLS"; echo "$@" >> "$CALLS.options"
code=$(head -n 1 "$CODES"); sed -i 1d "$CODES"
case "$code" in preempted*) kill -USR1 "$PPID"; sleep 0.3;; esac
exit "${code#preempted }"
"""
# Ends with code 0 when scancel passes the signal on, as the server does.
SERVES = """echo "$@" > "$CALLS"
trap 'exit 0' TERM
echo $$ > "$CALLS.pid"
while true; do sleep 0.1; done
"""
CANCELS = 'echo "$@" > "$CALLS.cancelled"; kill -TERM "$(cat "$CALLS.pid")"\n'
NOTES = 'echo "$(basename "$0")" "$@" >> "$CALLS"\n'


def start(
    folder: Path, script: str, programs: dict[str, str], *arguments: str, **variables: str
) -> subprocess.Popen[str]:
    """Start a script as the job 7. programs: name -> what bash runs in place of it."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "CODES": str(folder / "codes"),
        "HOME": str(folder),
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_JOB_ID": "7",
        "MAXMEG_LOGS": str(folder / "logs"),
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        **variables,
    }
    command, pipe = ["bash", str(REPOSITORY / "launch" / script), *arguments], subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def trained(folder: Path, codes: list[str], **variables: str) -> tuple[int, str]:
    """Exit code and stderr of a training job, whose srun ends with `codes`, one after the other."""
    (folder / "codes").write_text("\n".join(codes) + "\n")
    programs = {"srun": TRAINS, "scancel": NOTES, "scontrol": NOTES}
    job = start(folder, "slurm.sbatch", programs, "--config=x.py", **variables)
    _, errors = job.communicate(timeout=60)
    return job.returncode, errors


REQUEUED = ["scancel --signal=TERM 7", "scontrol requeue 7"]


@pytest.mark.parametrize(
    ("codes", "calls", "code"),
    [
        (["0"], ["srun"], 0),
        (["2"], ["srun"], 2),  # an error of the user's
        (["1"], ["srun"], 1),
        (["143"], ["srun"], 143),  # stopped on purpose
        (["75", "137", "0"], ["srun"] * 3, 0),
        (["75", "75", "75"], ["srun"] * 3, 75),
        (["75", "preempted 0"], ["srun", "srun", *REQUEUED], 0),
        (["preempted 143"], ["srun", *REQUEUED], 0),  # before it was ready to stop by itself
        (["preempted 2"], ["srun", REQUEUED[0]], 2),
    ],
)
def test_slurm_restarts_a_run_that_hung_or_lost_a_process(tmp_path, codes, calls, code):
    actual, errors = trained(tmp_path, codes, MAXMEG_RESTARTS="2")
    noted = (tmp_path / "calls").read_text().splitlines()
    assert (actual, noted) == (code, calls), errors


def test_slurm_measures_every_gpu_first_where_it_is_asked_to(tmp_path):
    assert trained(tmp_path, ["0", "0"], MAXMEG_DOCTOR="1")[0] == 0
    first, then = (tmp_path / "calls.options").read_text().splitlines()
    assert "maxmeg.doctor" in first and "maxmeg.train --config=x.py" in then
    assert trained(tmp_path, ["1"], MAXMEG_DOCTOR="1")[0] == 1  # a slow one: no training
    (tmp_path / "calls").unlink()
    assert trained(tmp_path, ["preempted 143"], MAXMEG_DOCTOR="1")[0] == 0
    assert (tmp_path / "calls").read_text().splitlines() == ["srun", *REQUEUED]


@pytest.mark.parametrize(
    ("gpus", "nodes", "variables", "ntasks", "per_node"),
    [
        ("8", 4, {}, 32, 8),
        ("h100:4", 1, {}, 4, 4),
        ("8", 4, {"SLURM_NTASKS_PER_NODE": "1"}, 4, 1),
        ("", 3, {}, 3, 1),  # nodes without GPUs
    ],
)
def test_slurm_starts_a_process_per_gpu_unless_told_otherwise(
    tmp_path, gpus, nodes, variables, ntasks, per_node
):
    variables |= {"SLURM_GPUS_PER_NODE": gpus} if gpus else {}
    code, errors = trained(tmp_path, ["0"], SLURM_JOB_NUM_NODES=str(nodes), **variables)
    assert code == 0, errors
    options = (tmp_path / "calls.options").read_text().split()
    chosen = [option for option in options if option.startswith(("--ntasks", "--cpu-bind"))]
    assert chosen == [f"--ntasks={ntasks}", f"--ntasks-per-node={per_node}", "--cpu-bind=none"]


def test_sigterm_reaches_the_server_and_its_end_is_the_jobs(tmp_path):
    arguments = "--run_dir=runs/gpt", "--tensor=4"
    job = start(tmp_path, "serve.sbatch", {"srun": SERVES, "scancel": CANCELS}, *arguments)
    wait_until((tmp_path / "calls.pid").exists, 30)
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=30)
    assert (job.returncode, err) == (0, "")
    assert (tmp_path / "calls.cancelled").read_text() == "--signal=TERM 7\n"
    key = tmp_path / ".maxmeg_key"
    options = (tmp_path / "calls").read_text().split()
    asked = ["--ntasks=1", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1"]
    assert options[:8] == [*asked, "python", "-u", "-m", "maxmeg.serve"]
    assert options[8:] == ["--host=0.0.0.0", "--port=8000", f"--api_key=@{key}", *arguments]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_text()) == 48
    assert ":8000/v1 (API)" in out and key.read_text() not in out


@pytest.mark.parametrize("code", [0, 2])
def test_the_exit_code_is_the_servers_and_a_key_is_kept(tmp_path, code):
    (tmp_path / ".maxmeg_key").write_text("secret")
    job = start(tmp_path, "serve.sbatch", {"srun": f"exit {code}\n"})
    assert "exit code 2" * (code == 2) in job.communicate(timeout=30)[1]
    assert job.returncode == code
    assert (tmp_path / ".maxmeg_key").read_text() == "secret"


def test_the_jobs_of_an_array_make_the_partitions(tmp_path):
    """What the script asks of Python is done in this process."""
    path, output = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50)))
    slurm = {"SLURM_ARRAY_TASK_COUNT": "2", "SLURM_CPUS_PER_TASK": "0"}
    arguments = f"--input={path}", f"--output={output}"
    for task in "01":
        programs, slurm["SLURM_ARRAY_TASK_ID"] = {"python": 'echo "$@" > "$CALLS"\n'}, task
        job = start(tmp_path, "preprocess.sbatch", programs, *arguments, **slurm)
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 0, errors
        call = (tmp_path / "calls").read_text().split()
        assert call[:3] == ["-u", "-m", "maxmeg.preprocess"]
        with pytest.raises(SystemExit) as ended:
            main(["preprocess", *call[3:]])
        assert not ended.value.code
    merge([f"{output}_0000{i}-of-00002_text_document" for i in (0, 1)], str(tmp_path / "merged"))
    whole = prepare([str(path)], str(tmp_path / "whole"), Options("bytes"), 0).prefixes["text"]
    for suffix in (".bin", ".idx", ".sums"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == Path(whole + suffix).read_bytes()
