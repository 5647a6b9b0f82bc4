"""Weights in FP8 by blocks, as DeepSeek V3 and R1 and `-FP8` folders of Qwen 3 are published.

`X` float8_e4m3fn [..., out, in] times `X_scale_inv` [..., ceil(out / rows), ceil(in / columns)],
one number for each block of weight_block_size=[rows, columns]. Together they are X in bfloat16:
the product in float32, rounded once, as DeepSeek's own script and transformers make it. What is
stored so is known by its dtype: lists of modules that are not, such as modules_to_not_convert,
say nothing more.
"""

import typing
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.hf.keys import refused

BFLOAT16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
POWERS, BYTES = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(np.uint8)
FLOATS = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))
SCALES = "_scale_inv"
VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)  # of each byte
NOT_A_NUMBER = 0x7F  # but for its sign
LARGEST = float(ml_dtypes.finfo(BFLOAT16).max) / float(ml_dtypes.finfo(E4M3).max)
KNOWN: Mapping[str, tuple[tuple[typing.Any, ...], str]] = {
    "fmt": (("e4m3", "float8_e4m3fn"), "e4m3 is what is read"),
    "activation_scheme": (("dynamic",), "scales of activations, static ones, would be lost"),
    "scale_fmt": (("float", "ue8m0"), "scales are read as floats or as powers of two (ue8m0)"),
    "expert_dtype": (("fp8",), "experts are read in fp8, or all in mxfp4"),
}


class Fp8Weights:
    """Weights in which a tensor of FP8 and its scales stand for one, made when it is read."""

    def __init__(self, weights: typing.Any, settings: Mapping[str, typing.Any]) -> None:
        self._weights, self._block = weights, block_size(settings)
        powers = (POWERS, BYTES) if settings.get("scale_fmt") == "ue8m0" else (POWERS,)
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in weights.tensors.items():
            base = weights.tensors.get(name.removesuffix(SCALES))
            if name.endswith(SCALES) and (base is None or base.dtype != E4M3):
                raise ValueError(
                    f"{name} scales no tensor of float8_e4m3fn: {name.removesuffix(SCALES)} is "
                    f"{'missing' if base is None else base.dtype}; download the folder again"
                )
            if info.dtype == E4M3:
                scales = weights.tensors.get(name + SCALES)
                wanted = _num_blocks(info.shape, self._block)
                known = scales is not None and scales.dtype in (*FLOATS, *powers)
                if scales is None or wanted is None or scales.shape != wanted or not known:
                    found = f"{scales.dtype}{list(scales.shape)}" if scales else "missing"
                    raise ValueError(
                        f"{name} is float8_e4m3fn{list(info.shape)} and {name}{SCALES} {found}: "
                        f"with weight_block_size={list(self._block)} a matrix has "
                        f"{_shown(powers)}{list(wanted or ())}; download the folder again"
                    )
                info = TensorInfo(BFLOAT16, info.shape)
            if not name.endswith(SCALES):
                self.tensors[name] = info

    def read(self, name: str, *index: int) -> np.ndarray:
        """A tensor, or an entry of the dimensions before its last two: no more is held."""
        tensor = self._weights.read(name, *index)
        if tensor.dtype != E4M3:
            return tensor
        scales = self._weights.read(name + SCALES, *index)
        return dequantized(name, tensor, scales, self._block)


def dequantized(
    name: str, numbers: np.ndarray, scales: np.ndarray, block: tuple[int, int]
) -> np.ndarray:
    """[..., out, in] in FP8 and the scales of its blocks -> bfloat16 [..., out, in]."""
    scales = (scales.view(POWERS) if scales.dtype == BYTES else scales).astype(np.float32)
    if not ((scales >= 0) & (scales <= LARGEST)).all():
        raise ValueError(
            f"{name}{SCALES} has a number that is not in 0..{LARGEST:g}, where bfloat16 holds all "
            "products: download it again"
        )
    rows, columns = block
    numbers, found = numbers.view(np.uint8), np.empty(numbers.shape, BFLOAT16)
    scales = np.repeat(scales, columns, axis=-1)[..., : numbers.shape[-1]]
    for at in range(scales.shape[-2]):  # a row of blocks at a time: float32 of no more is held
        part = (..., slice(at * rows, (at + 1) * rows), slice(None))
        if ((numbers[part] & NOT_A_NUMBER) == NOT_A_NUMBER).any():
            raise ValueError(f"{name} has a byte that is no number in E4M3: download it again")
        found[part] = VALUES.take(numbers[part]) * scales[..., at : at + 1, :]
    return found


def block_size(settings: Mapping[str, typing.Any]) -> tuple[int, int]:
    """(rows, columns) of a block by quantization_config, the rest of which must be known."""
    for name, (values, remedy) in KNOWN.items():
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
    """Shape of the scales; None for what is no matrix, and not stored so."""
    if len(shape) < 2:
        return None
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _shown(powers: tuple[np.dtype, ...]) -> str:
    return "|".join(str(dtype) for dtype in (*FLOATS, *powers))
