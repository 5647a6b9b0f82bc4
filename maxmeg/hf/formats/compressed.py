"""Folders of compressed-tensors (llm-compressor, vLLM), dequantized when a tensor is read.

A quantized matrix of a module X is stored as codes, `X.weight` (int8, float8_e4m3fn) or
`X.weight_packed` (a stream of bits per row, lowest bit first), with `X.weight_scale` and perhaps
`X.weight_zero_point`, `X.weight_g_idx` (the group of each column), `X.weight_shape` and
`X.weight_global_scale`. The matrix is (codes - zero point) * scale, computed in float32 and rounded
once to the scale's dtype, or to bfloat16 where scales are powers of two or fp8, as
compressed-tensors does. Its quantization_config says how many bits a code has and which part of the
matrix shares a scale; the names of the tensors alone decide which matrices are quantized.
"""

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from maxmeg.checkpoint.stream import TensorInfo, row_blocks
from maxmeg.hf.families.keys import refused

BFLOAT16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
POWERS, BYTES = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(np.uint8)
INT8, INT32 = np.dtype(np.int8), np.dtype(np.int32)
FLOATS = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))
SETTINGS = "quantization_config"
FORMATS = (
    *("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"),
)
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
PARTS = ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")
# Scales of activations, and of the KV cache; the result of a matrix product does not need them.
ACTIVATIONS = re.compile(r"\.(input|output|q|k|v)_(scale|zero_point|global_scale)$")
CHOICES = ("input_activations", "output_activations", "kv_cache_scheme")
BLOCK_BYTES = 1 << 26  # of a float32 matrix at a time


def values_of(dtype: typing.Any, bits: int) -> np.ndarray:
    """Return the float32 value of each code of a floating-point dtype."""
    return np.arange(1 << bits, dtype=np.uint8).view(dtype).astype(np.float32)


