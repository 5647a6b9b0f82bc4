"""The attention backend of each mixer on a GPU, and its cost. Nothing is compiled."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from maxmeg.layers.attention import AttentionSpec
from maxmeg.ops.attention import cudnn, xla
from maxmeg.ops.attention.call import choice, is_costly, xla_words
from maxmeg.ops.attention.spec import Operands
from maxmeg.ops.backend import Device
from maxmeg.planning.cost.context import gathered_keys, kernel_sizes
from maxmeg.planning.cost.workload import Unit, Workload


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How the attention of a mixer runs on a device, in a microbatch.

    backend, reason: as `ops.attention.call.choice` returns them. warning: why and at what price it
    runs in plain XLA; empty if it does not, or if its sequences are short. moved: bytes that XLA
    writes and reads of its float32 scores, or cuDNN of a mask. block: bytes of the scores that
    exist at once, or of the mask. slices: bytes of the keys and values that XLA copies for each
    piece of the queries, if it does. surplus: the number of scores that are computed, divided by
    the number that the mask keeps (without document boundaries). stored: bytes that backward reads
    unless the recompute policy drops them: outputs and their log-sum-exps, or XLA's weights, if all
    queries are one block; 0: XLA computes them again.
    """

    backend: str
    reason: str
    warning: str
    moved: int
    block: int
    surplus: float
    slices: int = 0
    stored: int = 0

    @property
    def is_fused(self) -> bool:
        return self.backend != "xla"


