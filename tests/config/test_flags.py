"""Config dicts, YAML files and the command line, right and wrong."""

import copy
import dataclasses
import errno
import os
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import fields

import pytest
import yaml

from maxmeg.config import docs, files, flags, hints
from maxmeg.config.commands import COMMANDS
from maxmeg.config.errors import RESTART_CODE, is_for_user
from maxmeg.config.model import ModelConfig, Norm
from maxmeg.config.named import built_in
from maxmeg.config.options import Chat
from maxmeg.config.schema import Config, LrDecay
from maxmeg.config.setting import get, setting, with_fields
from maxmeg.config.validate import check_settings

ROOT = pathlib.Path(__file__).parents[2]
CONFIG_FILE = """
from maxmeg.config.schema import Config
def get_config(size="tiny"):
    config = Config()
    if size == "typo":
        config.model.num_layer = 3
    elif size == "bug":
        int("x")
    elif size != "tiny":
        raise ValueError(f"unknown size {size!r}: choose tiny")
    return config
"""


@dataclasses.dataclass
class Options:
    """A command's own settings."""

    output: str = setting(dataclasses.MISSING, "file to write")
    prompt: str = setting("", "text to continue")
    top_k: int = setting(0, "candidates", former="old")
    greedy: bool = setting(False, "take the most likely")
    norm: Norm = setting(Norm.rmsnorm, "an enum")
    keys: tuple[str, ...] = setting(("text",), "a list")
    texts: Sequence[str] = setting((), "each as it stands")


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(CONFIG_FILE)
    return str(path)


def changed():
    config = Config()
    config.optim.lr, config.optim.eps = 1.2345678901234567e-4, 1e-300
    config.data.paths = ("a: b", "null", "1")
    config.train.batch_rampup = (16, 8, 300000)
    config.train.batch_schedule, config.model.max_position = "0:768 250B:1536", 512
    config.model.norm, config.optim.decay = Norm.layernorm, LrDecay.inverse_square_root
    config.model.attention.bias_qkv, config.run_dir = True, "läuft/π"
    return config


def test_an_absent_section_stays_absent_until_it_is_set(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match=r"config\.yaml: it is empty; name settings in it"):
        files.load(path)
    for text in ("{}", "encoder:\n"):
        path.write_text(text)
        assert files.load(path).encoder is None and get(files.load(path), "vision.tied") is None
    config, _ = flags.parse(["prog", "--config=gpt", "--encoder.moe.top_k=3", "vision.tied=true"])
    assert config.encoder == with_fields(ModelConfig(), {"moe.top_k": 3})
    assert config.vision == ModelConfig(tied=True)
    files.save(config, path)
    assert files.load(path) == config == copy.deepcopy(config)
    assert yaml.safe_load(files.to_yaml(config, changed=True))["encoder"]["moe"]["top_k"] == 3
    plain, _ = flags.parse(["prog", "--config=gpt"])
    there = ["encoder absent -> present", "encoder.moe.top_k 2 -> 3"]
    there += ["vision absent -> present", "vision.tied false -> true"]
    assert files.changes(plain, config) == there
    assert files.differences(files.to_dict(plain), config) == there
    assert files.changes(config, plain)[0] == "encoder present -> absent"
    path.write_text("encoder: {}\n")
    assert files.load(path).encoder == ModelConfig() != files.load(path).vision
    with pytest.raises(ValueError, match=r"encoder.num_layer: did you mean encoder"):
        files.from_dict({"encoder": {"num_layer": 3}})
    with pytest.raises(TypeError, match=r"Config has no field encoder.depth"):
        with_fields(Config(), {"encoder.depth": 3})
    for name in ("encoder", "vision"):
        with pytest.raises(ValueError, match=f"the section {name} is a stack that no model reads"):
            check_settings(with_fields(Config(), {f"{name}.num_layers": 4}))


