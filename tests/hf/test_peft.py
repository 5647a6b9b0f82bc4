"""PEFT folders: their adapters are the same change of every weight, fused or not."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hf_cases import families, sparse
from lora_runs import write_lora_run

from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.hf.families.binding import Binding
from maxmeg.hf.families.read import bindings, model_config, table_of
from maxmeg.hf.formats.safetensors import SafetensorsFile
from maxmeg.hf.peft import SETTINGS, WEIGHTS, export_adapter, read_adapter

QUERY = "stack.groups.0.sublayers.0.mixers.attention.query"
TOLERANCE = 1e-6  # of the largest change, float32
RANK, ALPHA = 2, 6.0
CASES = families() | sparse()
NAMES = ("llama", "gemma 2", "phi 3", "neox", "falcon 40b", "gpt 2", "deepseek v3")


def config_of(name: str) -> dict:
    family, settings = CASES[name]
    return {"architectures": [family], **settings}


def changes(made: dict[str, np.ndarray], every: list[Binding]) -> dict[str, np.ndarray]:
    """What the adapters add to their tensors, by name."""
    actual = {}
    for binding in every:
        parts = []
        for name, layer, _ in binding.ours:
            module = "model/" + name.rpartition(".")[0].replace(".", "/")
            a, b = (made.get(f"{module}/lora/{which}") for which in "ab")
            parts.append(None if a is None else ALPHA / RANK * (a[layer] @ b[layer]))
        known = [part for part in parts if part is not None]
        if not known or not binding.theirs.endswith(".weight"):
            continue
        blank = binding.split(np.zeros(binding.shape, np.float32))
        whole = [b if p is None else p for p, b in zip(parts, blank, strict=True)]
        actual[binding.theirs.removesuffix(".weight")] = binding.join(whole)
    return actual


TARGETS = [("query", "value"), ("*",), ("attention.out", "mlp.up")]


@pytest.mark.parametrize(("name", "targets"), zip(NAMES, itertools.cycle(TARGETS), strict=False))
def test_adapters_are_the_same_change_of_every_weight(name, targets, tmp_path):
    if "deepseek" in name:
        latent = {"query": "query_up", "value": "value_up", "attention.out": "mla.out"}
        targets = tuple(latent.get(target, target) for target in targets)
    family, model = CASES[name][0], model_config(config_of(name))
    lora = {"rank": RANK, "alpha": ALPHA, "targets": targets}
    made = write_lora_run(tmp_path / "run", Config(model=model), **lora)
    folder = export_adapter(str(tmp_path / "run"), str(tmp_path / "peft"), family=family, base="b")
    settings = json.loads((folder / SETTINGS).read_text())
    assert settings["base_model_name_or_path"] == "b" and settings["peft_type"] == "LORA"
    assert {path.name for path in folder.iterdir()} == {SETTINGS, WEIGHTS}
    file, every = SafetensorsFile(folder / WEIGHTS), bindings(model, family)
    expected = changes(made, every)
    prefix, names = "base_model.model.", ("lora_A.weight", "lora_B.weight")
    assert file.tensors.keys() == {f"{prefix}{m}.{name}" for m in expected for name in names}
    for module, change in expected.items():
        a, b = (file.read(f"{prefix}{module}.{name}") for name in names)
        rank = settings["rank_pattern"].get(module, RANK)
        alpha = settings["alpha_pattern"].get(module, ALPHA)
        assert len(a) == rank and b.shape[1] == rank
        actual = alpha / rank * b @ a
        actual = actual if table_of(family).outputs_first else actual.T
        assert np.abs(actual - change).max() <= TOLERANCE * np.abs(change).max(), module
    modules = [b.theirs.removesuffix(".weight") for b in every if b.theirs.endswith(".weight")]
    ends = tuple(f".{target}" for target in settings["target_modules"])
    assert {module for module in modules if module.endswith(ends)} == expected.keys()
    check_read(folder, made, model, family)


def check_read(folder: Path, made: dict[str, np.ndarray], model: ModelConfig, family: str) -> None:
    """What is read changes every projection as the run did."""
    again = read_adapter(folder, model, family)
    places = {name.removesuffix("/lora/a") for name in made if name.endswith("a")}
    assert places <= {"model/" + path.replace(".", "/") for path in again}
    for path, layers in again.items():
        module = "model/" + path.replace(".", "/")
        for layer, (a, b) in layers.items():
            wanted = np.zeros_like(a @ b)
            if module in places:
                pair = (made[f"{module}/lora/{name}"][layer] for name in "ab")
                wanted = ALPHA / RANK * np.matmul(*pair)
            np.testing.assert_allclose(a @ b, wanted, atol=TOLERANCE * ALPHA)


def test_what_cannot_be_exported(tmp_path):
    model = model_config(config_of("llama"))
    write_lora_run(tmp_path / "whole", Config(model=model))
    with pytest.raises(ValueError, match="rank=0, no adapters"):
        export_adapter(str(tmp_path / "whole"), str(tmp_path / "peft"))
    write_lora_run(tmp_path / "run", Config(model=model), rank=1)
    with pytest.raises(ValueError, match="choose one of LlamaForCausalLM"):
        export_adapter(str(tmp_path / "run"), str(tmp_path / "peft"), family="Lama")
    assert not (tmp_path / "peft").exists()
    export_adapter(str(tmp_path / "run"), str(tmp_path / "peft"))
    with pytest.raises(ValueError, match="already holds"):
        export_adapter(str(tmp_path / "run"), str(tmp_path / "peft"))


def test_what_cannot_be_read(tmp_path):
    model, wide = (model_config(config_of("llama") | {"hidden_size": size}) for size in (32, 48))
    write_lora_run(tmp_path / "run", Config(model=model), rank=RANK, alpha=ALPHA)
    folder = export_adapter(str(tmp_path / "run"), str(tmp_path / "peft"))
    settings, weights = json.loads((folder / SETTINGS).read_text()), folder / WEIGHTS

    def read(model=model, **changed):
        (folder / SETTINGS).write_text(json.dumps(settings | changed))
        return read_adapter(folder, model, "LlamaForCausalLM")

    for changed in (
        {"peft_type": "LOHA"},
        {"use_dora": True},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"modules_to_save": ["lm_head"]},
    ):
        ((name, value),) = changed.items()
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} in {SETTINGS} is not")):
            read(**changed)
    with pytest.raises(ValueError, match=r"q_proj has lora_A \(2, 32\) .* the model 48 inputs"):
        read(wide)
    for layer, (_, b) in read(use_rslora=True)[QUERY].items():
        np.testing.assert_allclose(b, RANK**0.5 * read()[QUERY][layer][1], rtol=TOLERANCE)
        doubled = read(alpha_pattern={"q_proj": 2 * ALPHA})
        np.testing.assert_array_equal(doubled[QUERY][layer][1], 2 * read()[QUERY][layer][1])
        shorter = read(alpha_pattern={"j_proj": 2 * ALPHA, "^self_attn.q_proj": 2 * ALPHA})
        np.testing.assert_array_equal(shorter[QUERY][layer][1], read()[QUERY][layer][1])
    with pytest.raises(ValueError, match=r"alpha_pattern \(a\+\)\+x: only names of modules"):
        read(alpha_pattern={"(a+)+x": 1})
    whole = weights.read_bytes()
    for before, after in ((b"q_proj", b"p_proj"), (b"lora_A", b"lora_C")):
        weights.write_bytes(whole.replace(before, after))
        with pytest.raises(ValueError, match=f"[48] tensors are not .*{after.decode()}"):
            read()
