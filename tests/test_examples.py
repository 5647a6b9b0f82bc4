"""The examples: each says what it does, and does it."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
EXAMPLES = REPOSITORY / "examples"
SHOWN = {  # a part of what each prints; "": takes too long for tests
    "own_text.py": r"LanguageModel\(.*own_text, step 600, 115,136 parameters.*\nReturn .{20}",
    "activations_and_steering.py": r"trained: [a-z. ]{20,}\nsteered: [a-z ]*[A-Z. ]{15,}",
    "custom_layer.py": r"step   0  loss 5\.\d+\n(.*\n)*step 100  loss 0\.[0-4]",
    "custom_loss_and_data.py": r"3 6 9 12\s+15 18 21 24 27 30",
    "long_context.py": "",
    "plan_a_cluster.py": r"as configured: \d+ GiB per GPU(.*\n)*fsdp 16, .* GiB per GPU",
}
SCRIPTS = {  # flags that make it shorter, and a part of what it prints; None: needs other programs
    "experts.sh": (
        ["--train.num_steps=2", "--log.sample_prompt="],
        r"expert load: (.*\n)*mixtral-8x7b on 64 x h100",
    ),
    "export_and_vllm.sh": ([], r"exported/ is ready|Uvicorn"),
    "lora_chat.sh": None,  # run in tests/oracle/test_real_weights.py
    "from_megatron.sh": None,  # run in tests/oracle/test_megatron_oracle.py
    "slurm_container.sh": None,  # needs pyxis
}
ONE_DEVICE = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(REPOSITORY)}


def test_every_example_is_run_or_at_least_parsed():
    assert {path.name for path in EXAMPLES.iterdir()} == {*SHOWN, *SCRIPTS}
    for name in SHOWN:
        ast.parse((EXAMPLES / name).read_text())
    for name in SCRIPTS:
        subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHOWN if SHOWN[name]])
def test_an_example_prints_what_it_says(name, tmp_path):
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=tmp_path, env=ONE_DEVICE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(SHOWN[name], done.stdout), done.stdout


def test_the_example_of_a_plan_on_fewer_gpus(capsys, monkeypatch):
    path = str(EXAMPLES / "plan_a_cluster.py")
    monkeypatch.setattr(sys, "argv", [path, "gpt", "h100x2"])
    runpy.run_path(path, run_name="__main__")
    shown = r"as configured: 0 GiB per GPU, fits: True\n(.*\n)*(data|fsdp) 2, .*: 0 GiB per GPU\n"
    assert re.search(shown, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if SCRIPTS[name]])
def test_a_script_prints_what_it_says(name, tmp_path):
    flags, shown = SCRIPTS[name] or ([], "")
    environment = ONE_DEVICE | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(EXAMPLES / name), *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(shown, done.stdout), done.stdout