def test_only_changed_settings_are_printed(tmp_path, capsys):
    for config in (Config(), changed()):
        (tmp_path / "run.yaml").write_text(files.to_yaml(config, changed=True))
        assert files.load(tmp_path / "run.yaml") == config
    assert files.to_yaml(Config(), changed=True) == "{}\n"
    line = ["prog", f"--config={tmp_path}/run.yaml", "--seed=3"]
    flags.run_command(fail_inside, argv=[*line, "--print_config=diff"])
    diff = capsys.readouterr().out
    flags.run_command(fail_inside, argv=[*line, "--print_config"])
    whole = yaml.safe_load(capsys.readouterr().out)
    assert files.from_dict(yaml.safe_load(diff)) == files.from_dict(whole)
    assert whole["seed"] == 3 and len(diff.splitlines()) < 30


def test_yaml_reads_part_of_a_config_and_plain_exponents(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(
        "optim: {lr: 3e-4, eps: 1.0e-8}\nmodel:\n"
        "train: {num_steps: 1e3, quantization: {recipe: delayed, margin: 0}}\n"
        "parallel: {tensor_overlap: auto, schedule: gpipe}\n"
    )
    expected = {"optim.lr": 3e-4, "train.num_steps": 1000}
    expected["train.quantization.recipe"] = "tensorwise"
    assert files.load(path) == with_fields(Config(), expected)
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(" was removed: use ")[0] for line in printed] == [
        "train.quantization.recipe=delayed",
        "parallel.schedule=gpipe",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {num_layer: 3}", "unknown field model.num_layer: did you mean model.num_layers"),
        ("lr: 3", "unknown field lr: did you mean optim.lr"),
        ("model: {num_layers: 2.5}", "model.num_layers=2.5 .float.: expected a whole number"),
        ("model: {num_layers: true}", "expected a whole number"),
        ("model: {attention: {bias_qkv: 1}}", "bias_qkv=1 .int.: expected true or false"),
        ("model: {norm: rmsnrm}", "one of rmsnorm, layernorm; did you mean rmsnorm"),
        ("optim: {lr: .nan}", "expected a finite number"),
        (f"optim: {{lr: 1{'0' * 400}}}", "expected a finite number"),
        ("optim: {lr: [1]}", "optim.lr"),
        ("data: {split: 1}", "expected a string: write it in quotes"),
        ("data: {paths: [1]}", r"data.paths\[0\]=1"),
        ("data: {paths: 3}", "expected a list"),
        ("model: 3", "expected a section"),
        ("- 1", "expected a section"),
        ("seed: 1\nseed: 2", "given twice"),
        ("seed: [", "^.*run.yaml is not valid YAML: line 1, column 8: expected the node [^\n]*$"),
        ("[1]: 3", "line 1, column 1: the name of a field must be text"),
        ("[" * 1000, "not valid YAML: maximum recursion depth"),
        ("seed: !!timestamp x", "not valid YAML"),
        ("run_dir: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_yaml_mistakes_are_named(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        files.load(path)


def test_overrides_of_every_type(config_file):
    """With and without "config." and dashes."""
    line = (
        "prog --config.optim.lr=3e-4 --data.paths=a,b data.paths=c"
        " --train.batch_rampup 16,8,300000 --config.model.attention.bias_qkv"
        f" --nolog.tensorboard --config.model.norm layernorm --config {config_file}:tiny"
        " model.num_layers=1e1 --config.train.batch_schedule=0:8 --seed=7 --noconfig.model.tied"
        " --train.num_steps=1.5k"
    )
    config, options = flags.parse(line.split())
    assert options is None
    assert config.optim.lr == 3e-4 and config.data.paths == ("a", "b", "c")
    assert config.train.batch_rampup == (16, 8, 300000) and config.model.attention.bias_qkv
    assert not config.log.tensorboard and config.model.norm is Norm.layernorm
    assert config.model.num_layers == 10 and config.train.batch_schedule == "0:8"
    assert (config.seed, config.train.num_steps) == (7, 1500) and not config.model.tied
    assert flags.parse(["prog", f"--config={config_file}"])[0] == Config()


def test_options_of_a_command(config_file, capsys):
    line = ["prog", f"--config={config_file}", "--output=x", "--prompt=a b, =c --d", "--greedy"]
    line += ["--keys=a,b", "--norm=layernorm", "--old", "5", "--texts=a, b=\n", "--texts", ""]
    _, options = flags.parse(line, Options)
    texts = ("a, b=\n", "")
    assert options == Options("x", "a b, =c --d", 5, True, Norm.layernorm, ("a", "b"), texts)
    assert capsys.readouterr().err.startswith("--old is now --top_k; ")
    config, options = flags.parse(["prog", "output=x", "old=2"], Options, needs_config=False)
    assert config is None and options == Options("x", top_k=2)
    with pytest.raises(ValueError, match="--output is missing: file to write"):
        flags.parse(["prog"], Options, needs_config=False)


def test_mistakes_in_the_config_file(config_file, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    cases = {
        config_file + ":huge": "^unknown size 'huge': choose tiny$",
        config_file
        + ":typo": r"small.py:\d+: AttributeError: .* 'num_layer': did you mean num_layers",
        config_file.replace("small", "smal"): "did you mean .*small.py",
        config_file + ":bug": f"^{config_file}:8: ValueError: invalid literal for int",
        config_file + ":more:colons": "unknown size 'more:colons'",
        str(tmp_path / "run.yaml"): "no config file .*run.yaml",
        str(tmp_path): "no config file .*config.yaml.*--config=finetune:.* trains the Hugging",
        f"finetune:{tmp_path}": "holds neither model.safetensors nor",
        "elsewhere/gpt.py": "no config file elsewhere/gpt.py .*did you mean gpt[?]",
        "configs/gtp.py": "no config file configs/gtp.py .*did you mean configs/gpt.py[?]",
        "configs/gpt": "no built-in .* or .py file .*did you mean --config=configs/gpt.py[?]",
        "runs/none": "no built-in configuration, architecture, run folder, .yaml or .py file",
        "finetune:runs/none": r"no config file runs/none/config.yaml: .*\(working folder [^()]*\)$",
        "finetune:meta/L": r"hf download meta/L --local-dir L\)$",
        "llama3-8b:x": "no built-in configuration",
        "gtp": r"did you mean gpt\? And no architecture is named .gtp.*for --config are bert",
        "gpt:llama4-8b": "did you mean llama3-8b",
    }
    sources = {
        "syntax.py": ("def get_config(:\n", "syntax.py:1: SyntaxError: invalid syntax"),
        "none.py": ("x = 1\n", "none.py defines no get_config"),
        "other.py": ("def get_config():\n    return 3\n", "returned int: return a maxm"),
        "name.py": ("\nlearning_rate\n", "name.py:2: NameError: name 'learning_rate' is not"),
        "open.py": ("open('/none')\n", "No such file or directory: '/none'"),
    }
    for name, (text, message) in sources.items():
        (tmp_path / name).write_text(text)
        cases[str(tmp_path / name)] = message
    for value, message in cases.items():
        with pytest.raises((ValueError, OSError), match=message) as raised:
            flags.parse(["prog", f"--config={value}"])
        assert is_for_user(raised.value), value


def test_what_config_names(config_file, tmp_path, monkeypatch):
    """Built-in names, architectures, run folders, YAML, and a file that imports its neighbour."""
    (tmp_path / "mine.py").write_text(
        "from small import get_config as parent\nfrom maxmeg.configs.gpt import get_config as gpt\n"
        "def get_config():\n    config = parent()\n    config.optim = gpt().optim\n"
        "    return config\n"
    )
    (tmp_path / "gpt").mkdir()
    files.save(changed(), tmp_path / "gpt" / "config.yaml")
    (tmp_path / "run.yaml").write_text("seed: 5\n")
    monkeypatch.chdir(tmp_path)

    def load(value):
        return flags.parse(["prog", f"--config={value}"])[0]

    assert load("gpt").train.num_steps == 800 and load("./gpt") == load("gpt/") == changed()
    assert load("gpt:qwen3-8b") == load("qwen3-8b") and load("qwen3-8b").model.num_layers == 36
    assert load("run.yaml") == Config(seed=5) and load("run.yaml") == load(tmp_path / "run.yaml")
    assert load("mine.py") == Config(optim=load("gpt").optim) == load(tmp_path / "mine.py")
    assert load("finetune:gpt").checkpoint.init_from == "gpt"
    assert str(tmp_path) not in sys.path and not (tmp_path / "__pycache__" / "mine.pyc").exists()
    (tmp_path / "run.py").write_text("from maxmeg.config.schema import Config as get_config\n")
    assert load("run.py") == Config()


def test_the_path_of_a_built_in_configuration(tmp_path, monkeypatch, capsys):
    """In a clone it is the file; elsewhere, unless the folder has such a file, the built-in one."""

    def load(value, *flags_after):
        config = flags.parse(["prog", f"--config={value}", *flags_after])[0]
        return config, capsys.readouterr().err

    overrides = ("--config.train.num_steps=3", "--optim.lr=0.1", "seed=7")
    changed = {"train.num_steps": 3, "optim.lr": 0.1, "seed": 7}
    monkeypatch.chdir(ROOT)
    in_clone = load("configs/gpt.py", *overrides)
    assert in_clone == (with_fields(load("gpt")[0], changed), "")
    monkeypatch.chdir(tmp_path)
    config, said = load("./configs/gpt.py", *overrides)
    words = "does not exist in {}: using the built-in configuration gpt\n"
    assert (config, said) == (in_clone[0], "configs/gpt.py " + words.format(tmp_path))
    assert load("configs/gpt.py:llama3-8b")[0] == load("llama3-8b")[0]
    paths = [path for path in (ROOT / "configs").glob("*.py") if path.stem != "__init__"]
    assert sorted(built_in()) == sorted(path.stem for path in paths) and len(paths) == 8
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "gpt.py").write_text(CONFIG_FILE)
    assert load("configs/gpt.py") == (Config(), "") and load("gpt")[0] != Config()


def fail_inside(config):
    int("x")


def test_bugs_keep_their_traceback(config_file):
    argv = ["prog", f"--config={config_file}"]
    with pytest.raises(ValueError, match="invalid literal"):
        flags.run_command(fail_inside, argv=argv)


def test_os_errors_name_the_setting(config_file, capsys):
    for folder, shown in (
        ("/a/x", f"Not a directory ({config_file}/"),
        ("", "File exists; a file is there: name a folder"),
    ):
        argv = ["prog", f"--config={config_file}", f"--run_dir={config_file}{folder}"]
        with pytest.raises(SystemExit) as stop:
            flags.run_command(lambda config: os.makedirs(config.run_dir), argv=argv)
        assert stop.value.code == 2
        assert f"--run_dir={config_file}{folder}: {shown}" in capsys.readouterr().err


def test_a_disk_that_may_recover_starts_the_run_again(config_file, capsys):
    def fail(config):
        raise OSError(errno.ESTALE, "Stale file handle", f"{config.run_dir}/x")

    with pytest.raises(SystemExit) as stop:
        flags.run_command(fail, argv=["prog", f"--config={config_file}", "--run_dir=r"])
    assert stop.value.code == RESTART_CODE
    assert capsys.readouterr().err.startswith("error: --run_dir=r: Stale file handle (r/x)")


def test_names_of_other_frameworks_are_of_fields_that_exist():
    kinds = [command.options for command in COMMANDS.values() if command.options]
    options = [field.name for kind in kinds for field in fields(kind)]
    assert set(hints.SYNONYMS) <= {*files.leaves(Config), *options, *COMMANDS}


def test_reference_is_current():
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert text == docs.markdown(), "run python -m maxmeg.config.docs > docs/config.md"


def test_the_run_folder_needs_no_name():
    _, chosen = flags.parse(["chat", "runs/x", "--temperature=0"], Chat, needs_config=False)
    assert (chosen.run_dir, chosen.temperature) == ("runs/x", 0)
    with pytest.raises(ValueError, match="unexpected argument 'runs/y'"):
        flags.parse(["chat", "runs/x", "runs/y"], Chat, needs_config=False)
