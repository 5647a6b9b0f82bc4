"""Config files that return an ml_collections.ConfigDict, right and wrong."""

import pytest

from maxmeg.config import flags
from maxmeg.config.errors import is_for_user
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LrDecay
from maxmeg.config.setting import with_fields

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
    'config.learning_rate = "3"': "unknown field learning_rate: did you mean optim.lr",
    'config.data = {"paths": [{"a": 1}]}': "data.paths[0]=",
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
