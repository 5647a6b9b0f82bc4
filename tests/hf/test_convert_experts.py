"""Folders of models with experts to runs and back: bitwise, expert by expert, with their counts."""

import json

import ml_dtypes
import numpy as np
import pytest
from hf_cases import sparse
from hf_folders import BF16, assert_same_tensors, convert_in, random_tensors, write_tensors
from tables import thinned

from maxmeg.checkpoint.stream import StreamReader
from maxmeg.config.model import DType
from maxmeg.config.setting import with_fields
from maxmeg.hf import convert
from maxmeg.hf.families import read as families
from maxmeg.hf.formats.quantized import MXFP4_VALUES
from maxmeg.hf.formats.safetensors import SafetensorsFolder

CASES = sparse() | {
    "deepseek v3, predicting": (
        "DeepseekV3ForCausalLM",
        sparse()["deepseek v3"][1] | {"num_mtp_layers": 2},
    )
}
EXACT = "e_score_correction_bias"  # in float32, whatever the others are in


def make_folder(folder, name, **changes):
    """A folder as save_pretrained writes it; its config.json and tensors."""
    family, settings = CASES[name]
    config = {**settings, **changes, "architectures": [family], "pad_token_id": 0}
    tensors = random_tensors(families.model_config(config), family)
    tensors = {n: a.astype("f4") if EXACT in n else a for n, a in tensors.items()}
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


def test_global_aux_loss_changes_no_tensor(tmp_path):
    config, _ = make_folder(tmp_path / "hf", "glm 4 moe")
    plain, family = families.model_config(config), CASES["glm 4 moe"][0]
    model = with_fields(plain, {"moe.global_aux_loss": 0.1})
    assert not families.differences(plain, model)
    named = [[b.theirs for b in families.bindings(m, family)] for m in (plain, model)]
    assert named[0] == named[1] and len(families.unused_arrays(model)) == 1


def test_exact_tensors_stay_exact_and_others_are_rounded(tmp_path):
    _, tensors = make_folder(tmp_path / "hf", "glm 4 moe")
    folder = SafetensorsFolder(tmp_path / "hf")
    assert sum(EXACT in name for name in folder.tensors) == 2
    convert_in(tmp_path / "hf", tmp_path / "run")
    convert.export_model(tmp_path / "run", tmp_path / "wide", DType.float32)
    assert_same_tensors(
        tmp_path / "wide", {name: array.astype("f4") for name, array in tensors.items()}
    )


def test_mtp_layers_may_be_missing_and_may_repeat_embedding_and_output(tmp_path):
    name = "deepseek v3, predicting"
    _, tensors = make_folder(tmp_path / "hf", name)
    start, ends = "model.layers.3.", {"embed_tokens": "model.embed_tokens"}
    ends["shared_head.head"] = "lm_head"
    more = {f"{start}{a}.weight": tensors[f"{b}.weight"] for a, b in ends.items()}
    for folder, files in {
        "twice": tensors | more,
        "none": {n: a for n, a in tensors.items() if not n.startswith(("model.layers.3.",
                                                                       "model.layers.4."))},
        "one": {n: a for n, a in tensors.items() if not n.startswith("model.layers.4.")},
        "other": tensors | {n: (a.astype(np.float32) + 1).astype(BF16) for n, a in more.items()},
    }.items():  # fmt: skip
        (tmp_path / folder).mkdir()
        text = (tmp_path / "hf" / "config.json").read_text()
        (tmp_path / folder / "config.json").write_text(text)
        write_tensors(tmp_path / folder, files)
    assert convert_in(tmp_path / "twice", tmp_path / "run").num_tensors == len(tensors)
    report = convert_in(tmp_path / "none", tmp_path / "plain")
    assert "mtp.num_layers=0" in report.notes[-1]
    convert.export_model(tmp_path / "plain", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0
    with pytest.raises(ValueError, match=r"tensors are missing: model\.layers\.4\."):
        convert_in(tmp_path / "one", tmp_path / "no")
    with pytest.raises(ValueError, match=r"are tied by .* but differ"):
        convert_in(tmp_path / "other", tmp_path / "no")


@pytest.mark.parametrize("name", ["mixtral", "glm 4 moe", "gpt oss"])
@pytest.mark.parametrize("change", [-2, 2])
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
        values = np.float64(MXFP4_VALUES)[codes] * np.repeat(powers, 32, axis=-1)
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
    convert.export_model(tmp_path / "run", tmp_path / "back")
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
            convert_in(tmp_path / folder, tmp_path / "no")
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantization_config"):
        convert_in(tmp_path / "hf", tmp_path / "no")
