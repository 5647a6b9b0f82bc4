"""DeepSeek's layout of eight bits as transformers makes it and reads it, bit for bit."""

import types

import numpy as np
import pytest
import torch
from fp8_folders import E4M3, POWERS
from hf_folders import BF16
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from maxmeg.checkpoint.stream import TensorInfo
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
