"""The benchmarks of servers run against servers of their own."""

import re
import subprocess
import sys

import pytest
from tiny_servers import REPOSITORY, make_run


@pytest.mark.slow
def test_quick_benchmark_of_a_server(tmp_path):
    script = REPOSITORY / "benchmarks" / "serving.py"
    command = [sys.executable, str(script), f"--run_dir={make_run(tmp_path)}", "--quick"]
    command += ["--lanes=4", "--rate=0,50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    names, *rows = done.stdout.splitlines()
    assert "lanes used" in names and len(rows) == 2
    for row in rows:
        _, _, tokens, rate, *_ = row.split()
        assert int(tokens) > 0 and float(rate) > 0


@pytest.mark.slow
def test_hostile_clients_end_no_server(tmp_path):
    script = REPOSITORY / "benchmarks" / "hostile_clients.py"
    command = [sys.executable, str(script), f"--run_dir={make_run(tmp_path)}", "--seconds=5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "server ended: False" in done.stdout, done.stdout + done.stderr
    assert re.search(r"large_prompts: .*4\d\d: ", done.stdout) and " 0 failed" in done.stdout
