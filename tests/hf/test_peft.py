"""PEFT folders: their adapters are the same change of every weight, fused or not."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hf_cases import sparse
from lora_runs import write_lora_run

from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.hf.families.binding import Binding
from maxmeg.hf.families.read import bindings, model_config, table_of
from maxmeg.hf.formats.safetensors import SafetensorsFile
from maxmeg.hf.peft import SETTINGS, WEIGHTS, endings, export_adapter, read_adapter

QUERY = "stack.groups.0.sublayers.0.mixers.attention.query"
TOLERANCE = 1e-6  # of the largest change, float32
RANK, ALPHA = 2, 6.0
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
OLD = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
WIDE = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
FALCON = {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}
GEMMA = {**WIDE, "num_hidden_layers": 3, "head_dim": 12, "sliding_window": 9}
FAMILIES = {
    "LlamaForCausalLM": ("llama", WIDE),
    "Gemma2ForCausalLM": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 12}),
    "Phi3ForCausalLM": ("phi3", WIDE),
    "GPTNeoXForCausalLM": ("gpt_neox", {**SIZES, "intermediate_size": 48}),
    "FalconForCausalLM": ("falcon", FALCON),
    "GPT2LMHeadModel": ("gpt2", OLD),
    "DeepseekV3ForCausalLM": ("deepseek_v3", sparse()["deepseek v3"][1]),
}


def config_of(family: str) -> dict:
    kind, settings = FAMILIES[family]
    return {"architectures": [family], "model_type": kind, **settings}


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


FUSED = ("Phi3ForCausalLM", "GPTNeoXForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel")


def family_targets() -> list:
    """Every family with one of three lists of targets, which take turns; those that fuse
    projections with the other lists too, in slow tests."""
    targets = [("query", "value"), ("*",), ("attention.out", "mlp.up")]
    return [
        pytest.param(family, each, marks=() if (i - j) % 3 == 0 else pytest.mark.slow)
        for i, family in enumerate(FAMILIES)
        for j, each in enumerate(targets)
        if (i - j) % 3 == 0 or family in FUSED
    ]


@pytest.mark.parametrize(("family", "targets"), family_targets())
def test_adapters_are_the_same_change_of_every_weight(family, targets, tmp_path):
    if "Deepseek" in family:
        latent = {"query": "query_up", "value": "value_up", "attention.out": "mla.out"}
        targets = tuple(latent.get(target, target) for target in targets)
    model = model_config(config_of(family))
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


def test_targets_are_named_by_their_shortest_endings():
    def binding(name: str) -> Binding:
        return Binding(f"{name}.weight", (1, 1), (), lambda _: (), lambda _: np.zeros(0))

    names = [f"h.{i}.{m}.c_proj" for i in range(2) for m in ("attn", "mlp")] + ["h.0.q", "h.1.q"]
    every = [binding(name) for name in names]
    assert endings(names, every) == ["c_proj", "q"]
    assert endings(["h.0.attn.c_proj", "h.1.attn.c_proj"], every) == ["attn.c_proj"]
    assert endings(["h.1.q", "h.0.mlp.c_proj"], every) == ["0.mlp.c_proj", "1.q"]


def test_what_cannot_be_exported(tmp_path):
    model = model_config(config_of("LlamaForCausalLM"))
    write_lora_run(tmp_path / "whole", Config(model=model))
    with pytest.raises(ValueError, match="rank=0, no adapters"):
        export_adapter(str(tmp_path / "whole"), str(tmp_path / "peft"))
    with pytest.raises(ValueError, match="holds no checkpoint"):
        export_adapter(str(tmp_path / "none"), str(tmp_path / "peft"))
    write_lora_run(tmp_path / "run", Config(model=model), rank=1)
    with pytest.raises(ValueError, match="choose one of LlamaForCausalLM"):
        export_adapter(str(tmp_path / "run"), str(tmp_path / "peft"), family="Lama")
    assert not (tmp_path / "peft").exists()
    export_adapter(str(tmp_path / "run"), str(tmp_path / "peft"))
    with pytest.raises(ValueError, match="already holds"):
        export_adapter(str(tmp_path / "run"), str(tmp_path / "peft"))


def test_what_cannot_be_read(tmp_path):
    model, wide = (
        model_config(config_of("LlamaForCausalLM") | {"hidden_size": size}) for size in (32, 48)
    )
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
    whole = weights.read_bytes()
    for before, after in ((b"q_proj", b"p_proj"), (b"lora_A", b"lora_C")):
        weights.write_bytes(whole.replace(before, after))
        with pytest.raises(ValueError, match=f"[48] tensors are not .*{after.decode()}"):
            read()
