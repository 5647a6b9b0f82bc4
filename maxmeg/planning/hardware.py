"""Datasheet numbers of GPUs by JAX's `device_kind`, and clusters of GPUs."""

import dataclasses
import re

from maxmeg.config.parallel import GPUS_A_NODE
from maxmeg.ops.backend import COMPILED_FOR, Device
from maxmeg.runtime.gpu_environment import pool_fraction

GIB = 2**30

# Fractions of the datasheet's rates that are reached. MATMUL, MEMORY and ATTENTION were measured
# with single operations in plain JAX on one H200: a bf16 product (795 of 989 TFLOP/s), a copy
# (4.18 of 4.8 TB/s), cuDNN's causal attention at 4,096 tokens with heads of size 128 (591 forward
# and 474 backward of 989). LINK is an assumption for NCCL's rings with large messages. No GPU has
# timed a training step of maxmeg yet.
MATMUL_REACHED = 0.80
MEMORY_REACHED = 0.87
ATTENTION_FORWARD_REACHED = 0.60
ATTENTION_BACKWARD_REACHED = 0.48
LINK_REACHED = 0.80
HOST_REACHED = 0.85  # of PCIe or NVLink-C2C, from pinned memory: an assumption
NARROW_REACHED = 0.65  # of the peak in 8 and 4 bits: an assumption
# Of the rate of bf16 products: float32 ones without tensor cores (67 of 989 TFLOP/s on an H100).
# That QR decompositions reach it is an assumption.
FLOAT32_SPEED = 1 / 15
# Of the peak: kernels/fp8_blockwise.py, an assumption. Its tiles read up to 6.4 bytes from the L2
# cache per 1,000 FLOPs.
BLOCKWISE_REACHED = 0.50


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Peak dense bf16 tensor-core rate with fp32 sums (TFLOP/s), memory (GB) and HBM (TB/s).

    nvlink: GB/s per GPU in one direction; network: GB/s in one direction of one GPU's share of the
    node's network adapters; cuda_gib: the total memory that CUDA reports, in GiB; host: GB/s in one
    direction between GPU and host memory, over PCIe x16 or NVLink-C2C. 0: not listed.
    """

    bf16_tflops: float
    memory_gb: int
    memory_tb_per_s: float
    nvlink_gb_per_s: float = 0.0
    network_gb_per_s: float = 0.0
    cuda_gib: float = 0.0
    host_gb_per_s: float = 0.0


# The first row whose words are all in the device's name counts: variants before the plain name.
_GPUS = (
    ("GB300", Gpu(2500.0, 288, 8.0, host_gb_per_s=450.0)),
    ("GB200", Gpu(2500.0, 192, 8.0, host_gb_per_s=450.0)),
    ("B300", Gpu(2250.0, 288, 8.0)),
    ("B200", Gpu(2250.0, 192, 8.0, 900.0, 50.0, 178.3, 64.0)),
    ("GH200 480GB", Gpu(989.4, 96, 4.0, host_gb_per_s=450.0)),
    ("GH200", Gpu(989.4, 144, 4.9, host_gb_per_s=450.0)),
    ("H200 NVL", Gpu(835.5, 141, 4.8)),
    ("H200", Gpu(989.4, 141, 4.8, 450.0, 50.0, 139.7, 64.0)),
    ("H100 PCIe", Gpu(756.0, 80, 2.0)),
    ("H100 NVL", Gpu(835.5, 94, 3.9)),
    ("H100", Gpu(989.4, 80, 3.35, 450.0, 50.0, 79.1, 64.0)),
    ("H800 PCIe", Gpu(756.0, 80, 2.0)),
    ("H800", Gpu(989.4, 80, 3.35)),
    ("H20", Gpu(148.0, 96, 4.0)),
    ("A100-SXM4-80GB", Gpu(312.0, 80, 2.04, 300.0, 25.0, 79.1, 32.0)),
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

# Nodes of eight GPUs with NVLink; one 400 Gb/s network adapter per GPU, on A100 200 Gb/s (DGX).
_CLUSTER_GPUS = {"a100": "A100-SXM4-80GB", "h100": "H100", "h200": "H200", "b200": "B200"}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`count` GPUs in nodes of GPUS_A_NODE, in rank order."""

    name: str
    gpu: Gpu
    count: int

    @property
    def capacity(self) -> int:
        """Bytes of XLA's memory pool on one GPU, as `runtime.gpu_environment` sets it."""
        return int(self.gpu.cuda_gib * GIB * pool_fraction())

    @property
    def device(self) -> Device:
        """The GPU with its compute capability, (0, 0) if unknown."""
        return Device("cuda", (COMPILED_FOR.get(self.name.upper(), 0), 0))

    @property
    def memory_rate(self) -> float:
        """Bytes per second that a GPU reads and writes."""
        return self.gpu.memory_tb_per_s * 1e12 * MEMORY_REACHED

    @property
    def matmul_rate(self) -> float:
        """FLOPs per second of matrix products."""
        return self.gpu.bf16_tflops * 1e12 * MATMUL_REACHED

    @property
    def host_rate(self) -> float:
        """Bytes per second between a GPU and pinned host memory, in one direction."""
        return self.gpu.host_gb_per_s * 1e9 * HOST_REACHED

    def narrow_rate(self, speed: int) -> float:
        """FLOPs per second of matrix products of operands that tensor cores multiply `speed` times
        as fast as 16-bit ones."""
        return speed * self.gpu.bf16_tflops * 1e12 * NARROW_REACHED

    @property
    def blockwise_rate(self) -> float:
        """FLOPs per second of products in 8 bits with scales of blocks, by our kernel."""
        return 2 * self.gpu.bf16_tflops * 1e12 * BLOCKWISE_REACHED

    def link_rate(self, nodes: int, adapters: int) -> float:
        """Bytes per second that a GPU of a group sends in a ring over `nodes` nodes.

        Within a node over NVLink. Between nodes, the members of a group in a node share their
        `adapters`, as with NCCL's parallel rings; at most NVLink's rate.
        """
        network = min(adapters * self.gpu.network_gb_per_s, self.gpu.nvlink_gb_per_s)
        return (self.gpu.nvlink_gb_per_s if nodes == 1 else network) * 1e9 * LINK_REACHED


