"""Weights in FP8 by blocks: as many bits as they have, one matrix at a time, or refused by name."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from fp8_folders import E4M3, POWERS, in_full, quantized, write_both
from hf_cases import sparse
from hf_folders import BF16, LLAMA, random_tensors, write_config, write_tensors

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.hf import convert
from maxmeg.hf.families import read as families
from maxmeg.hf.formats.quantized import Fp8Weights, block_size
from maxmeg.hf.formats.quantized import dequantized as view
from maxmeg.hf.formats.safetensors import SafetensorsFolder

NAME, BLOCK = "w.weight", (4, 8)
SCALES = NAME + "_scale_inv"
DEEPSEEK = "DeepseekV3ForCausalLM"
SMALL_BYTES = 1 << 16  # scales, and what Python itself makes
KINDS = {
    "float32": (np.float32, {}),
    "bfloat16": (BF16, {}),
    "float16": (np.float16, {}),
    "powers of two": (POWERS, {}),
    "powers of two, announced": (POWERS, {"scale_fmt": "ue8m0"}),
    "floats, announced as powers": (np.float32, {"scale_fmt": "ue8m0"}),
}


class Held:
    """Weights in memory."""

    def __init__(self, **tensors):
        self.arrays = tensors
        self.tensors = {n: TensorInfo(a.dtype, a.shape) for n, a in tensors.items()}

    def read(self, name, *index):
        return self.arrays[name][index]


def settings(**changes):
    return {"quant_method": "fp8", "weight_block_size": list(BLOCK)} | changes


def same_bits(actual, wanted):
    assert actual.dtype == wanted.dtype == BF16 and actual.shape == wanted.shape
    return actual.tobytes() == wanted.tobytes()


# Every kind, and every shape: whole blocks, parts of them, leading dimensions.
SHAPES = ((8, 16), (4, 8), (1, 1), (9, 8), (3, 20), (2, 3, 7, 17))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*zip(KINDS, SHAPES, strict=True), *zip(KINDS, SHAPES[::-1], strict=True)],
)
def test_fp8_numbers_are_multiplied_by_the_scale_of_their_block(kind, shape):
    dtype, more = KINDS[kind]
    rng = np.random.default_rng(0)
    scale = np.exp2(rng.integers(-8, 8, (*shape[:-1], 1)))
    numbers, scales = quantized(rng.standard_normal(shape) * scale, BLOCK, dtype)
    wanted = in_full(numbers, scales, BLOCK)
    weights = Fp8Weights(Held(**{NAME: numbers, SCALES: scales}), settings(**more))
    assert weights.tensors == {NAME: TensorInfo(BF16, shape)}
    assert same_bits(weights.read(NAME), wanted)
    for index in np.ndindex(*shape[:-2]):
        assert same_bits(weights.read(NAME, *index), wanted[index])
    if dtype == POWERS and more:  # as bytes too
        held = Held(**{NAME: numbers, SCALES: scales.view(np.uint8)})
        assert same_bits(Fp8Weights(held, settings(**more)).read(NAME), wanted)


def test_all_fp8_values_and_unquantized_tensors_are_read():
    every = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]).view(E4M3).reshape(2, 127)
    scales = np.array([[3e-41, 0.1, 1, *range(5, 18)]], np.float32)
    other = np.ones(3, np.float32)
    weights = Fp8Weights(Held(**{NAME: every, SCALES: scales, "b": other}), settings())
    assert same_bits(weights.read(NAME), in_full(every, scales, BLOCK))
    assert weights.read("b") is not None and weights.read("b").dtype == np.float32
    zero = Fp8Weights(Held(**{NAME: every, SCALES: 0 * scales}), settings())
    assert not zero.read(NAME).astype(np.float32).any()  # a block without a number but zero


def damaged(**arrays):
    numbers, scales = quantized(np.ones((8, 16)), BLOCK)
    return {n: a for n, a in ({NAME: numbers, SCALES: scales} | arrays).items() if a is not None}


def with_value(value, dtype=np.float32):
    return {SCALES: np.array([[1, 1], [1, value]], dtype)}


TENSORS = {
    "no scale": ({SCALES: None}, "w.weight_scale_inv missing: .* a matrix has .*\\[2, 2\\]"),
    "transposed": ({SCALES: np.ones((2, 3), "f4")}, r"scale_inv float32\[2, 3\]: .*\[2, 2\]"),
    "of a tensor": ({SCALES: np.ones((), "f4")}, r"scale_inv float32\[\]"),
    "integers": ({SCALES: np.ones((2, 2), "i4")}, "scale_inv int32"),
    "a vector": ({NAME: np.ones(8, E4M3)}, r"float8_e4m3fn\[8\]"),
    "of none": (
        {"v_scale_inv": np.ones((2, 2), "f4")},
        "v_scale_inv is not the scale .* v is missing",
    ),
    "of others": (
        {"v": np.ones((8, 16), BF16), "v_scale_inv": np.ones((2, 2), "f4")},
        "v_scale_inv is not the scale of a float8_e4m3fn tensor: v is bfloat16",
    ),
    "scale that is no number": (with_value(np.nan), "scale_inv has a scale outside"),
    "scale below zero": (with_value(-1), "scale_inv has a scale outside"),
    "large scale": (with_value(1e37), "scale_inv has a scale outside"),
    "power that is no number": (with_value(np.nan, POWERS), "scale_inv has a scale outside"),
    "no number": ({NAME: np.full((8, 16), 0x7F, "u1").view(E4M3)}, "a byte that is NaN"),
    "nor this": ({NAME: np.full((8, 16), 0xFF, "u1").view(E4M3)}, "a byte that is NaN"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_invalid_arguments_are_refused(case):
    arrays, message = TENSORS[case]
    with pytest.raises(ValueError, match=f"{message}.*; download|{message}.*: download"):
        Fp8Weights(Held(**damaged(**arrays)), settings()).read(NAME)


CONFIGS = {
    **{m: ({"quant_method": m}, m) for m in ("gptq", "awq", "bitsandbytes", "fbgemm_fp8")},
    "a word": ("fp8", "fp8"),
    "static": (settings(activation_scheme="static"), "activation_scheme='static'"),
    "other scales": (settings(scale_fmt="e5m3"), "scale_fmt='e5m3'"),
    "some in four bits": (settings(expert_dtype="fp4"), "expert_dtype='fp4'"),
    **{
        f"blocks of {block}": (settings(weight_block_size=block), "weight_block_size=")
        for block in (None, 128, [128], [0, 128], [True, 8], [128, 128, 1], ["1", "1"])
    },
}


@pytest.mark.parametrize("case", CONFIGS)
def test_other_quantization_methods_are_refused(case):
    said, message = CONFIGS[case]
    with pytest.raises(ValueError, match=rf"config\.json has quantization_config.*{message}"):
        view({"quantization_config": said}, Held(**damaged()))
    if "fp8" not in str(said):
        with pytest.raises(ValueError, match=r"in full, in fp8 \(e4m3 by blocks\), in mxfp4 or"):
            view({"quantization_config": said}, Held(**damaged()))


def test_published_settings_are_read():
    """Of every config.json here that has such; DeepSeek V3.1's has powers of two beside."""
    folder = Path(__file__).parents[1] / "golden" / "configs"
    configs = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    configs = [c for c in configs if c.get("quantization_config", {}).get("quant_method") == "fp8"]
    assert configs
    for config in configs:
        said = config["quantization_config"]
        assert block_size(said) == block_size(said | {"scale_fmt": "ue8m0"}) == (128, 128)
        plain, *_ = view(config, Held())
        assert families.model_config(plain) == families.model_config(
            {name: value for name, value in config.items() if name != "quantization_config"}
        )


