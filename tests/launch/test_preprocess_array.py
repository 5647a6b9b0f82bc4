"""launch/preprocess.sbatch as Slurm starts it, without Slurm."""

import json
import os
import subprocess
import sys
from pathlib import Path

from maxmeg.data.prepare.encoding import Options
from maxmeg.data.prepare.merge import merge
from maxmeg.data.prepare.run import prepare

REPOSITORY = Path(__file__).parents[2]


def test_the_jobs_of_an_array_make_the_partitions(tmp_path):
    path, output = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50)))
    script = ["bash", str(REPOSITORY / "launch" / "preprocess.sbatch")]
    for task in "01":
        slurm = {"SUBMIT_DIR": REPOSITORY, "ARRAY_TASK_COUNT": 2, "ARRAY_TASK_ID": task}
        slurm["CPUS_PER_TASK"] = 0
        environment = os.environ | {f"SLURM_{name}": str(value) for name, value in slurm.items()}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        done = subprocess.run(
            [*script, f"--input={path}", f"--output={output}"],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    merge([f"{output}_0000{i}-of-00002_text_document" for i in (0, 1)], str(tmp_path / "merged"))
    whole = prepare([str(path)], str(tmp_path / "whole"), Options("bytes"), 0).prefixes["text"]
    for suffix in (".bin", ".idx", ".sums"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == Path(whole + suffix).read_bytes()
