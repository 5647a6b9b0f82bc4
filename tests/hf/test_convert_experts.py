"""Folders of models with experts to runs and back: bitwise, expert by expert, with their counts."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from hf_cases import sparse
from hf_folders import BF16, assert_same_tensors, convert_in, random_tensors, write_tensors
from tables import thinned

from maxmeg.checkpoint.stream import StreamReader
from maxmeg.hf import convert
from maxmeg.hf.families import read as families
from maxmeg.hf.formats.compressed import FLOAT_VALUES

CASES = sparse() | {
    "deepseek v3, predicting": (
        "DeepseekV3ForCausalLM",
        sparse()["deepseek v3"][1] | {"num_mtp_layers": 2},
    )
}
EXACT = ("e_score_correction_bias", "expert_bias")  # in float32, whatever the others are in


def make_folder(folder, name, **changes):
    """A folder as save_pretrained writes it; its config.json and tensors."""
    family, settings = CASES[name]
    config = {**settings, **changes, "architectures": [family], "pad_token_id": 0}
    tensors = random_tensors(families.model_config(config), family)
    tensors = {n: a.astype("f4") if n.endswith(EXACT) else a for n, a in tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, tensors, max_shard_bytes=30_000)
    return config, tensors


@pytest.mark.parametrize("name", thinned(CASES, 3))
def test_import_and_export_return_the_same_bits(tmp_path, name):
    config, tensors = make_folder(tmp_path / "hf", name)
    report = convert_in(tmp_path / "hf", tmp_path / "run")
    assert report.num_tensors == len(tensors) and report.family == CASES[name][0]
    convert.export_model(tmp_path / "run", tmp_path / "back", max_shard_bytes=30_000)
    assert_same_tensors(tmp_path / "back", tensors)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    model = families.model_config(config)
    assert not families.differences(model, families.model_config(written))
    reader = StreamReader(tmp_path / "run" / "checkpoints", 0)
    for array in families.unused_arrays(model):  # what no tensor holds is there, and zero
        assert not reader.read("model/" + array.replace(".", "/")).any()


@pytest.fixture(scope="module")
def predicting(tmp_path_factory):
    """(folder of a model with two MTP layers, its tensors)."""
    folder = tmp_path_factory.mktemp("predicting") / "hf"
    return folder, make_folder(folder, "deepseek v3, predicting")[1]


def without(tensors, *layers):
    starts = tuple(f"model.layers.{layer}." for layer in layers)
    return {name: array for name, array in tensors.items() if not name.startswith(starts)}


def repeated(tensors, added=0.0):
    """With the first MTP layer's copies of embedding and output."""
    ends = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    copies = {
        f"model.layers.3.{copy}.weight": (tensors[f"{name}.weight"].astype("f4") + added)
        for copy, name in ends.items()
    }
    return tensors | {name: array.astype(BF16) for name, array in copies.items()}


MTP_LAYERS = {  # tensors of the files, error
    "repeat embedding and output": (repeated, ""),
    "are missing": (lambda t: without(t, 3, 4), ""),
    "are missing in part": (lambda t: without(t, 4), r"tensors are missing: model\.layers\.4\."),
    "repeat others": (lambda t: repeated(t, 1.0), r"are tied by .* but differ"),
}


@pytest.mark.parametrize("case", MTP_LAYERS)
def test_mtp_layers_may_be_missing_and_may_repeat_embedding_and_output(tmp_path, predicting, case):
    folder, tensors = predicting
    change, message = MTP_LAYERS[case]
    (tmp_path / "hf").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "hf")
    write_tensors(tmp_path / "hf", change(tensors))
    if message:
        with pytest.raises(ValueError, match=message):
            convert_in(tmp_path / "hf", tmp_path / "run")
        return
    report = convert_in(tmp_path / "hf", tmp_path / "run")
    convert.export_model(tmp_path / "run", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    has_layers = case != "are missing"
    assert report.num_tensors == len(tensors if has_layers else without(tensors, 3, 4))
    assert has_layers or "mtp.num_layers=0" in report.notes[-1]
    assert written["num_nextn_predict_layers"] == (2 if has_layers else 0)


@pytest.mark.parametrize(
    ("name", "change"), [("mixtral", -2), ("glm 4 moe", 2), ("gpt oss", -2), ("gpt oss", 2)]
)
def test_another_number_of_experts_is_one_error(tmp_path, name, change):
    key = "n_routed_experts" if "glm" in name else "num_local_experts"
    count = CASES[name][1][key]
    config, _ = make_folder(tmp_path / "hf", name)
    config[key] = count + change
    config |= {"n_group": 1, "topk_group": 1} if "glm" in name else {}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    wanted = rf"the files hold {count} experts per layer, config\.json has {count + change}:"
    with pytest.raises(ValueError, match=wanted) as caught:
        convert_in(tmp_path / "hf", tmp_path / "run")
    assert len(str(caught.value)) < 200 and not (tmp_path / "run").exists()


def test_mxfp4_is_dequantized_exactly(tmp_path):
    """GPT-OSS as it is published: every pair of a block and a scale is one number of bfloat16."""
    config, tensors = make_folder(
        tmp_path / "plain", "gpt oss", hidden_size=64, intermediate_size=32
    )
    rng, packed = np.random.default_rng(0), {}
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inward, outward = tensors[name].shape
        codes = rng.integers(0, 16, (count, outward, inward), np.uint8)
        scales = rng.integers(110, 140, (count, outward, inward // 32), np.uint8)
        powers = np.ldexp(np.ones(scales.shape), scales.astype(int) - 127)
        values = np.float64(FLOAT_VALUES[4])[codes] * np.repeat(powers, 32, axis=-1)
        tensors[name] = values.swapaxes(1, 2).astype(ml_dtypes.bfloat16)
        assert (np.float64(tensors[name]) == values.swapaxes(1, 2)).all()
        blocks = codes[..., ::2] | codes[..., 1::2] << 4
        packed[name + "_blocks"] = blocks.reshape(count, outward, -1, 16)
        packed[name + "_scales"] = scales
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}
    others = {n: a for n, a in tensors.items() if n + "_blocks" not in packed}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path / "hf", others | packed)
    convert_in(tmp_path / "hf", tmp_path / "run")
    convert.export_model(tmp_path / "hf", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", tensors)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in written

    damaged = packed | {next(n for n in packed if "scales" in n): np.full((4, 64, 2), 255, "u1")}
    first = next(n for n in packed if "blocks" in n)
    for folder, files, message in (
        ("nan", damaged, "exponent above 252"),
        ("short", packed | {first: packed[first][..., :8]}, "MXFP4 has uint8"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        write_tensors(tmp_path / folder, others | files)
        with pytest.raises(ValueError, match=message):
            weights = convert.open_folder(tmp_path / folder).weights
            [weights.read(name) for name in weights.tensors]
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantization_config"):
        convert.open_folder(tmp_path / "hf")
