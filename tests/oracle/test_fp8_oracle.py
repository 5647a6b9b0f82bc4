"""DeepSeek's layout of eight bits as transformers makes it and reads it, bit for bit."""

import types

import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_folders import E4M3, POWERS, write_both
from hf_folders import BF16
from safetensors.numpy import load_file
from test_families_oracle import CASES, saved
from test_predicted_oracle import apart, deepseek_layer
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.hf import convert
from maxmeg.hf.formats.quantized import Fp8Weights

BLOCKS = {(4, 8): (16, 32), (128, 128): (256, 384), (1, 32): (3, 64)}  # of a matrix
AS_TORCH = {E4M3: torch.float8_e4m3fn, POWERS: torch.float8_e8m0fnu, BF16: torch.bfloat16}


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    dtypes = {theirs: ours for ours, theirs in AS_TORCH.items()}
    if tensor.dtype not in dtypes:
        return tensor.numpy()
    size = np.dtype(dtypes[tensor.dtype]).itemsize
    whole = tensor.contiguous().view({1: torch.uint8, 2: torch.int16}[size])
    return whole.numpy().view(dtypes[tensor.dtype])


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_what_it_quantizes_and_what_it_reads(scale_fmt, block, lead):
    torch.manual_seed(0)
    shape = (*lead, *BLOCKS[block])
    said = types.SimpleNamespace(weight_block_size=list(block), scale_fmt=scale_fmt)
    given = torch.randn(shape) * torch.logspace(-6, 3, shape[-1])
    made = Fp8Quantize(types.SimpleNamespace(quantization_config=said)).convert({"w": given})
    read = Fp8Dequantize(None).convert(made)["w"]
    arrays = {name: as_numpy(tensor) for name, tensor in made.items()}
    assert arrays["w"].dtype == E4M3
    assert arrays["w_scale_inv"].dtype == (POWERS if scale_fmt == "ue8m0" else np.float32)

    weights = types.SimpleNamespace(
        tensors={n: TensorInfo(a.dtype, a.shape) for n, a in arrays.items()},
        read=lambda name, *index: arrays[name][index],
    )
    settings = {"weight_block_size": list(block), "scale_fmt": scale_fmt}
    ours = Fp8Weights(weights, settings).read("w")
    wanted = as_numpy(read[0].to(torch.bfloat16))
    assert ours.dtype == BF16 and ours.tobytes() == wanted.tobytes()


def test_deepseek_with_its_layer_that_predicts(tmp_path, monkeypatch):
    """Its files by transformers, in eight bits by this test: what is imported is what it reads."""
    family, settings = CASES["deepseek v3"]
    monkeypatch.setitem(CASES, "predicting", (family, settings | {"num_mtp_layers": 1}))
    theirs, config = saved("predicting", tmp_path / "theirs")
    layer, name_of = deepseek_layer(theirs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    tensors |= apart({name_of(name): t.numpy() for name, t in layer.state_dict().items()})
    exact = "e_score_correction_bias"
    tensors = {n: a if exact in n else a.astype(ml_dtypes.bfloat16) for n, a in tensors.items()}
    fp8, _ = write_both(tmp_path, config, tensors, (4, 2))  # by which all sizes are divided
    source = convert.open_folder(tmp_path / "fp8")
    assert {name for name, _ in convert.imported(source)} == tensors.keys()
    for name in tensors:
        wanted = fp8[name]
        if wanted.dtype == E4M3:
            pair = [fp8[name].view(np.uint8), fp8[name + "_scale_inv"]]
            weight, scale = (torch.tensor(array) for array in pair)
            weight = weight.view(torch.float8_e4m3fn)
            actual = Fp8Dequantize(None).convert({"weight": weight, "weight_scale_inv": scale})
            wanted = as_numpy(actual["weight"].to(torch.bfloat16))
        assert source.weights.read(name).tobytes() == wanted.tobytes(), name
