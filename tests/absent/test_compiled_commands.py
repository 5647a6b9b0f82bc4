"""Commands on a machine with the CUDA plugin of `maxmeg[plan]` and no GPU: they use the CPU, and
JAX does not print the plugin's traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from short_runs import write_corpus

from maxmeg.runtime import platform

SETTINGS = {
    "model.num_layers": 1,
    "model.hidden_size": 32,
    "model.attention.num_heads": 2,
    "data.split": "8,1,1",
    "data.sequence_length": 32,
    "train.num_steps": 1,
    "train.global_batch_size": 2,
    "train.eval_every": 0,
    "log.tensorboard": "false",
}
pytestmark = pytest.mark.skipif(platform.has_nvidia_gpu(), reason="commands use the GPU here")


def errors_of(*arguments: str) -> str:
    """What a program that ends well prints on stderr, started as a user does."""
    ours = ("JAX_PLATFORMS", "XLA_FLAGS")  # of tests
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    settings = SETTINGS | {"run_dir": folder / "run", "data.paths": write_corpus(folder)}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    assert "Traceback" not in errors_of("-m", "maxmeg", "train", "--config=gpt", *flags)
    return folder / "run"


def test_jax_itself_prints_the_plugins_traceback():
    """Otherwise the tests here prove nothing, and `choose_platform` is not needed."""
    assert "Traceback" in errors_of("-c", "import jax; jax.devices()")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--run_dir=RUN", "--prompt=a", "--num_tokens=2"],
        ["convert", "--input=RUN", "--output=RUN/exported", "--to=huggingface"],
        ["plan", "--config=llama3-8b", "--hardware=h100x8", "--parallel.fsdp=8"],
        ["doctor", "--matrix=64", "--size_mb=1"],
        ["models"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_print_no_traceback(run_dir, arguments):
    arguments = [argument.replace("RUN", str(run_dir)) for argument in arguments]
    assert "Traceback" not in errors_of("-m", "maxmeg", *arguments)
