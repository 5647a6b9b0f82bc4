"""Quantized weights, dequantized when a tensor is read: FP8 by blocks, MXFP4, compressed-tensors.

FP8 (DeepSeek V3 and R1, `-FP8` folders of Qwen 3): `X` float8_e4m3fn [..., out, in] times
`X_scale_inv` [..., ceil(out / rows), ceil(in / columns)], one scale for each block of
weight_block_size=[rows, columns]. The product is computed in float32 and rounded once to bfloat16,
as DeepSeek's script and transformers do. The dtype alone decides which tensors are quantized: lists
such as modules_to_not_convert add nothing.

MXFP4 (GPT-OSS): experts with four bits per number and one power of two per 32 numbers. `X_blocks`
[..., out, groups, 16] has two numbers per byte, the first in the low bits; `X_scales` [..., out,
groups] has the exponents plus 127. They are X [..., in, out], exactly: bfloat16 represents all of
the products (OCP Microscaling Formats, 1.0).

compressed-tensors: hf/formats/compressed.py.
"""

import typing
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.hf.families.keys import REMEDIES, refused
from maxmeg.hf.formats.compressed import (
    BFLOAT16,
    BYTES,
    E4M3,
    FLOAT_VALUES,
    FLOATS,
    POWERS,
    CompressedWeights,
)

QUANTIZATION = "quantization_config"
Config = Mapping[str, typing.Any]

SCALE = "_scale_inv"
NOT_A_NUMBER = 0x7F  # the bits of NaN in E4M3, apart from the sign
MAX_SCALE = float(ml_dtypes.finfo(BFLOAT16).max) / float(ml_dtypes.finfo(E4M3).max)
SETTINGS: Mapping[str, tuple[tuple[typing.Any, ...], str]] = {
    "fmt": (("e4m3", "float8_e4m3fn"), "only e4m3 is read"),
    "activation_scheme": (("dynamic",), "static scales of activations would be lost"),
    "scale_fmt": (("float", "ue8m0"), "scales are read as floats or as powers of two (ue8m0)"),
    "expert_dtype": (("fp8",), "experts are read in fp8, or all in mxfp4"),
}

BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32
EXPONENT_BIAS = 127
MAX_EXPONENT = 252  # with a larger one, 6.0 overflows bfloat16


def dequantized(config: Config, weights: typing.Any) -> tuple[Config, typing.Any, tuple[str, ...]]:
    """Return config.json without quantization, weights that are dequantized when read, and notes.

    Both are returned as they are if the model is not quantized. ValueError for another method.
    """
    settings = config.get(QUANTIZATION)
    if settings is None:
        return config, weights, ()
    view = VIEWS.get(str(settings.get("quant_method"))) if isinstance(settings, dict) else None
    if view is None:
        raise refused(QUANTIZATION, settings, REMEDIES[QUANTIZATION])
    rest = {name: value for name, value in config.items() if name != QUANTIZATION}
    read = view(weights, settings)
    return rest, read, read.notes


class Fp8Weights:
    """Weights with FP8 tensors, which are dequantized when they are read."""

    notes = ("quantized weights (fp8 by blocks) are dequantized to bfloat16",)

    def __init__(self, weights: typing.Any, settings: Mapping[str, typing.Any]) -> None:
        self._weights, self._block = weights, block_size(settings)
        powers = (POWERS, BYTES) if settings.get("scale_fmt") == "ue8m0" else (POWERS,)
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in weights.tensors.items():
            base = weights.tensors.get(name.removesuffix(SCALE))
            if name.endswith(SCALE) and (base is None or base.dtype != E4M3):
                raise ValueError(
                    f"{name} is not the scale of a float8_e4m3fn tensor: "
                    f"{name.removesuffix(SCALE)} is "
                    f"{'missing' if base is None else base.dtype}; download the folder again"
                )
            if info.dtype == E4M3:
                scales = weights.tensors.get(name + SCALE)
                blocks = _num_blocks(info.shape, self._block)
                is_float = scales is not None and scales.dtype in (*FLOATS, *powers)
                if scales is None or blocks is None or scales.shape != blocks or not is_float:
                    stored = f"{scales.dtype}{list(scales.shape)}" if scales else "missing"
                    raise ValueError(
                        f"{name} is float8_e4m3fn{list(info.shape)} and {name}{SCALE} {stored}: "
                        f"with weight_block_size={list(self._block)} a matrix has "
                        f"{_dtypes(powers)}{list(blocks or ())}; download the folder again"
                    )
                info = TensorInfo(BFLOAT16, info.shape)
            if not name.endswith(SCALE):
                self.tensors[name] = info

    def read(self, name: str, *index: int) -> np.ndarray:
        """Return a tensor, or an entry of its leading dimensions; no more is held in memory."""
        tensor = self._weights.read(name, *index)
        if tensor.dtype != E4M3:
            return tensor
        scales = self._weights.read(name + SCALE, *index)
        return from_fp8(name, tensor, scales, self._block)


