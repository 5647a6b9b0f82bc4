"""The backend of the experts' products.

batched: every expert multiplies an equal block of rows, empty ones too, in one plain product; loads
that do not fit are multiplied in further rounds. The others are those of `grouped_matmul`, which
multiply rows sorted by expert.
"""

import functools
import logging

import jax

from maxmeg.ops.backend import Device
from maxmeg.ops.choices import measured_order
from maxmeg.ops.experts import grouped_matmul_mosaic
from maxmeg.ops.experts.grouped_matmul import BACKENDS

BATCHED = "batched"
MOST_EMPTY = 1.1  # rows of blocks over the mean load up to which "auto" prefers them to a kernel


def choose_backend(
    named: str,
    matrices: jax.ShapeDtypeStruct,
    *,
    buffer: float,
    limit: float,
    fp8: bool,
    device: Device,
) -> tuple[str, str]:
    """(BATCHED or a backend of grouped_matmul, why "auto" does not use another one).

    matrices: [experts, D, F], weights of a device. buffer: rows of a block over an expert's mean
    load. limit: the same of a block that holds every load. fp8: whether a kernel would multiply fp8
    numbers with scales of rows and columns.

    On a GPU "auto" is batched if a block holds every load and has few empty rows, else our kernel,
    else batched. XLA's grouped product multiplies each row by every expert.
    """
    if named != "auto" or not device.is_cuda:
        return ("xla", "") if named == "auto" else (named, "")
    if limit <= min(buffer, MOST_EMPTY):
        return BATCHED, ""
    rows = jax.ShapeDtypeStruct((1, matrices.shape[1]), matrices.dtype)
    reason = grouped_matmul_mosaic.refuses(rows, matrices, None, fp8, device)
    order = measured_order("grouped_matmul", BACKENDS, ("mosaic",), device.capability)
    if not reason and order[0] != "mosaic":
        reason = f"{order[0]} was measured to be faster"
    if not reason:
        return "mosaic", ""
    return BATCHED, f"mosaic: {reason}"


@functools.cache
def warn_of_xla(rows: int, experts: int, flops: float) -> None:
    """Warn once that XLA multiplies `rows` rows by all of a device's experts, if these are several.

    flops: of a forward pass in which each row is multiplied by one expert.
    """
    if experts > 1:
        logging.getLogger("maxmeg").warning("%s", xla_words(rows, experts, flops))


def xla_words(rows: int, experts: int, flops: float) -> str:
    return (
        f"experts run in XLA's grouped matrix product on the GPU, which multiplies each of {rows:,}"
        f" rows by all {experts:,} experts of the device: in every such layer and microbatch, "
        f"forward takes {experts * flops / 1e12:,.3g} instead of {flops / 1e12:,.3g} TFLOP, and "
        "backward twice as much. Set model.moe.backend=auto or batched, or on "
        "Hopper mosaic"
    )
