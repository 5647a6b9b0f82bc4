"""The program `maxmeg`: its commands exist, and mistakes are answered in one line, without JAX."""

import contextlib
import importlib
import inspect
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from maxmeg.__main__ import main
from maxmeg.config.commands import COMMANDS
from maxmeg.config.help import LINES, WIDTH
from maxmeg.config.schema import Config
from maxmeg.config.setting import walk
from maxmeg.data.commands import COMMANDS as SUBCOMMANDS

CPU_SECONDS = 1.5
TRAIN = "train --config=gpt "
MISTAKES = [
    ("trian", "unknown command 'trian': did you mean train?"),
    ("frobnicate", "unknown command 'frobnicate': the commands are train, evaluate"),
    ("--config=gpt", "no command before --config=gpt: write maxmeg COMMAND --config=gpt"),
    ("train", "no --config: name a run, such as --config=configs/gpt.py; others are"),
    ("train gpt", "unexpected argument 'gpt': did you mean --config=gpt?"),
    ("train --config", "--config has no value: write --config=VALUE"),
    ("train --config=finetune", "which model? write --config=finetune:FOLDER"),
    (TRAIN + "--train.num_step=3", "flag --train.num_step: did you mean --train.num_steps"),
    (TRAIN + "--noseed", "unknown flag --noseed: did you mean --seed?"),
    (TRAIN + "--candidates=8", "unknown flag --candidates: see --help"),
    (TRAIN + "--fp4-recipe=nvfp4", "here it is --train.quantization.recipe"),
    (TRAIN + "--tp-comm-overlap", "tp-comm-overlap was removed: leave it out: XLA"),
    (TRAIN + "--training.steps=3", "did you mean --train.num_steps?"),
    (TRAIN + "--checkpoint.interval=3", "did you mean --checkpoint.save_every?"),
    (TRAIN + "--use_lora", "did you mean --lora.rank?"),
    (
        TRAIN + "--optim.warmup_steps=9 --optim.warmup_fraction=0.1",
        "optim.warmup_steps and optim.warmup_fraction are set, but one alone is read",
    ),
    ("train --config=qwen3-8b --dry_run", "no setting names a corpus: set data.paths=PREFIX"),
    (TRAIN + "--optim.lr=fast", "optim.lr='fast' .*: expected a finite number"),
    (TRAIN + "--optim=3", "optim is a section: set its fields, for example --optim.optimizer"),
    (TRAIN + "--model.num_layers=0", "model.num_layers=0 must be at least 1"),
    (TRAIN + "--train.num_steps=1.0005k", "num_steps='1.0005k' .*: expected a whole number"),
    (TRAIN + "--train.global_batch_size=4B", "global_batch_size=4000000000 must be at most"),
    (TRAIN + "--data.sequence_length=0", "data.sequence_length=0 must be at least 1"),
    (TRAIN + "--print_config=all", "unknown flag --print_config"),
    ("config dif gpt x", "maxmeg config dif gpt x: write maxmeg config diff A B"),
    ("generate --promt=a", "unknown flag --promt: did you mean --prompt?"),
    ("evaluate --eval_iters=3", "did you mean --num_batches?"),
    ("convert --output=x", "--input is missing: folder of Hugging Face, Megatron or a run"),
    ("convert --input=x --to=ggml", "to='ggml' .*one of maxmeg, huggingface, peft, gguf"),
    ("preprocess", "the following arguments are required: --input, --output: see maxmeg"),
    ("preprocess --input=x --output=x --worker=3", "flag --worker: did you mean --workers"),
    ("launch slurm", "no launch script is named slurm: there are slurm.sbatch"),
    (TRAIN + "--model.moe.num_experts=8", "model.moe.num_experts: no layer of model.layers="),
    (TRAIN + "--config=moe", "--config is given twice, gpt and moe: leave one out"),
    (TRAIN + "--model.num_layers=100000000", "num_layers=100000000 must be .* at most 10000"),
    (TRAIN + f"--train.num_steps={10**20}", f"must be at most {2**53} and at least 1"),
    (TRAIN + "--run_dir=", "run_dir is empty: name the folder of the run"),
    (TRAIN + "--run_dir=gs://b/run", "run_dir=gs://b/run must be a folder: checkpoint.dir alone"),
    (
        TRAIN + "--checkpoint.dir=az://b/run",
        "checkpoint.dir=az://b/run must be a path, s3://BUCKET",
    ),
    ("generate", "give either --prompt=TEXT, once or more, or --prompts=FILE.jsonl"),
    ("evaluate runs/none --split=tets", "split='tets' must be one of train, validation, test"),
    ("plan --config=llama3-8b --hardware=h100x7", "h100x7 leaves .*fsdp=7, .*: choose 4 or 8 GPUs"),
    (f"plan --config=llama3-8b --hardware=h100x{10**12 - 8}", "leaves .*: choose 512 GPUs"),
    ("plot none", "none is not the folder of a run: it has no metrics.jsonl"),
    ("plan llama3-8b --hardware=h100x8", "did you mean --config=llama3-8b?"),
    ("plan --config=gpt --gpus=h100x8", "did you mean --hardware?"),
    (TRAIN + "--gpus=8", "every GPU that JAX sees is used; CUDA_VISIBLE_DEVICES selects some"),
    ("generate runs/none hello", "unexpected argument 'hello': did you mean --prompt=hello?"),
    ("generate --config=gpt", "did you mean --run_dir?"),
    ("generate runs/none prompt=a --top_p=2", "top_p=2.0 must be above 0 and at most 1"),
    ("convert --model=x --output=y", "did you mean --input?"),
    ("chat runs/lr=3", "runs/lr=3/checkpoints holds no checkpoint: give the run_dir"),
    ("serve --served_model_name=x", "did you mean --name?"),
    ("generate a.gguf --prompt=b", "a GGUF file is converted first: maxmeg convert --input=a.gguf"),
    ("train --config=finetune:a.gguf", "maxmeg convert --input=a.gguf"),
    ("tokenize", "unknown command 'tokenize': did you mean preprocess?"),
    (
        TRAIN + "--help=optin",
        "no group .* did you mean optim? There are run, model, data, .*, and all",
    ),
    ("serve --help=optim", "this command takes no settings of a run: write --help"),
    ("train --config=GPT", "did you mean gpt2-124m"),
    (
        "plan --config=gpt --hardware=h100x8 --data.tokenizer=a.model",
        "did you mean sentencepiece:a.model?",
    ),
    ("models llama9", "no architecture is named llama9: did you mean llama3-8b"),
]
WITHOUT_JAX = """
import runpy, sys
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
finally:
    print({"jax", "numpy", "flax"} & set(sys.modules))
"""


