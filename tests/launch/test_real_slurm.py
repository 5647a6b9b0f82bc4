"""launch/*.sbatch on a real Slurm cluster of two nodes, where Slurm is installed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import NODES, can_start, lose_node, slurm_cluster, wait_until

REPOSITORY = Path(__file__).parents[2]
SETTINGS = {
    "model.hidden_size": 32,
    "model.num_layers": 1,
    "model.attention.num_heads": 2,
    "data.sequence_length": 16,
    "data.mock": "true",
    "train.global_batch_size": 4,
    "train.eval_every": 0,
    "checkpoint.save_every": 5,
    "log.every": 1,
    "log.tensorboard": "false",
    "log.sample_prompt": "",
}
SECONDS = 300  # until something happens: a busy machine starts four processes slowly

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_start(), reason="needs slurmctld, slurmd and the rights of root"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(folder) as environment:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
        yield environment | {"PATH": path, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}


def submit(
    cluster, folder: Path, num_steps: int, layout: str = "--ntasks-per-node=1", **variables: str
) -> str:
    """Submit a run on two nodes from `folder`; returns the job's number. layout: an option of
    sbatch; the script's own default is a process per GPU, for which this machine is too small."""
    settings = SETTINGS | {"train.num_steps": num_steps, "run_dir": str(folder / "run")}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    arguments = layout, str(REPOSITORY / "launch/slurm.sbatch"), "--config=gpt", *flags
    return sbatch(cluster, folder, *arguments, **variables)


def sbatch(cluster, folder: Path, *arguments: str, **variables: str) -> str:
    """Submit a job of two nodes from `folder`; returns its number."""
    command = ["sbatch", "--parsable", "--nodes=2", *arguments]
    environment = cluster | {"PYTHONPATH": str(REPOSITORY)} | variables
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for_steps(cluster, job: str, folder: Path, count: int) -> None:
    """Wait for `count` steps; AssertionError at once if the job has ended."""

    def reached() -> bool:
        assert state(cluster, job) in ("PENDING", "CONFIGURING", "RUNNING"), log_of(folder)
        return len(steps(folder)) >= count

    wait_until(reached, SECONDS)


def state(cluster, job: str) -> str:
    command = ["scontrol", "show", "job", job, "--oneliner"]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=20)
    words = dict(word.partition("=")[::2] for word in done.stdout.split() if "=" in word)
    return words.get("JobState", "")


def ended(cluster, job: str) -> bool:
    return state(cluster, job) in ("COMPLETED", "FAILED")


def wait_for_second_start(cluster, job: str) -> None:
    """Wait until a requeued job has started again and ended."""
    wait_until(lambda: state(cluster, job) == "PENDING", SECONDS)
    time.sleep(3)  # Slurm starts no job again within the second in which it ended
    release = ["scontrol", "update", f"jobid={job}", "StartTime=now"]  # instead of two minutes
    subprocess.run(release, env=cluster, check=True, timeout=20)
    wait_until(lambda: ended(cluster, job), SECONDS)


def steps(folder: Path) -> list[int]:
    path = folder / "run/metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(row)["step"] for row in path.read_text().splitlines() if row.endswith("}")]


def log_of(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("maxmeg-*.log")))


def test_a_preempted_job_is_requeued_and_resumes(cluster, tmp_path):
    """On two nodes of two GPUs: four processes."""
    job = submit(cluster, tmp_path, 150, "--gpus-per-node=2")
    wait_for_steps(cluster, job, tmp_path, 8)
    send = ["scancel", "--batch", "--signal=USR1", job]
    subprocess.run(send, env=cluster, check=True, timeout=20)
    wait_until(lambda: "is requeued" in log_of(tmp_path), SECONDS)
    stopped = steps(tmp_path)[-1]
    assert 8 <= stopped < 150
    wait_for_second_start(cluster, job)
    assert state(cluster, job) == "COMPLETED", log_of(tmp_path)
    assert f"resumed at step {stopped}" in log_of(tmp_path)
    assert steps(tmp_path) == list(range(1, 151))
    logs = tmp_path / f"logs/maxmeg-{job}"
    assert sorted(path.name for path in logs.iterdir()) == [f"{rank}.log" for rank in range(4)]


def test_a_job_that_loses_a_node_goes_on_with_a_spare_one(cluster, tmp_path):
    """The last test: the node stays lost."""
    job = submit(cluster, tmp_path, 200)
    wait_for_steps(cluster, job, tmp_path, 8)
    lose_node(NODES[1])
    wait_for_second_start(cluster, job)
    assert state(cluster, job) == "COMPLETED", log_of(tmp_path)
    assert "resumed at step" in log_of(tmp_path)
    assert steps(tmp_path) == list(range(1, 201))