FLOAT_VALUES = {
    4: values_of(ml_dtypes.float4_e2m1fn, 4),
    6: values_of(ml_dtypes.float6_e2m3fn, 6),
    8: values_of(E4M3, 8),
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the codes of a group of modules stand for numbers.

    strategy: the part of a matrix that shares a scale. size: rows and columns of that part, where
    the strategy does not give them.
    """

    bits: int
    is_float: bool
    strategy: str
    size: tuple[int, int] = (1, 1)

    def num_scales(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix."""
        rows, columns = self.part(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def part(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return rows and columns of a matrix that share a scale."""
        return {"tensor": (shape[0], shape[1]), "channel": (1, shape[1])}.get(
            self.strategy, self.size
        )

    def __str__(self) -> str:
        return f"{self.bits}-bit {'floats' if self.is_float else 'integers'} per {self.strategy}"


class CompressedWeights:
    """Weights with matrices that compressed-tensors quantized.

    notes: what an import does not keep.
    """

    def __init__(self, weights: typing.Any, settings: Mapping[str, typing.Any]) -> None:
        self._weights, self._groups = weights, [*_groups(settings)]
        self._schemes: dict[str, Scheme] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in weights.tensors.items():
            module, _, part = name.rpartition(".weight_")
            base = f"{module}.weight" if module and part in PARTS else name
            if base == name and f"{name}_scale" not in weights.tensors:
                if not ACTIVATIONS.search(name):
                    self.tensors[name] = info
            elif base not in self._schemes:
                self._schemes[base] = self._scheme(base.removesuffix(".weight"))
                self.tensors[base] = self._described(base)
        schemes = sorted({str(scheme) for scheme in self._schemes.values()})
        self.notes = (f"quantized weights ({', '.join(schemes)}) are dequantized",)
        groups = settings["config_groups"].values()
        if passed := [n for n in CHOICES if settings.get(n) or any(g.get(n) for g in groups)]:
            self.notes += (f"activations are not quantized: {', '.join(passed)} passed over",)

    def read(self, name: str, *index: int) -> np.ndarray:
        """Return a tensor, or an entry of its first dimensions; no more is held in memory."""
        scheme = self._schemes.get(name)
        if scheme is None:
            return self._weights.read(name, *index)
        assert not index, "quantized tensors are matrices"
        info = self.tensors[name]
        parts = {part: self._weights.read(f"{name}_{part}") for part in self._parts(name)}
        groups, count = parts.get("g_idx"), scheme.num_scales(info.shape)[1]
        if groups is not None and groups.max() >= count:
            raise ValueError(
                f"{name}_g_idx has {groups.max()}, of {count} groups: download it again"
            )
        codes = parts["packed"] if "packed" in parts else self._weights.read(name)
        matrix = from_codes(codes, parts, scheme, info)
        if not np.isfinite(matrix).all():
            raise ValueError(f"{name} is not finite when dequantized: download the folder again")
        return matrix

    def _parts(self, name: str) -> list[str]:
        return [part for part in PARTS if f"{name}_{part}" in self._weights.tensors]

    def _scheme(self, module: str) -> Scheme:
        """Return the scheme of a module. Names precede patterns, which precede classes."""
        is_class = re.compile("Embedding" if "embed" in module else r"(?!Embedding)\w+")
        for precise in (
            lambda target: target == module,
            lambda target: target.startswith("re:") and _pattern(target).match(module),
            is_class.fullmatch,
        ):
            for targets, scheme in self._groups:
                if any(map(precise, targets)):
                    return scheme
        raise ValueError(
            f"{module} is quantized, but no target of {SETTINGS}.config_groups matches it: "
            "download the folder again"
        )

    def _described(self, name: str) -> TensorInfo:
        """Return dtype and shape of a matrix; ValueError where its parts do not fit."""
        scheme, parts, tensors = self._schemes[name], self._parts(name), self._weights.tensors
        infos = {part: tensors[f"{name}_{part}"] for part in parts}
        codes, scale = infos.get("packed", tensors.get(name)), infos.get("scale")
        shape = self._shape(name, scheme, codes) if codes and len(codes.shape) == 2 else None
        dtypes = (BYTES, *FLOATS) if codes and codes.dtype == E4M3 else FLOATS
        if codes and codes.dtype == BYTES:
            dtypes = (E4M3,) if "global_scale" in infos else (BYTES,)
        if not shape or not scale or scale.dtype not in dtypes or not _fit(scheme, shape, infos):
            texts = [f"{name}_{part} {_type_of(info)}" for part, info in infos.items()]
            texts = [f"{name} {_type_of(tensors[name])}", *texts] if name in tensors else texts
            raise ValueError(
                f"{', '.join(texts)}: this is no matrix of {scheme}; download the folder again"
            )
        return TensorInfo(scale.dtype if scale.dtype in FLOATS else BFLOAT16, shape)

    def _shape(self, name: str, scheme: Scheme, codes: TensorInfo) -> tuple[int, ...] | None:
        """Return the shape of a matrix, or None where the codes are not those of the scheme."""
        (rows, width), parts = codes.shape, self._parts(name)
        if "packed" not in parts:
            return codes.shape if codes.dtype == (E4M3 if scheme.is_float else INT8) else None
        if codes.dtype == BYTES and scheme.is_float and scheme.bits < 8:
            return rows, width * 8 // scheme.bits
        if codes.dtype != INT32 or scheme.is_float or "shape" not in parts:
            return None
        shape = tuple(map(int, self._weights.read(f"{name}_shape").ravel()))
        fits = len(shape) == 2 and (rows, width) == (shape[0], -(-shape[1] * scheme.bits // 32))
        return shape if fits else None


def from_codes(
    codes: np.ndarray, parts: Mapping[str, np.ndarray], scheme: Scheme, info: TensorInfo
) -> np.ndarray:
    """Dequantize a matrix. parts: of PARTS; info: dtype and shape of the result."""
    rows, columns = info.shape
    num_scales = scheme.num_scales((rows, columns))
    scale = parts["scale"]
    scale = (scale.view(POWERS) if scale.dtype == BYTES else scale).astype(np.float32)
    if "global_scale" in parts:
        scale = scale / parts["global_scale"].astype(np.float32).reshape(-1)
    scale = scale.reshape(num_scales)
    zero = parts.get("zero_point")
    if zero is not None and zero.dtype == INT32:
        streams = np.ascontiguousarray(zero.T).view(BYTES)
        zero = unpacked(streams, scheme.bits, rows).T - np.float32(1 << (scheme.bits - 1))
    zero = None if zero is None else zero.astype(np.float32).reshape(num_scales)
    part = scheme.part((rows, columns))
    of_column = np.arange(columns) // part[1]
    if "g_idx" in parts and parts["g_idx"].min() >= 0:  # -1: not set
        of_column = parts["g_idx"]
    result = np.empty((rows, columns), info.dtype)
    for block in row_blocks((rows, columns), 4, BLOCK_BYTES):
        numbers = _numbers(codes[block], scheme, columns)
        of_row = (np.arange(block.start, block.stop) // part[0])[:, None]
        if zero is not None:
            numbers -= zero[of_row, of_column]
        with np.errstate(over="ignore", invalid="ignore"):  # the caller tests the result
            result[block] = numbers * scale[of_row, of_column]
    return result


def _numbers(codes: np.ndarray, scheme: Scheme, columns: int) -> np.ndarray:
    """Return the numbers of codes, float32 [rows, columns]."""
    if codes.dtype == INT8:
        return codes.astype(np.float32)
    if codes.dtype != E4M3:
        codes = unpacked(np.ascontiguousarray(codes).view(BYTES), scheme.bits, columns)
    if scheme.is_float:
        return FLOAT_VALUES[scheme.bits].take(codes.view(BYTES) if codes.dtype == E4M3 else codes)
    return codes - np.float32(1 << (scheme.bits - 1))


def unpacked(streams: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Streams of bits [rows, bytes] -> codes uint16 [rows, count]. Each code has `bits` bits."""
    first = np.arange(count) * bits
    pairs = np.pad(streams, ((0, 0), (0, 1))).astype(np.uint16)
    pairs = pairs[:, first // 8] | pairs[:, first // 8 + 1] << 8
    return pairs >> (first % 8).astype(np.uint16) & np.uint16((1 << bits) - 1)


def _fit(scheme: Scheme, shape: tuple[int, ...], infos: Mapping[str, TensorInfo]) -> bool:
    """Whether scales, zero points and groups of columns have the sizes that a matrix needs."""
    rows, columns = shape
    count = scheme.num_scales((rows, columns))
    scales = [count, *[count[:1]] * (count[1] == 1), *[()] * (count == (1, 1))]
    zeros, zero = scales, infos.get("zero_point")
    if zero and zero.dtype == INT32:
        zeros = [(-(-rows * scheme.bits // 32), count[1])]
    sizes = {
        "scale": scales,
        "zero_point": zeros,
        "g_idx": [(columns,)],
        "global_scale": [(), (1,)],
    }
    return (not zero or zero.dtype in (INT8, INT32, E4M3)) and all(
        info.shape in sizes[part] for part, info in infos.items() if part in sizes
    )


def _groups(settings: Mapping[str, typing.Any]) -> Iterator[tuple[list[str], Scheme]]:
    """Yield targets and scheme of each group; ValueError for settings that are not supported."""
    for name in ("sparsity_config", "transform_config"):
        form = settings.get(name) or {}
        if form and form != {"format": "dense"} and form.get("format") != "dense":
            raise refused(f"{SETTINGS}.{name}", form, "sparse and rotated weights are not read")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refused(f"{SETTINGS}.config_groups", groups, "groups with targets are needed")
    for name, group in groups.items():
        where = f"{SETTINGS}.config_groups.{name}"
        targets: typing.Any = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise refused(where, group, "it must have targets and weights")
        form = group.get("format") or settings.get("format")
        if form not in FORMATS:
            raise refused(f"{SETTINGS}.format", form, f"read are {', '.join(FORMATS)}")
        if group.get("weights") is not None:
            yield targets, _scheme_of(f"{where}.weights", group["weights"])


def _scheme_of(where: str, args: Mapping[str, typing.Any]) -> Scheme:
    """Return the scheme that QuantizationArgs describe."""
    bits, kind, size = args.get("num_bits", 8), args.get("type", "int"), args.get("group_size")
    strategy = args.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    part = args.get("block_structure") if strategy == "block" else [1, size]
    if isinstance(part, str):
        part = [int(n) for n in part.split("x") if n.isdecimal()]
    widths = [*range(1, 9)] if kind == "int" else [*FLOAT_VALUES] if kind == "float" else []
    if bits not in widths or strategy not in STRATEGIES or args.get("dynamic"):
        raise refused(where, args, "read are 1 to 8 bits (int) and 4, 6 or 8 bits (float)")
    if strategy in ("tensor", "channel"):
        part = [1, 1]
    if not isinstance(part, list) or [type(n) for n in part] != [int, int] or min(part) < 1:
        raise refused(where, args, f"strategy={strategy} needs the sizes of its parts")
    return Scheme(bits, kind == "float", strategy, (part[0], part[1]))


def _pattern(target: str) -> re.Pattern:
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error as error:
        rule = f"a target after re: must be a regular expression ({error})"
        raise refused(f"{SETTINGS}.config_groups", target, rule) from error


def _type_of(info: TensorInfo) -> str:
    return f"{info.dtype}{list(info.shape)}"
