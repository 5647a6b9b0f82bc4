"""Experts in MXFP4, as GPT-OSS is published: four bits a number, a power of two for each 32.

`X_blocks` [..., out, groups, 16] holds two numbers a byte, the first in the low bits; `X_scales`
[..., out, groups] the exponents, 127 more than they are. Together they are X [..., in, out],
exactly: bfloat16 has all of their products (OCP Microscaling Formats, 1.0).
"""

import typing

import ml_dtypes
import numpy as np

from maxmeg.checkpoint.stream import TensorInfo

BFLOAT16, BYTES = np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint8)
BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32
EXPONENT = 127  # added to what is stored
LARGEST = 252  # with which six is still a number
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*POSITIVE, *(-value for value in POSITIVE)], np.float32)


class Mxfp4Weights:
    """Weights in which pairs of blocks and scales stand for one tensor, made when it is read."""

    def __init__(self, weights: typing.Any) -> None:
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
            wanted = TensorInfo(BYTES, info.shape[:-1])
            if info.dtype != BYTES or info.shape[-1:] != (GROUP // 2,) or scales != wanted:
                raise ValueError(
                    f"{name} is {info.dtype}{list(info.shape)}, its scales are {scales}: MXFP4 has "
                    f"uint8[..., {GROUP // 2}] and uint8[...]; download the folder again"
                )
            *lead, outputs, groups = info.shape[:-1]
            self.tensors[base] = TensorInfo(BFLOAT16, (*lead, groups * GROUP, outputs))

    def read(self, name: str, *index: int) -> np.ndarray:
        """A tensor, or an entry of its first dimensions: no more than that is held."""
        if name in self._weights.tensors:
            return self._weights.read(name, *index)
        parts = (self._weights.read(name + end, *index) for end in (BLOCKS, SCALES))
        return dequantized(name, *parts)


def dequantized(name: str, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., out, groups, 16] and [..., out, groups] -> bfloat16 [..., in, out]."""
    if scales.size and scales.max() > LARGEST:
        raise ValueError(
            f"{name}{SCALES} has an exponent above {LARGEST}: no number; download it again"
        )
    pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1)
    pairs = np.ldexp(pairs, scales.astype(np.int32)[..., None, None] - EXPONENT)
    return pairs.astype(BFLOAT16).reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)
