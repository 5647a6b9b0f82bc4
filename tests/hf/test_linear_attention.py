"""config.json and names of tensors of families with linear attention."""

import json

import numpy as np
import pytest
from hf_cases import with_states
from hf_folders import assert_same_tensors, convert_in, random_tensors, write_config, write_tensors
from published_configs import published

from maxmeg.config.model import DType
from maxmeg.config.setting import with_fields
from maxmeg.hf import convert
from maxmeg.hf.families.read import bindings, canonical_names, differences, hf_config, model_config

KIMI = published("further/kimi-linear-48b")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kda_layers": [1, 2]}, "layer_types"),
        ({"gate_lower_bound": -5.0}, "it must be a group of num_heads, head_dim"),
    ],
)
def test_a_group_of_kimi_linear_that_says_more_is_refused(changed, words):
    group = KIMI["linear_attn_config"] | changed
    with pytest.raises(ValueError, match=words):
        model_config(KIMI | {"linear_attn_config": group})


def test_dense_layers_of_kimi_linear_have_two_names():
    written = "model.layers.0.block_sparse_moe.gate_proj.weight"
    names = canonical_names([written, "model.layers.0.mlp.up_proj.weight"], "KimiLinearForCausalLM")
    assert names[written] == "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """(folder as Qwen publishes its models: experts of a layer in one tensor, an MTP layer of which
    config.json does not say; its tensors, experts one by one)."""
    folder = tmp_path_factory.mktemp("joined")
    family, settings = with_states()["qwen 3.5 moe"]
    settings = {**settings, "architectures": [family], "mtp_num_hidden_layers": 1}
    settings |= {"num_hidden_layers": 2, "layer_types": settings["layer_types"][:2]}
    model = model_config(settings)
    write_config(folder, model, family, mtp_num_hidden_layers=0)
    single = random_tensors(model, family)
    tensors = {name: array for name, array in single.items() if ".experts." not in name}
    for layer in [*(f"model.layers.{i}." for i in range(2)), "mtp.layers.0."]:
        parts = [
            np.stack([single[f"{layer}mlp.experts.{e}.{part}_proj.weight"] for e in range(4)])
            for part in ("gate", "up", "down")
        ]
        tensors[f"{layer}mlp.experts.gate_up_proj"] = np.concatenate(parts[:2], axis=1)
        tensors[f"{layer}mlp.experts.down_proj"] = parts[2]
    prefix = "model.language_model."
    write_tensors(folder, {name.replace("model.", prefix): a for name, a in tensors.items()})
    return folder, single


def test_joined_experts_and_unmentioned_mtp_layers_are_imported(joined, tmp_path):
    folder, single = joined
    convert_in(folder, tmp_path / "run")
    convert.export_model(tmp_path / "run", tmp_path / "back", DType.bfloat16)
    exact = ("A_log", "dt_bias")
    tensors = {n: a.astype("f4") if n.endswith(exact) else a for n, a in single.items()}
    assert_same_tensors(tmp_path / "back", tensors)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["mtp_num_hidden_layers"] == 1


def test_several_mtp_layers_would_share_a_projection():
    settings = published("further/qwen3.5-27b")["text_config"] | {"mtp_num_hidden_layers": 2}
    with pytest.raises(ValueError, match="one is supported: several would share a projection"):
        model_config({**settings, "architectures": ["Qwen3_5ForCausalLM"]})


def test_mtp_layers_of_nemotron_have_mixers_of_their_own():
    """In both forms of config.json; others than those of a layer have no name there."""
    family, settings = with_states()["nemotron h"]
    settings = settings | {"num_hidden_layers": 8, "num_nextn_predict_layers": 2}
    settings["architectures"] = [family]
    types = {"mtp_layers_block_type": ["full_attention", "mlp"]}
    model = model_config({**settings, "mtp_hybrid_override_pattern": "*-"})
    assert model.mtp_layer == (("attention",), ("mlp",))
    assert not differences(model, model_config({**settings, **types}))
    assert not differences(model, model_config(hf_config(model, family)))
    names = {binding.theirs for binding in bindings(model, family)}
    assert {f"mtp.layers.{n}.norm.weight" for n in range(4)} < names
    assert "mtp.layers.3.final_layernorm.weight" in names
    with pytest.raises(ValueError, match="cannot express"):
        hf_config(with_fields(model, {"mtp.layers": "attention+mlp"}), family)
    with pytest.raises(ValueError, match="it must be of M"):
        model_config({**settings, "mtp_hybrid_override_pattern": "*x"})
