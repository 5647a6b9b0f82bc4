"""Matrices of compressed-tensors are read as the package decompresses them, bit for bit."""

import itertools
import types

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from test_fp8_oracle import as_numpy

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.hf.formats.compressed import CompressedWeights

OUT, IN, NAME = 24, 96, "model.x.weight"
GROUP, CHANNEL = {"strategy": "group", "group_size": 32}, {"strategy": "channel"}
PARTS = {"tensor": {"strategy": "tensor"}, "channel": CHANNEL, "group": GROUP}
BLOCK = {"strategy": "block", "block_structure": [16, 64]}
NVFP4 = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
UNEVEN = {"symmetric": False}
DTYPES = itertools.cycle((torch.float32, torch.bfloat16, torch.float16))
CASES = [
    *(("int-quantized", "int", 8, part) for part in PARTS.values()),
    *(("int-quantized", "int", 8, part | UNEVEN) for part in (CHANNEL, GROUP)),
    *(("float-quantized", "float", 8, part) for part in (*PARTS.values(), BLOCK)),
    *(("pack-quantized", "int", bits, GROUP) for bits in range(2, 9)),
    *(("pack-quantized", "int", bits, GROUP | UNEVEN) for bits in (3, 4, 4, 8)),
    *(("pack-quantized", "int", 4, part) for part in (CHANNEL, CHANNEL | UNEVEN)),
    *((f"mxfp{bits}-pack-quantized", "float", bits, GROUP) for bits in (4, 6)),
    ("mxfp8-quantized", "float", 8, GROUP),
    ("nvfp4-pack-quantized", "float", 4, NVFP4),
]


def bounds(weight, args):
    """Smallest and largest number of each part of a matrix that shares a scale."""
    rows, columns = args.block_structure or {"tensor": (OUT, IN), "channel": (1, IN)}.get(
        args.strategy, (1, args.group_size)
    )
    full = torch.nn.functional.pad(weight, (0, -IN % columns, 0, -OUT % rows))
    parts = full.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    return parts.amin((1, 3)), parts.amax((1, 3))


@pytest.mark.parametrize(("form", "kind", "bits", "more"), CASES)
def test_matrices_are_read_as_the_package_decompresses_them(form, kind, bits, more):
    torch.manual_seed(0)
    by_powers, dtype = form.startswith(("mx", "nv")), next(DTYPES)
    dtype = torch.float32 if by_powers else dtype
    more = {"scale_dtype": torch.uint8} | more if form.startswith("mx") else more
    args = QuantizationArgs(num_bits=bits, type=kind, **more)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    weight = (torch.randn(OUT, IN) * torch.logspace(-2, 1, IN) + 0.1).to(dtype)
    state = {"weight": weight}
    if form.startswith("nv"):
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max()).reshape(1)
    scale, zero = calculate_qparams(*bounds(weight, args), args, state.get("weight_global_scale"))
    compressor = BaseCompressor.get_value_from_registry(form)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    wanted = as_numpy(compressor.decompress(stored, scheme)["weight"])
    arrays = {f"model.x.{name}": as_numpy(tensor) for name, tensor in stored.items()}
    weights = types.SimpleNamespace(
        tensors={n: TensorInfo(a.dtype, a.shape) for n, a in arrays.items()},
        read=lambda name, *index: arrays[name][index],
    )
    group = scheme.model_dump(mode="json")
    ours = CompressedWeights(weights, {"format": form, "config_groups": {"group_0": group}})
    assert ours.tensors == {NAME: TensorInfo(wanted.dtype, (OUT, IN))}
    assert ours.read(NAME).dtype == wanted.dtype and np.array_equal(ours.read(NAME), wanted)