def test_deepseek_in_fp8_is_read_as_in_bfloat16(tmp_path):
    """Latents, experts, a layer that predicts; sizes that are no multiples of the blocks."""
    config = sparse()["deepseek v3"][1] | {"architectures": [DEEPSEEK], "num_mtp_layers": 1}
    config |= {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    tensors = random_tensors(families.model_config(config), DEEPSEEK)
    exact = "e_score_correction_bias"
    tensors = {n: a.astype("f4") if exact in n else a for n, a in tensors.items()}
    fp8, full = write_both(tmp_path, config, tensors, (16, 12), modules_to_not_convert=["lm_head"])
    stored = [name for name in fp8 if fp8[name].dtype == E4M3]
    assert any("layers.2.mlp.experts.3" in name for name in stored)  # of the layer that predicts
    assert any(fp8[n].shape[0] % 16 and fp8[n].shape[1] % 12 for n in stored)
    sources = [convert.open_folder(tmp_path / name) for name in ("fp8", "full")]
    assert sources[0].config == sources[1].config
    assert sources[0].weights.tensors == sources[1].weights.tensors
    assert sources[0].weights.tensors.keys() == full.keys()
    assert all(sources[0].weights.read(n).tobytes() == full[n].tobytes() for n in full)
    assert not {name for name, _ in convert.imported(sources[0])} ^ full.keys()


def test_memory_is_bounded_by_the_tensor_that_is_read(tmp_path):
    """NumPy tells tracemalloc of all its arrays; those of the file are mapped."""
    count, rows, columns = 4, 512, 512
    numbers, scales = quantized(np.ones((count, rows, columns)), (128, 128))
    write_tensors(tmp_path, {NAME: numbers, SCALES: scales})
    said = settings(weight_block_size=[128, 128])
    weights = Fp8Weights(SafetensorsFolder(tmp_path), said)
    matrix, row_of_blocks = 2 * rows * columns, 128 * columns
    scales_bytes = 4 * rows // 128 * columns  # one for each column
    for index, parts in (((), count), ((1,), 1)):
        tracemalloc.start()
        read = weights.read(NAME, *index)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert read.nbytes == parts * matrix
        # Of a row of blocks at a time: indices of 8 bytes, values in float32, their products.
        assert peak < parts * (matrix + 16 * row_of_blocks + scales_bytes) + SMALL_BYTES


def test_fp8_without_quantization_config_is_refused(tmp_path):
    write_config(tmp_path / "hf", LLAMA, "LlamaForCausalLM")
    tensors = random_tensors(LLAMA, "LlamaForCausalLM", E4M3)
    write_tensors(tmp_path / "hf", tensors)
    with pytest.raises(ValueError, match="in float32"):
        convert.import_model(convert.open_folder(tmp_path / "hf"), tmp_path / "run")
