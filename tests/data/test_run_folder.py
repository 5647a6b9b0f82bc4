"""Run folders that are complete: they work from every working folder, and after a move."""

import json
import os
import shutil

import pytest
import tokenizer_files

from maxmeg.config import files, paths
from maxmeg.config.schema import Config
from maxmeg.data import run_folder
from maxmeg.data.chat.ends import end_tokens
from maxmeg.data.chat.template import load_chat_template
from maxmeg.data.tokenizers.load import load_tokenizer

# Settings of a run started in {w}, and how its folder holds them.
PATHS = {
    "paths": (("0.7", "d/a", "0.3", "s3://b/c"), ("0.7", "{w}/d/a", "0.3", "s3://b/c")),
    "train_paths": (("a", "x/../b"), ("{w}/a", "{w}/b")),
    "blend": ("blend.yaml", "{w}/blend.yaml"),
    "blend_changes": (("9:0.5", "a", "12:c.yaml"), ("9:0.5", "{w}/a", "12:{w}/c.yaml")),
    "cache_dir": ("", ""),
    "tokenizer": ("gpt2:t?extra_ids=2", "gpt2:{w}/runs/mine/tokenizer/t?extra_ids=2"),
    "chat_template": ("c.jinja", "{w}/runs/mine/tokenizer/data.chat_template.jinja"),
}


def in_folder(value, w):
    return tuple(v.format(w=w) for v in value) if isinstance(value, tuple) else value.format(w=w)


def test_stored_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(run_dir="runs/mine")
    config.checkpoint.init_from = "runs/base"
    for name, (value, _) in PATHS.items():
        setattr(config.data, name, value)
    stored = run_folder.stored(config)
    assert stored.run_dir == f"{tmp_path}/runs/mine"
    assert (
        stored.checkpoint.init_from == f"{tmp_path}/runs/base" and stored.checkpoint.load == "auto"
    )
    for name, (_, kept) in PATHS.items():
        assert getattr(stored.data, name) == in_folder(kept, tmp_path), name
    assert config.run_dir == "runs/mine" and config.data.paths == PATHS["paths"][0]  # a copy
    assert run_folder.stored(stored) == stored


def test_a_moved_run_folder_finds_its_paths(tmp_path):
    """What is inside moves with it; what is outside stays, or has moved with it if it is gone."""
    before, now = tmp_path / "a" / "run", tmp_path / "b" / "deep" / "run"
    config = Config(run_dir=str(before))
    config.data.tokenizer = f"huggingface:{before}/tokenizer/tokenizer.json?eod=<end>"
    config.data.paths = tuple(f"{tmp_path}/a/{name}" for name in ("stays", "moves", "gone"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "stays.idx").touch()
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "moves.idx").touch()
    actual = paths.relocated(config, now)
    assert actual.run_dir == str(now)
    assert actual.data.tokenizer == f"huggingface:{now}/tokenizer/tokenizer.json?eod=<end>"
    places = ("a/stays", "b/deep/moves", "a/gone")
    assert actual.data.paths == tuple(f"{tmp_path}/{place}" for place in places)
    assert paths.relocated(config, before) == config
    relative = Config(run_dir="runs/a")  # nobody knows where that was
    assert paths.relocated(relative, now) == relative


def vocabulary(kind: str, folder) -> str:
    """data.tokenizer of a small vocabulary in `folder`."""
    folder.mkdir()
    if kind == "gpt2":
        (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
        (folder / "merges.txt").write_text("#version: 0.2\na b\n")
        return f"gpt2:{folder}"
    if kind.startswith("wordpiece"):
        (folder / "vocab.txt").write_text("[UNK]\n[SEP]\na\nb\n")
        (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
        return f"wordpiece:{folder}" + "/vocab.txt" * kind.endswith("file")
    settings = {"eos_token": "</s>", "chat_template": "{{ messages }}"}
    tokenizer_files.folder(folder, settings, generation_config={"eos_token_id": [3]})
    if kind == "huggingface file":
        os.rename(folder / "tokenizer.json", folder / "mine.json")
        return f"huggingface:{folder}/mine.json?special_tokens=<x>"
    return f"huggingface:{folder}"


@pytest.mark.parametrize(
    "kind", ["gpt2", "wordpiece file", "wordpiece folder", "huggingface file", "huggingface folder"]
)
def test_the_tokenizer_is_copied_into_the_run_folder(kind, tmp_path, monkeypatch):
    """With what lies beside it; the copy works when the source is gone and the folder moved."""
    monkeypatch.chdir(tmp_path)
    config = Config(run_dir="run")
    (tmp_path / "mine.jinja").write_text("MINE")
    config.data.chat_template = "mine.jinja"
    config.data.tokenizer = vocabulary(kind, tmp_path / "source").replace(f"{tmp_path}/", "")
    source = load_tokenizer(config.data.tokenizer)
    ends = end_tokens(source, config.data, source.vocab_size)
    os.makedirs("run/checkpoints")
    for _ in range(2):  # a run that is started again
        run_folder.write(config)
    shutil.rmtree("source")
    os.remove("mine.jinja")
    shutil.move("run", "moved")
    alone = shutil.copy("moved/config.yaml", tmp_path)  # a file for another run
    monkeypatch.chdir("/")
    actual = files.load(tmp_path / "moved" / "config.yaml")
    assert actual.run_dir == f"{tmp_path}/moved"
    assert files.load(alone).run_dir == f"{tmp_path}/run"
    copy = load_tokenizer(actual.data.tokenizer)
    assert copy.identity == source.identity
    assert list(copy.encode("ab a")) == list(source.encode("ab a"))
    assert end_tokens(copy, actual.data, copy.vocab_size) == ends
    assert load_chat_template(copy, actual.data.chat_template).text == "MINE"
    if kind.startswith("huggingface"):
        assert load_chat_template(copy).text == "MINE"  # for a run that is trained further
    assert not [path for path in (tmp_path / "moved" / "tokenizer").glob(".*")]
    assert run_folder.stored(actual) == actual


def test_a_lost_base_is_named_with_every_place(tmp_path):
    config = Config(run_dir=f"{tmp_path}/a/run")
    config.checkpoint.init_from, config.lora.rank = f"{tmp_path}/a/base", 4
    settings = files.to_dict(run_folder.stored(config))
    with pytest.raises(ValueError, match=f"not in {tmp_path}/a/base: move it back, or link it"):
        run_folder.read(settings, tmp_path / "a" / "run")
    with pytest.raises(ValueError, match=f"not in {tmp_path}/a/base nor in {tmp_path}/b/base: "):
        run_folder.read(settings, tmp_path / "b" / "run")
    (tmp_path / "b" / "base").mkdir(parents=True)
    actual = run_folder.read(settings, tmp_path / "b" / "run")  # both were moved
    assert actual.checkpoint.init_from == f"{tmp_path}/b/base"
    (tmp_path / "a" / "base").mkdir(parents=True)
    actual = run_folder.read(settings, tmp_path / "b" / "run")  # the run alone was moved
    assert actual.checkpoint.init_from == f"{tmp_path}/a/base"