def from_fp8(
    name: str, numbers: np.ndarray, scales: np.ndarray, block: tuple[int, int]
) -> np.ndarray:
    """FP8 numbers [..., out, in] and the scales of their blocks -> bfloat16 [..., out, in]."""
    scales = (scales.view(POWERS) if scales.dtype == BYTES else scales).astype(np.float32)
    if not ((scales >= 0) & (scales <= MAX_SCALE)).all():
        raise ValueError(
            f"{name}{SCALE} has a scale outside 0..{MAX_SCALE:g}, with which products overflow "
            "bfloat16: download it again"
        )
    rows, columns = block
    numbers, result = numbers.view(np.uint8), np.empty(numbers.shape, BFLOAT16)
    scales = np.repeat(scales, columns, axis=-1)[..., : numbers.shape[-1]]
    for at in range(scales.shape[-2]):  # one row of blocks at a time bounds the float32 memory
        part = (..., slice(at * rows, (at + 1) * rows), slice(None))
        if ((numbers[part] & NOT_A_NUMBER) == NOT_A_NUMBER).any():
            raise ValueError(f"{name} has a byte that is NaN in E4M3: download it again")
        result[part] = FLOAT_VALUES[8].take(numbers[part]) * scales[..., at : at + 1, :]
    return result


def block_size(settings: Mapping[str, typing.Any]) -> tuple[int, int]:
    """Return (rows, columns) of a block; ValueError for settings that are not supported."""
    for name, (values, remedy) in SETTINGS.items():
        if settings.get(name) not in (None, *values):
            raise refused(f"quantization_config.{name}", settings[name], remedy)
    block: typing.Any = settings.get("weight_block_size")
    pair = isinstance(block, list) and len(block) == 2
    if not pair or not all(type(n) is int and n > 0 for n in block):
        raise refused(
            "quantization_config.weight_block_size",
            block,
            "fp8 is read by blocks of [rows, columns], such as [128, 128]; take the model's files "
            "in bfloat16",
        )
    rows, columns = block
    return rows, columns


def _num_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...] | None:
    """Return the shape of the scales; None for a tensor that is not a matrix."""
    if len(shape) < 2:
        return None
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _dtypes(powers: tuple[np.dtype, ...]) -> str:
    return "|".join(str(dtype) for dtype in (*FLOATS, *powers))


class Mxfp4Weights:
    """Weights with MXFP4 tensors, which are dequantized when they are read."""

    notes = ("quantized weights (mxfp4) are dequantized to bfloat16",)

    def __init__(self, weights: typing.Any, _: Config) -> None:
        self._weights = weights
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in weights.tensors.items():
            base = name.removesuffix(BLOCKS)
            if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in weights.tensors:
                continue
            if base == name:
                self.tensors[name] = info
                continue
            scales = weights.tensors.get(base + SCALES)
            expected_scales = TensorInfo(BYTES, info.shape[:-1])
            if info.dtype != BYTES or info.shape[-1:] != (GROUP // 2,) or scales != expected_scales:
                raise ValueError(
                    f"{name} is {info.dtype}{list(info.shape)}, its scales are {scales}: MXFP4 has "
                    f"uint8[..., {GROUP // 2}] and uint8[...]; download the folder again"
                )
            *lead, outputs, groups = info.shape[:-1]
            self.tensors[base] = TensorInfo(BFLOAT16, (*lead, groups * GROUP, outputs))

    def read(self, name: str, *index: int) -> np.ndarray:
        """Return a tensor, or an entry of its first dimensions; no more is held in memory."""
        if name in self._weights.tensors:
            return self._weights.read(name, *index)
        parts = (self._weights.read(name + end, *index) for end in (BLOCKS, SCALES))
        return from_mxfp4(name, *parts)


def from_mxfp4(name: str, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks [..., out, groups, 16], scales [..., out, groups] -> bfloat16 [..., in, out]."""
    if scales.size and scales.max() > MAX_EXPONENT:
        raise ValueError(
            f"{name}{SCALES} has an exponent above {MAX_EXPONENT}, which overflows "
            "bfloat16; download it again"
        )
    pairs = np.stack([FLOAT_VALUES[4][blocks & 15], FLOAT_VALUES[4][blocks >> 4]], axis=-1)
    pairs = np.ldexp(pairs, scales.astype(np.int32)[..., None, None] - EXPONENT_BIAS)
    return pairs.astype(BFLOAT16).reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)


# How the weights of each quant_method are read.
VIEWS: Mapping[str, Callable[[typing.Any, Config], typing.Any]] = {
    "mxfp4": Mxfp4Weights,
    "fp8": Fp8Weights,
    "compressed-tensors": CompressedWeights,
}
