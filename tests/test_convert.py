"""The convert command: both ways, the list of tensors, what it says and what it refuses."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hf_folders import LLAMA, make_folder, write_tokenizer
from lora_runs import write_lora_run

from maxmeg import convert
from maxmeg.config import files
from maxmeg.config.data import Objective
from maxmeg.config.flags import run_command
from maxmeg.hf.families import read as families
from maxmeg.hf.formats.safetensors import SafetensorsFolder
from maxmeg.hf.trained import TrainedModel
from maxmeg.inference.adapters import with_adapters
from maxmeg.inference.load import load_run


def command(*arguments):
    argv = ["convert", *(f"--{argument}" for argument in arguments)]
    run_command(convert.main, convert.Options, needs_config=False, argv=argv)


def test_a_model_is_imported_and_exported(tmp_path, capsys):
    tensors = make_folder(tmp_path / "hf")
    command(f"input={tmp_path / 'hf'}", f"output={tmp_path / 'run'}")
    assert "30 tensors, 27,744 parameters" in (said := capsys.readouterr().out)
    assert said.endswith(f"next: maxmeg chat {tmp_path / 'run'}\n")
    back = ("to=huggingface", f"input={tmp_path / 'run'}", f"output={tmp_path / 'back'}")
    command(*back, "shard_gb=0.00002", "step=0")
    assert "from_pretrained" in capsys.readouterr().out
    found = SafetensorsFolder(tmp_path / "back")
    assert all(found.read(n).tobytes() == array.tobytes() for n, array in tensors.items())
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) == 3
    command(*back[:2], f"output={tmp_path / 'wide'}", "dtype=float32", "family=MistralForCausalLM")
    assert "MistralForCausalLM" in (tmp_path / "wide" / "config.json").read_text()
    assert SafetensorsFolder(tmp_path / "wide").tensors["lm_head.weight"].dtype == "f4"


def test_list_shows_every_tensor_and_writes_nothing(tmp_path, capsys):
    make_folder(tmp_path / "hf")
    command(f"input={tmp_path / 'hf'}", "list")
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {
        binding.theirs for binding in families.bindings(LLAMA, "LlamaForCausalLM")
    }
    query = "stack.groups.0.sublayers.0.mixers.attention.query.weight[2]"
    assert f"model.layers.2.self_attn.q_proj.weight [32, 32] <-> {query}" in lines
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    (tmp_path / "hf" / "chat_template.jinja").unlink()
    command(f"input={tmp_path / 'hf'}", f"output={tmp_path / 'run'}")
    said = capsys.readouterr().out
    assert said.endswith(f"next: maxmeg generate {tmp_path / 'run'} --prompt=TEXT\n")
    command("to=huggingface", f"input={tmp_path / 'run'}", "list")
    assert capsys.readouterr().out.splitlines() == lines


def test_runs_and_adapters_work_after_they_are_moved(tmp_path, monkeypatch, capsys):
    """Both together, the run alone, and from another working folder; the tokenizer's source and
    the converted files may be gone."""
    make_folder(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", added=["[im_end]"])
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"chat_template": "BASE"}')
    monkeypatch.chdir(tmp_path)
    command("input=hf", "output=runs/base")
    config = files.load("runs/base/config.yaml")
    config.checkpoint.init_from = "runs/base"
    Path("mine.jinja").write_text("MINE {{ messages[-1].content }}[im_end]")
    config.data.objective, config.data.chat_template = Objective.sft, "mine.jinja"
    write_lora_run(Path("runs/lora"), config, rank=2)
    tokens = load_run("runs/lora").tokenizer.encode("a b")
    shutil.rmtree("hf")
    shutil.move("runs", "moved")
    monkeypatch.chdir("/")
    base, run = tmp_path / "moved" / "base", tmp_path / "moved" / "lora"
    again = files.load(run / "config.yaml")
    assert (again.run_dir, again.checkpoint.init_from) == (str(run), str(base))
    command("to=huggingface", f"input={run}", f"output={tmp_path / 'merged'}")
    assert (tmp_path / "merged" / "chat_template.jinja").read_text().startswith("MINE")
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text()) == {
        "eos_token_id": [0, 60]
    }
    assert "BASE" not in (tmp_path / "merged" / "tokenizer_config.json").read_text()
    command("to=peft", f"input={run}", f"output={tmp_path / 'peft'}", "base=org/model")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/model"
    command("to=peft", f"input={run}", f"output={tmp_path / 'unnamed'}")
    assert "note: peft finds no weights there" in capsys.readouterr().out
    assert len(SafetensorsFolder(tmp_path / "merged").tensors) == 30
    assert (tmp_path / "peft" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    assert load_run(str(run)).tokenizer.encode("a b").tolist() == tokens.tolist()
    assert with_adapters(load_run(str(base)), {"mine": run}).ends == (0, 60)
    os.rename(base, tmp_path / "moved" / "renamed")
    for load in (load_run, TrainedModel, convert.convert.exported):
        with pytest.raises(ValueError, match=f"runs/base nor in {base}: move it back, or link it"):
            load(str(run))
    (tmp_path / "runs").mkdir()
    os.rename(tmp_path / "moved" / "renamed", tmp_path / "runs" / "base")  # the run alone moved
    assert load_run(str(run)).config.checkpoint.init_from == str(tmp_path / "runs" / "base")


MISTAKES = {
    "no output": (("input=hf",), "no --output: name the folder"),
    "shards": (("to=huggingface", "input=r", "output=run", "shard_gb=0"), "must be above 0"),
    "averages": (("input=hf", "output=run", "average=true"), "average=True has no effect without"),
    "tokenizer": (("to=peft", "input=r", "output=run", "tokenizer=x"), "effect without to=maxmeg"),
    "no folder": (("input=none", "output=run"), "none is not a folder"),
    "no run": (("to=huggingface", "input=none", "output=run"), "holds no checkpoint"),
    "no tokenizer": (("input=hf", "output=run", "tokenizer=x.json"), "give a tokenizer.json"),
    "no gguf": (("input=x.gguf", "output=run"), "gguf"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, case):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "hf")
    arguments, message = MISTAKES[case]
    with pytest.raises(SystemExit) as exit:
        command(*arguments)
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("error: ") and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