def pattern(text: str) -> str:
    """A regular expression of which only ".*" is special."""
    return ".*".join(map(re.escape, text.split(".*")))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_there(name, capsys):
    name_of_module, _, function = COMMANDS[name].target.partition(":")
    module = importlib.import_module(name_of_module)
    assert callable(getattr(module, function))
    if name_of_module == f"maxmeg.{name}":  # python -m maxmeg.train
        assert f'    run_module("{name}")\n' in inspect.getsource(module)
    main([])
    assert f"  {name} " in capsys.readouterr().out
    if not COMMANDS[name].arguments:
        main(["help", name])
        shown = capsys.readouterr().out
        assert ("--optim.lr (" in shown) == (name == "train")
        assert ("optim 5" in shown) == (COMMANDS[name].config is not False)


@pytest.mark.parametrize("name", [*COMMANDS, *(f"preprocess {name}" for name in SUBCOMMANDS)])
def test_help_fits_a_terminal_and_says_how_many_options_it_leaves_out(name, capsys):
    texts = []
    for flag in ("--help", "--help=all"):
        with contextlib.suppress(SystemExit):
            main([*name.split(), flag])
        texts.append(capsys.readouterr().out)
    short, full = texts
    assert short.count("\n") <= LINES
    assert max(map(len, (short + full).splitlines())) <= WIDTH
    first, every = (
        re.findall(r"^  (--?\w+)[ =].*", text.partition("\n\n--config")[0], re.M) for text in texts
    )
    rare = len(every) - len([flag for flag in first if flag != "--help"])
    assert (f"  --help=all for the other {rare}\n" in short) == (rare > 0)


def test_help_of_a_parsers_options(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["preprocess", "merge", "-h"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and "merge PREFIX ... --output=PREFIX\n" in shown
    for entry in (
        "PREFIX ... (required): p",
        "--output=PREFIX (required): w",
        "--no_checksums (false): ",
    ):
        assert f"\n  {entry}" in shown
    assert "  --shuffle_documents=SEED (none): in" in shown


def test_help_shows_all_settings_or_a_group(capsys):
    paths = [f"  --{path} (" for path, _, _ in walk(Config())]
    for group, start in (("all", ""), ("model.mup", "model.mup."), ("optim", "optim.")):
        main(["train", f"--help={group}"])
        shown = capsys.readouterr().out
        named = [path for path in paths if path.startswith(f"  --{start}")]
        assert [path for path in paths if path in shown] == named
        assert max(map(len, shown.splitlines())) <= WIDTH


@pytest.mark.parametrize(("line", "answer"), MISTAKES)
def test_a_mistake_is_answered_in_one_line(line, answer, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out) == (2, "")
    assert re.fullmatch(f"error: .*{pattern(answer)}.*\n", printed.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "maxmeg trian",
        "maxmeg.train --config=gpt --max_steps=3",
        "maxmeg.generate --promt=a",
        "maxmeg models llama9",
    ],
)
def test_a_mistake_needs_no_jax(line, tmp_path):
    """line: as after `python -m`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", WITHOUT_JAX, *line.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout) == (2, "set()\n")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert after.ru_utime - before.ru_utime < CPU_SECONDS


def test_help_may_be_cut_off(tmp_path):
    command = [sys.executable, "-m", "maxmeg", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_settings_are_compared(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("seed: 7\n")
    for names, line in (("gpt run.yaml", "seed 1234 -> 7"), ("gpt gpt", "no setting differs")):
        with pytest.raises(SystemExit) as stop:
            main(["config", "diff", *names.split()])
        assert stop.value.code == 0 and line in capsys.readouterr().out.splitlines()


def test_launch_scripts_are_found(capsys):
    for name in ("slurm.sbatch", "local.py"):
        with pytest.raises(SystemExit):
            main(["launch", name])
        path = Path(capsys.readouterr().out.strip())
        assert path.name == name and path.is_file()


def test_models_are_listed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["models", "gpt2-124m", "mixtral-8x7b"])
    assert stop.value.code == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [
        ["gpt2-124m", "0.124", "B", "0.124", "B", "12", "1,024"],
        ["mixtral-8x7b", "46.703", "B", "12.880", "B", "32", "32,768"],
    ]
