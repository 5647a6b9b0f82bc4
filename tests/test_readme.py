"""The Python of the README and of docs/, run as it stands, and the lines that docs/ quote."""

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from maxmeg.__main__ import start
from maxmeg.config.commands import COMMANDS
from maxmeg.config.flags import names_config, parse
from maxmeg.config.validate import check_settings

REPOSITORY = Path(__file__).parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
ADDING = (REPOSITORY / "docs/adding.md").read_text()


# Folders that a reader has at that point, and that no test has.
STAND_IN = {
    r"--config=(finetune:|RUN_DIR|runs/|run\.yaml|my_run\.py).*": [
        "--config=gpt",
        "--optim.min_lr=0",
    ],
    "--config=retrieval:.*": ["--config=retrieval"],
    "--config=classify:.*": [
        *("--config=gpt", "--data.objective=classify", "--data.scored=last"),
        *("--model.tied=true", "--log.sample_prompt="),
    ],
}
PROGRAM = re.compile(
    r"(?:\bmaxmeg |python -m maxmeg[ .])(\w[\w-]*)(.*)|(?:launch/slurm\.sbatch|\"\$script\")(.*)"
)


def commands() -> list[tuple[str, str, list[str]]]:
    """(page, command of maxmeg, arguments) of every line in a bash block or script."""
    found = []
    for page in [*PAGES, *sorted((REPOSITORY / "examples").glob("*.sh"))]:
        is_script = page.suffix == ".sh"
        blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)
        for block in [page.read_text()] if is_script else blocks:
            for line in block.replace("\\\n", " ").splitlines():
                match = PROGRAM.search(re.split(r" #|^#| \| |^echo ", line)[0])
                if match:
                    name, arguments = match[1] or "train", match[2] or match[3] or ""
                    words = shlex.split(arguments)
                    found.append((page.name, name, [word for word in words if word != "$@"]))
    return found


@pytest.mark.parametrize(("page", "name", "arguments"), commands())
def test_commands_of_pages_are_understood(page, name, arguments, capsys):
    assert name in COMMANDS
    command = COMMANDS[name]
    if command.arguments:
        words = [word for word in arguments[:1] if not word.startswith("-")]
        known = words if name == "preprocess" else []
        with contextlib.suppress(SystemExit):
            start(name, command, [*known, "--help=all"])
        out = capsys.readouterr().out
        for flag in re.findall(r"--\w+", " ".join(arguments)):
            assert flag in out, f"{page}: maxmeg {name} has no {flag}"
        return
    words = [word for word in arguments if not word.startswith(("--help", "--print_config"))]
    for pattern, values in STAND_IN.items():
        words = [
            new for word in words for new in (values if re.fullmatch(pattern, word) else [word])
        ]
    if words or not command.config:
        needs_config = names_config(words) if command.config is None else command.config
        config, _ = parse([name, *words], command.options, needs_config)
        if config is not None:
            check_settings(config)


def test_links_lead_to_files_and_headings_that_exist():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^)]*)\)", page.read_text()):
            path = page.parent / target if target else page
            assert "://" in anchor or path.exists(), f"{page.name}: {target}"
            if path.suffix == ".md" and anchor and "://" not in anchor:
                headings = re.findall(r"^#+ (.*)", path.read_text(), re.M)
                plain = (re.sub(r"[^\w\s-]", "", each).strip().lower() for each in headings)
                assert anchor in {re.sub(r"[-\s]+", "-", each) for each in plain}, anchor


def test_the_run_file_of_docs_is_read(tmp_path):
    (block,) = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "docs/pretraining.md").read_text(), re.S
    )
    (tmp_path / "my_run.py").write_text(block)
    config, _ = parse(["train", f"--config={tmp_path / 'my_run.py'}:qwen3-8b"])
    assert (config.model.num_layers, config.optim.lr) == (36, 1e-4)
    assert config.run_dir == "runs/mine-qwen3-8b"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_python_blocks_run(tmp_path, page):
    """Those of a page one after the other, in one process."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.S)
    command = [sys.executable, "-c", "\n".join(blocks)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_dataset_and_a_loss_of_docs_train(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", ADDING, re.S)
    command = [sys.executable, "-c", block, str(tmp_path / "run")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3


def test_quoted_lines_are_in_the_files_that_docs_name():
    blocks = re.findall(r"```diff\n\+\+\+ (\S+)\n(.*?)```", ADDING, re.S)
    assert len(blocks) == ADDING.count("```diff")
    for path, lines in blocks:
        there = (REPOSITORY / path).read_text().splitlines()
        missing = [line for line in lines.splitlines() if line.removeprefix("+") not in there]
        assert not missing, path
