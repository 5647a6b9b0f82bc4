"""Config files that return an ml_collections.ConfigDict, right and wrong."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict, FrozenConfigDict

from maxmeg.config import config_dict, files, flags
from maxmeg.config.errors import is_for_user
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LrDecay
from maxmeg.config.setting import get, walk, with_fields

DEFAULTS = {path: value for path, value, _ in walk(Config())}
RIGHT = """
config.model = ConfigDict(dict(num_layers=2, hidden_size=64, dtype="bfloat16"))
config.optim = {"lr": 1, "decay": LrDecay.linear}
config.optim.min_lr = config.optim.get_ref("lr") / 10
config.data = ConfigDict(dict(paths=("a", "b"), split=placeholder(str)))
config.data.split = "9,1,0"
config.train = FrozenConfigDict(dict(batch_rampup=[8, 8, 300000]))
config.seed = int(size or 3)
"""
WRONG = {
    'config.optim = {"Lr": 3e-4}': "unknown field optim.Lr: did you mean optim.lr",
    'config.learning_rate = "3"': "unknown field learning_rate: did you mean optim.lr",
    'config.optim = {"lr": "fast"}': "optim.lr='fast' (str): expected a finite number",
    'config.model = {"dtype": "bf16"}': "one of float32, bfloat16, float16; did you mean bfloat16",
    'config.data = {"paths": [{"a": 1}]}': "data.paths[0]=",
    'config.data = {"paths": ["a", 1]}': "data.paths[1]=1 (int): expected a string",
    "config.model = 3": "model=3 (int): expected a section of named fields",
    "config.seed = placeholder(int)": "seed is None or an unset placeholder: set it, or leave it",
    "config.model = required_placeholder(int)": "model is None or an unset placeholder",
    'config.optim = {"lr": lambda step: 3e-4}': "optim.lr is the callable <lambda>: write a number",
    'config.model = {"dtype": ml_dtypes.bfloat16}': "model.dtype is the callable bfloat16: write",
    "config.model = config": "a section of the ConfigDict contains itself",
    'config.model = ConfigDict({"optim.lr": 3}, allow_dotted_keys=True)': "unknown field model.opt",
}


@pytest.fixture
def load(tmp_path):
    """A function from the lines of get_config(size) to the config that --config=FILE[:SIZE] is."""

    def load(lines: str, argument: str = "") -> Config:
        lines = "".join(f"    {line}\n" for line in lines.strip().splitlines())
        (tmp_path / "run.py").write_text(
            "import ml_dtypes\nfrom ml_collections import ConfigDict, FrozenConfigDict\n"
            "from ml_collections.config_dict import placeholder, required_placeholder\n"
            "from maxmeg.config.schema import LrDecay\n\n\ndef get_config(size=''):\n"
            f"    config = ConfigDict()\n{lines}    return config\n"
        )
        return flags.parse(["prog", f"--config={tmp_path / 'run.py'}{argument}"])[0]

    return load


def test_sections_references_names_and_lists(load):
    expected = {
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "model.dtype": DType.bfloat16,
        "optim.lr": 1.0,
        "optim.min_lr": 0.1,
        "optim.decay": LrDecay.linear,
        "data.paths": ("a", "b"),
        "data.split": "9,1,0",
        "train.batch_rampup": (8, 8, 300000),
    }
    assert load(RIGHT) == with_fields(Config(seed=3), expected)
    assert load(RIGHT, ":7").seed == 7
    assert load("") == load("config.encoder = None") == Config()


@settings(max_examples=10, deadline=None)
@given(st.sets(st.sampled_from(sorted(DEFAULTS)), max_size=30), st.booleans())
def test_a_config_dict_of_any_settings_is_the_config(paths, frozen):
    """Numbers, texts, booleans, names and lists that are not the defaults."""
    config = with_fields(Config(), {path: other_than(DEFAULTS[path], path) for path in paths})
    written = (FrozenConfigDict if frozen else ConfigDict)(files.to_dict(config))
    assert config_dict.to_config(written) == config
    assert not paths or config != Config()


def other_than(value, path):
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        kind = files.leaves(Config)[path].__args__[0]
        return (*value, kind("7"))
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, int | float):
        return value + type(value)(1)
    return next(member for member in type(value) if member is not value)


@pytest.mark.parametrize("line", WRONG)
def test_mistakes_are_one_line(load, line):
    with pytest.raises(ValueError) as raised:
        load(line)
    text = str(raised.value)
    assert WRONG[line] in text and "run.py: " in text and "\n" not in text
    assert is_for_user(raised.value)


def test_a_locked_config_dict_refuses_a_misspelt_field_in_its_line(load):
    with pytest.raises(ValueError, match=r'run.py:\d+: AttributeError: .Key "see" does not'):
        load("config.lock()\nconfig.see = 3")


def test_the_mixture_of_experts_is_gpt_with_experts():
    """configs/moe.py, which is written as a ConfigDict."""
    gpt, moe = (flags.parse(["prog", f"--config=configs/{name}.py"])[0] for name in ("gpt", "moe"))
    changed = {change.partition(" ")[0] for change in files.changes(gpt, moe)}
    others = {"moe.bias_balancing", "moe.ffn_size", "moe.sequence_aux_loss", "layers"}
    assert changed == {"run_dir", *(f"model.{name}" for name in others)}
    assert get(moe, "model.moe.num_experts") == 8 and dataclasses.is_dataclass(moe)