def parse_cluster(text: str) -> Cluster:
    """ "h100x64" -> 64 H100s. ValueError for an unknown name or a count without whole nodes."""
    match = re.fullmatch(r"([a-z0-9]*?)x(-?\d+)", text.lower())
    if not match:
        raise ValueError(
            f"hardware={text!r} is not NAMExCOUNT, as h100x64: choose NAME from "
            f"{', '.join(_CLUSTER_GPUS)} and COUNT up to {GPUS_A_NODE} or a multiple of it"
        )
    name, count = match[1], int(match[2])
    if name not in _CLUSTER_GPUS:
        names = ", ".join(_CLUSTER_GPUS)
        raise ValueError(f"hardware={text!r}: no GPU is named {name!r}; choose from {names}")
    if not has_whole_nodes(count):
        raise ValueError(
            f"hardware={text!r}: {count} GPUs do not make nodes of {GPUS_A_NODE}: choose 1 to "
            f"{GPUS_A_NODE}, or a multiple of {GPUS_A_NODE}"
        )
    return cluster(name, count)


def has_whole_nodes(count: int) -> bool:
    """Whether GPUs make whole nodes, or are a part of one."""
    return 0 < count <= GPUS_A_NODE or (count > 0 and count % GPUS_A_NODE == 0)


def cluster(name: str, count: int) -> Cluster:
    """`count` GPUs of a name in _CLUSTER_GPUS."""
    sheet = gpu(_CLUSTER_GPUS[name])
    assert sheet is not None
    return Cluster(name, sheet, count)


def cluster_name(device_kind: str) -> str:
    """The name of this GPU in _CLUSTER_GPUS; empty if it is not there."""
    sheet = gpu(device_kind)
    return next((name for name, kind in _CLUSTER_GPUS.items() if gpu(kind) is sheet), "")


def gpu(device_kind: str) -> Gpu | None:
    """Datasheet of a GPU; None for a CPU or an unlisted device."""
    words = _words(device_kind)
    return next((sheet for name, sheet in _GPUS if set(_words(name)) <= set(words)), None)


def peak_tflops(device_kind: str) -> float | None:
    """Peak dense bf16 TFLOP/s, the denominator of MFU; None if unknown."""
    sheet = gpu(device_kind)
    return sheet.bf16_tflops if sheet else None


def _words(name):
    return name.upper().replace("-", " ").split()