def kernels(work: Workload, unit: Unit) -> Iterator[Kernel]:
    """The kernel of each attention mixer of a unit."""
    config, work = work.config, work.of(unit)
    for sublayer in unit.specs:
        memory = config.data.source_tokens
        if sublayer.side == "source":
            memory = config.data.sequence_length
        for mixer in sublayer.mixers:
            if isinstance(mixer, AttentionSpec):
                samples, length, tensor = kernel_sizes(work, mixer)
                parts = mixer.parts(work.length, memory)
                devices = 1 if mixer.spans_devices else work.axes["context"]
                yield kernel(
                    mixer,
                    (samples * parts // devices, length // parts, tensor),
                    config.model.dtype.value,
                    config.data.has_segments,
                    work.device,
                    gathered_keys(work, mixer),
                    memory // parts * mixer.reads_memory,
                )


@functools.lru_cache(maxsize=1024)
def kernel(
    spec: AttentionSpec,
    sizes: tuple[int, int, int],
    dtype: str,
    documents: bool,
    device: Device,
    gathered: int = 0,
    source: int = 0,
) -> Kernel:
    """The kernel of a mixer in training. sizes: samples of a microbatch, their length, and the
    number of devices over which the heads are sharded. documents: whether tokens attend to their
    own document only. gathered: length of the whole sequence, whose keys the two halves of a
    device's piece read; 0: queries and keys are the same tokens. source: number of keys of cross
    attention."""
    samples, length, tensor = sizes
    call = call_of(spec, sizes, dtype, documents, gathered, source)
    name, reason = spec.backend, ""
    if name == "auto":
        name, reason = choice(call, name, device)
    keys_values = sum(x.size * x.dtype.itemsize for x in call[1:3])
    scores, heads = call[3], samples * spec.num_heads // tensor
    outputs = jnp.dtype(dtype).itemsize * heads * length * spec.head_output_size
    fused = outputs + xla.score_bytes(heads, length)
    if name == "cudnn" and (cudnn.needs_mask(*call[3:]) or spec.sinks):
        return dataclasses.replace(masked_by_cudnn(call, heads, dtype), stored=fused)
    if name != "xla":
        return Kernel(name, reason, "", 0, 0, 1.0, stored=fused)
    pairs = length * (source or gathered or length)
    alone = (gathered or length) <= xla.QUERY_BLOCK
    computed = xla.computed_pairs(length, source or length, scores)
    visible = xla.visible_pairs(length, source or length, scores)
    block = min(xla.QUERY_BLOCK, length) * (source or xla.most_keys(length, scores))
    slices = xla.sliced_keys(length, scores) * keys_values // length
    if (
        gathered and not source
    ):  # at places that differ by device: every block reads all keys; both halves at once
        computed = length * gathered
        visible = xla.visible_pairs(gathered, gathered, scores) * length / gathered
        block = 2 * min(xla.QUERY_BLOCK, length // 2) * gathered
        slices = (samples > 1) * (-(-length // xla.QUERY_BLOCK)) * keys_values
    warns = spec.backend == "auto" and is_costly(call, name, device)
    return Kernel(
        name,
        reason,
        xla_words(call, reason, device) if warns else "",
        xla.SCORE_PASSES * xla.score_bytes(heads, computed),
        xla.score_bytes(heads, block),
        computed / visible,
        slices=slices,
        stored=alone * (outputs + xla.score_bytes(heads, pairs)),
    )


def masked_by_cudnn(call: tuple, heads: int, dtype: str) -> Kernel:
    """cuDNN with a mask or sinks. The mask is written once, and read by every head: in a causal
    model the half of it that is computed."""
    (samples, length), spec, operands = call[0].shape[:2], *call[3:]
    words = ["a mask"] * cudnn.needs_mask(spec, operands) + ["sinks"] * bool(operands.sinks_H)
    reason = f"with {' and '.join(words)}; not yet run on a GPU"
    if not cudnn.needs_mask(spec, operands):
        return Kernel("cudnn", reason, "", 0, 0, 1.0)
    itemsize = jnp.dtype(dtype).itemsize
    computed = length * (length + 1) // 2 if spec.causal else length**2
    visible = xla.visible_pairs(length, length, spec)
    mask = itemsize * samples * length**2
    return Kernel("cudnn", reason, "", mask + itemsize * heads * computed, mask, computed / visible)


def call_of(
    spec: AttentionSpec,
    sizes: tuple[int, int, int],
    dtype: str,
    documents: bool,
    gathered: int = 0,
    source: int = 0,
) -> tuple:
    """The (q, k, v, spec, operands) of a mixer's attention in training, with shapes for arrays."""
    samples, length, tensor = sizes

    def array(*shape: int, kind: str = dtype, length: int = length) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((samples, length, *shape), kind)

    heads, groups = max(spec.num_heads // tensor, 1), max(spec.num_kv_heads // tensor, 1)
    keys_length, documents = source or gathered or length, documents or source > 0
    ids: Any = array(kind="int32")
    key_ids: Any = array(kind="int32", length=keys_length)
    present: Any = True  # in place of an operand whose shape no backend asks for
    traced: Any = array(kind="int32")
    operands = Operands(
        offset=traced if gathered and not source else 0,
        segments_BL=ids if documents else None,
        key_segments_BM=key_ids if documents and keys_length != length else None,
        sinks_H=present if spec.sinks else None,
        dropout=present if spec.dropout else None,
        bias_NH=present if spec.buckets else None,
    )
    scores = spec.score_spec()
    queries, keys = array(heads, spec.key_size), array(groups, spec.key_size, length=keys_length)
    values = array(groups, spec.head_output_size, length=keys_length)
    return queries, keys, values, scores, operands


def fused_attention(work: Workload) -> bool:
    """Whether one kernel computes the attention of every layer."""
    return all(kernel.is_fused for unit in work.units for kernel in kernels(work, unit))


def keeps_results(work: Workload) -> bool:
    """Whether the recompute policy keeps the results of attention."""
    return {"attention_output", "attention_weights", "attention_lse"} <= work.saved


def keeps_attention(work: Workload, unit: Unit) -> bool:
    """Whether backward of a unit computes no attention again."""
    return keeps_results(work) and all(kernel.stored for kernel in kernels(work, unit))


def stored_attention(work: Workload, unit: Unit) -> int:
    """Bytes of attention's results that backward of a unit reads from memory."""
    return sum(k.stored for k in kernels(work, unit)) if keeps_results(work) else 0


def transposed_stacks(work: Workload, unit: Unit) -> int:
    """Bytes that XLA holds twice for each layer of short attention in plain XLA: before backward of
    the layers it transposes the keys, values, outputs of heads and, under fsdp, queries of all of
    them. The originals stay where the loop over microbatches carries them."""
    if not keeps_results(work) or work.microbatches == 1 or work.pipelined:
        return 0
    attentions = [one for one in unit.widths if one.head_outputs]
    width = sum(
        one.queries_keys_values + (one.head_outputs if work.fsdp > 1 else 0)
        for one, kernel in zip(attentions, kernels(work, unit), strict=True)
        if kernel.stored and not kernel.is_fused
    )
    return work.itemsize * work.of(unit).tokens * width // work.axes["tensor"]


def score_bytes(work: Workload) -> float:
    """Bytes of scores or of a mask that the average layer's forward writes and reads."""
    sizes = ((u.repeats, kernel.moved) for u in work.units for kernel in kernels(work, u))
    return sum(repeats * size for repeats, size in sizes) / work.config.model.num_layers


def surplus(work: Workload) -> float:
    """Scores that are computed over those that the masks keep, on average."""
    ratios = [(u.repeats, kernel.surplus) for u in work.units for kernel in kernels(work, u)]
    layers = sum(repeats for repeats, _ in ratios)
    return sum(repeats * ratio for repeats, ratio in ratios) / layers if layers else 1.0


def backends(work: Workload) -> str:
    """ "cudnn", or "xla (cudnn: softcap=50.0 is not supported)"; empty without attention."""
    every = [kernel for unit in work.units for kernel in kernels(work, unit)]
    words = {k.backend + (f" ({k.reason})" if k.reason else "") for k in every}
    return ", ".join(sorted(words))


def warnings(work: Workload) -> dict[str, str]:
    """Warnings of attention in plain XLA, by their reason; of several, that of most scores."""
    every = [kernel for unit in work.units for kernel in kernels(work, unit) if kernel.warning]
    return {k.reason: k.warning for k in sorted(every, key=lambda k: k.moved)}
