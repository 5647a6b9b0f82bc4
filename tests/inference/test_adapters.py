"""Adapters from folders of runs and of PEFT: their replies are the merged models', and folders that
do not belong to the base are refused."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from layouts import tiny
from lora_runs import write_lora_run

import maxmeg
from maxmeg.config import files
from maxmeg.config.schema import Config
from maxmeg.hf.peft import SETTINGS, export_adapter
from maxmeg.inference.adapters import attached, named_folders, with_adapters
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.models.lm import LM

PROMPTS = [np.arange(5), np.arange(30, 41)]
RUNS = {
    "first": {"rank": 2, "alpha": 3.0, "targets": ("*",)},
    "second": {"rank": 4, "alpha": 2.0, "targets": ("value", "mlp.*")},
}


@functools.cache
def initialize():
    """A function of a key, which is compiled once."""
    return jax.jit(lambda key: LM(key, base_config().model))


def base_config() -> Config:
    config = tiny({"init_std": 0.3, "max_position": 32, "attention.num_kv_heads": 4})
    config.data.tokenizer = f"null:{config.model.vocab_size}"
    return config


def save_base(folder: Path, seed: int) -> Path:
    maxmeg.LanguageModel(initialize()(jax.random.key(seed)), base_config()).save(folder)
    return folder


def adapter_run(folder: Path, base: Path, changed: dict | None = None, **lora) -> Path:
    config = files.load(base / "config.yaml")
    config.checkpoint.init_from = str(base)
    for name, value in (changed or {}).items():
        setattr(config.model.rotary, name, value)
    write_lora_run(folder, config, **lora)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The base, an adapter of each of RUNS, and "peft", which is the second one."""
    parent = tmp_path_factory.mktemp("adapters")
    base = save_base(parent / "base", 0)
    runs = {name: adapter_run(parent / name, base, **lora) for name, lora in RUNS.items()}
    peft = Path(export_adapter(str(runs["second"]), str(parent / "peft")))
    return {"base": base, **runs, "peft": peft}


@pytest.mark.slow
def test_replies_are_those_of_the_runs_with_the_adapters(folders):
    base, *adapters = folders
    served = maxmeg.engine(folders[base], adapters={name: folders[name] for name in adapters})
    request = {name: Request(8, Sampling(temperature=0), adapter=name) for name in adapters}
    replies = {name: served.generate(PROMPTS, request[name]) for name in adapters}
    for name in RUNS:
        expected = maxmeg.engine(folders[name]).generate(PROMPTS, Request(8, Sampling(0)))
        for reply, wanted in zip(replies[name], expected, strict=True):
            assert reply.tokens == wanted.tokens
            np.testing.assert_allclose(reply.logprobs, wanted.logprobs, atol=1e-4)
    for reply, wanted in zip(replies["peft"], replies["second"], strict=True):
        assert reply.tokens == wanted.tokens
        np.testing.assert_allclose(reply.logprobs, wanted.logprobs, atol=1e-5)
    plain = served.generate(PROMPTS, Request(8, Sampling(temperature=0)))
    texts = [[reply.tokens for reply in each] for each in (plain, *replies.values())]
    assert texts[0] != texts[1] and texts[1] != texts[2] and texts[0] != texts[2]


def test_adapters_that_do_not_belong_to_the_base(folders, tmp_path):
    base, first = folders["base"], folders["first"]
    other = save_base(tmp_path / "other", 1)
    loaded = {folder: maxmeg.load(folder).trained for folder in (base, other, first)}
    longer = adapter_run(tmp_path / "longer", base, {"base": 5e5}, rank=1)
    empty = tmp_path / "empty"
    empty.mkdir()
    strange = Path(shutil.copytree(folders["peft"], tmp_path / "strange"))
    settings = json.loads((strange / SETTINGS).read_text())
    (strange / SETTINGS).write_text(json.dumps(settings | {"use_dora": True}))
    for run, adapter, message in (
        (other, first, "first was trained beside the base .*/base'.* and this is .*/other, step 0"),
        (base, longer, "other settings than its base: model.rotary.base=10000.0 would"),
        (base, other, "other has lora.rank=0, no adapter"),
        (base, empty, f"empty holds neither checkpoints of a run nor {SETTINGS}"),
        (base, strange, "use_dora=True .* is not supported"),
        (
            first,
            folders["second"],
            r"first holds an adapter itself \(lora.rank=2\): serve its base",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            with_adapters(loaded[run], {"one": str(adapter)})
    (folders["peft"] / "chat_template.jinja").write_text("own")
    templates = with_adapters(loaded[base], {"a": folders["peft"], "b": first}).templates
    assert {name: template.text for name, template in templates.items()} == {"a": "own"}
    pair = np.full((32, 1), np.inf, np.float32), np.zeros((1, 32), np.float32)
    with pytest.raises(ValueError, match="adapter one holds infinities or NaN"):
        attached(
            loaded[base], {"one": {"stack.groups.0.sublayers.0.mixers.attention.query": {0: pair}}}
        )


def test_names_of_adapters():
    for texts, message in (
        (["a"], "adapters=a: write NAME=FOLDER"),
        (["=x"], "adapters==x: write NAME=FOLDER"),
        (["a=x", "a=y"], "a is both x and y: choose two names"),
    ):
        with pytest.raises(ValueError, match=message):
            named_folders(texts)
    assert named_folders(["a=x", "b=y=z"]) == {"a": "x", "b": "y=z"}
