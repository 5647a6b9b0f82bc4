"""Datasheet numbers of GPUs by the name JAX gives them (`device_kind`)."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Peak dense bf16 tensor-core rate with fp32 sums (TFLOP/s), memory (GB) and HBM (TB/s)."""

    bf16_tflops: float
    memory_gb: int
    memory_tb_per_s: float


# Matched on the words of the name, first row first: variants before the plain name.
_GPUS = (
    ("GB300", Gpu(2500.0, 288, 8.0)),
    ("GB200", Gpu(2500.0, 192, 8.0)),
    ("B300", Gpu(2250.0, 288, 8.0)),
    ("B200", Gpu(2250.0, 192, 8.0)),
    ("GH200 480GB", Gpu(989.4, 96, 4.0)),
    ("GH200", Gpu(989.4, 144, 4.9)),
    ("H200 NVL", Gpu(835.5, 141, 4.8)),
    ("H200", Gpu(989.4, 141, 4.8)),
    ("H100 PCIe", Gpu(756.0, 80, 2.0)),
    ("H100 NVL", Gpu(835.5, 94, 3.9)),
    ("H100", Gpu(989.4, 80, 3.35)),
    ("H800 PCIe", Gpu(756.0, 80, 2.0)),
    ("H800", Gpu(989.4, 80, 3.35)),
    ("H20", Gpu(148.0, 96, 4.0)),
    ("A100-SXM4-80GB", Gpu(312.0, 80, 2.04)),
    ("A100 80GB PCIe", Gpu(312.0, 80, 1.94)),
    ("A100", Gpu(312.0, 40, 1.56)),
    ("A800", Gpu(312.0, 80, 2.04)),
    ("A40", Gpu(149.7, 48, 0.70)),
    ("A30", Gpu(165.0, 24, 0.93)),
    ("A10G", Gpu(70.0, 24, 0.60)),
    ("A10", Gpu(125.0, 24, 0.60)),
    ("L40S", Gpu(362.0, 48, 0.86)),
    ("L40", Gpu(181.0, 48, 0.86)),
    ("L4", Gpu(121.0, 24, 0.30)),
    ("RTX A6000", Gpu(154.8, 48, 0.77)),
    ("RTX 5090", Gpu(209.5, 32, 1.79)),
    ("RTX 4090", Gpu(165.2, 24, 1.01)),
    ("RTX 3090", Gpu(71.0, 24, 0.94)),
)


def gpu(device_kind: str) -> Gpu | None:
    """Datasheet of a GPU, or None for a CPU or an unlisted device."""
    words = _words(device_kind)
    return next((sheet for name, sheet in _GPUS if set(_words(name)) <= set(words)), None)


def peak_tflops(device_kind: str) -> float | None:
    """Peak dense bf16 TFLOP/s, the denominator of MFU; None where it is unknown."""
    sheet = gpu(device_kind)
    return sheet.bf16_tflops if sheet else None


def _words(name):
    return name.upper().replace("-", " ").split()
