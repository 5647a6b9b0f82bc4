"""Folders in FP8 by blocks, made of tensors in full; and their numbers, one block at a time."""

import json
import re

import ml_dtypes
import numpy as np
from hf_folders import BF16, write_tensors

E4M3, POWERS = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
LARGEST = 448.0
PROJECTIONS = re.compile(r"(proj|proj_with_mqa|kv_b_proj)\.weight$")  # no router, no table
NOT_QUANTIZED = re.compile(r"eh_proj")


def blocks_of(shape, block):
    """(index among the blocks, part of the matrix) of each."""
    rows, columns = block
    for i in range(-(-shape[-2] // rows)):
        for j in range(-(-shape[-1] // columns)):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            yield (..., i, j), (..., *part)


def quantized(array, block, dtype=np.float32):
    """[..., out, in] -> numbers of E4M3 and the scales of their blocks."""
    array = array.astype(np.float32)
    counts = [-(-size // n) for size, n in zip(array.shape[-2:], block, strict=True)]
    scales = np.zeros((*array.shape[:-2], *counts), np.float32)
    numbers = np.zeros(array.shape, E4M3)
    for at, part in blocks_of(array.shape, block):
        scale = np.abs(array[part]).max((-2, -1)) / LARGEST
        scale = np.exp2(np.ceil(np.log2(scale))) if dtype == POWERS else scale.astype(dtype)
        scales[at] = scale
        whole = np.float32(scale)[..., None, None]
        numbers[part] = np.clip(array[part] / whole, -LARGEST, LARGEST).astype(E4M3)
    return numbers, scales.astype(dtype)


def in_full(numbers, scales, block):
    """What they are: products in float32, rounded to bfloat16."""
    found = np.zeros(numbers.shape, BF16)
    for at, part in blocks_of(numbers.shape, block):
        scale = scales[at].astype(np.float32)[..., None, None]
        found[part] = (numbers[part].astype(np.float32) * scale).astype(BF16)
    return found


def write_both(folder, config, tensors, block, **more):
    """Folders `fp8` and `full` of the same model; the tensors of each."""
    full, fp8 = dict(tensors), dict(tensors)
    for name, array in tensors.items():
        if PROJECTIONS.search(name) and not NOT_QUANTIZED.search(name):
            numbers, scales = quantized(array, block)
            fp8 |= {name: numbers, name + "_scale_inv": scales}
            full[name] = in_full(numbers, scales, block)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    settings |= {"weight_block_size": list(block), **more}
    for name, described, files in (
        ("fp8", config | {"quantization_config": settings}, fp8),
        ("full", config, full),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(described))
        write_tensors(folder / name, files, max_shard_bytes=60_000)
    return fp8, full
