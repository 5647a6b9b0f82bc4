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
from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.ops.backend import Device
from maxmeg.planning.cost.context import kernel_sizes
from maxmeg.planning.cost.workload import Unit, Workload


@dataclasses.dataclass(frozen=True)
class Call:
    """The attention of a mixer in training on a device.

    samples: of a microbatch. tensor: number of devices over which the heads are sharded. documents:
    whether tokens attend to their own document only. gathered: length of the whole sequence, whose
    keys the two halves of a device's piece read; 0: queries and keys are the same tokens. source:
    number of keys of cross attention.
    """

    spec: AttentionSpec
    samples: int
    length: int
    tensor: int
    dtype: str
    documents: bool
    gathered: int = 0
    source: int = 0

    @property
    def heads(self) -> int:
        """Number of heads of all samples on a device."""
        return self.samples * self.spec.num_heads // self.tensor

    def arguments(self) -> tuple[Any, Any, Any, ScoreSpec, Operands]:
        """Queries, keys, values, spec and operands, with shapes for arrays."""
        spec, length = self.spec, self.length
        keys_length = self.source or self.gathered or length
        has_segments = self.documents or self.source > 0

        def array(*shape: int, kind: str = self.dtype, length: int = length) -> Any:
            return jax.ShapeDtypeStruct((self.samples, length, *shape), kind)

        present: Any = True  # in place of an operand whose shape no backend asks for
        key_ids = array(kind="int32", length=keys_length)
        operands = Operands(
            offset=array(kind="int32") if self.gathered and not self.source else 0,
            segments_BL=array(kind="int32") if has_segments else None,
            key_segments_BM=key_ids if has_segments and keys_length != length else None,
            sinks_H=present if spec.sinks else None,
            dropout=present if spec.dropout else None,
            bias_NH=present if spec.buckets else None,
        )
        heads = max(spec.num_heads // self.tensor, 1)
        groups = max(spec.num_kv_heads // self.tensor, 1)
        queries = array(heads, spec.key_size)
        keys = array(groups, spec.key_size, length=keys_length)
        values = array(groups, spec.head_output_size, length=keys_length)
        return queries, keys, values, spec.score_spec(), operands


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
                samples, length, tensor, gathered = kernel_sizes(work, mixer)
                parts = mixer.parts(work.length, memory)
                devices = 1 if mixer.spans_devices else work.axes["context"]
                call = Call(
                    mixer,
                    samples=samples * parts // devices,
                    length=length // parts,
                    tensor=tensor,
                    dtype=config.model.dtype.value,
                    documents=config.data.has_segments,
                    gathered=gathered,
                    source=memory // parts * mixer.reads_memory,
                )
                yield kernel(call, work.device)


@functools.lru_cache(maxsize=1024)
def kernel(call: Call, device: Device) -> Kernel:
    """The kernel of an attention call on a GPU."""
    spec, arguments = call.spec, call.arguments()
    name, reason = spec.backend, ""
    if name == "auto":
        name, reason = choice(arguments, name, device)
    _, keys, values, scores, operands = arguments
    length, gathered, source, heads = call.length, call.gathered, call.source, call.heads
    outputs = jnp.dtype(call.dtype).itemsize * heads * length * spec.head_output_size
    fused = outputs + xla.score_bytes(heads, length)
    if name == "cudnn" and (cudnn.needs_mask(scores, operands) or spec.sinks):
        return dataclasses.replace(masked_by_cudnn(call, scores, operands), stored=fused)
    if name != "xla":
        return Kernel(name, reason, "", 0, 0, 1.0, stored=fused)
    pairs = length * (source or gathered or length)
    alone = (gathered or length) <= xla.QUERY_BLOCK
    computed = xla.computed_pairs(length, source or length, scores)
    visible = xla.visible_pairs(length, source or length, scores)
    block = min(xla.QUERY_BLOCK, length) * (source or xla.most_keys(length, scores))
    keys_values = sum(x.size * x.dtype.itemsize for x in (keys, values))
    slices = xla.sliced_keys(length, scores) * keys_values // length
    # At places that differ by device every block reads all keys; both halves at once.
    if gathered and not source:
        computed = length * gathered
        visible = xla.visible_pairs(gathered, gathered, scores) * length / gathered
        block = 2 * min(xla.QUERY_BLOCK, length // 2) * gathered
        slices = (call.samples > 1) * (-(-length // xla.QUERY_BLOCK)) * keys_values
    warns = spec.backend == "auto" and is_costly(arguments, name, device)
    return Kernel(
        name,
        reason,
        xla_words(arguments, reason, device) if warns else "",
        xla.SCORE_PASSES * xla.score_bytes(heads, computed),
        xla.score_bytes(heads, block),
        computed / visible,
        slices=slices,
        stored=alone * (outputs + xla.score_bytes(heads, pairs)),
    )


def masked_by_cudnn(call: Call, spec: ScoreSpec, operands: Operands) -> Kernel:
    """cuDNN with a mask or sinks. The mask is written once, and read by every head: in a causal
    model the half of it that is computed."""
    words = ["a mask"] * cudnn.needs_mask(spec, operands) + ["sinks"] * bool(operands.sinks_H)
    reason = f"with {' and '.join(words)}; not yet run on a GPU"
    if not cudnn.needs_mask(spec, operands):
        return Kernel("cudnn", reason, "", 0, 0, 1.0)
    itemsize, length = jnp.dtype(call.dtype).itemsize, call.length
    computed = length * (length + 1) // 2 if spec.causal else length**2
    visible = xla.visible_pairs(length, length, spec)
    mask, copies = itemsize * call.samples * length**2, itemsize * call.heads * computed
    return Kernel("cudnn", reason, "", mask + copies, mask, computed / visible)


def all_kernels(work: Workload) -> list[tuple[int, Kernel]]:
    """The kernels of all units, each with the number of the unit's repeats."""
    return [(unit.repeats, kernel) for unit in work.units for kernel in kernels(work, unit)]


def fused_attention(work: Workload) -> bool:
    """Whether one kernel computes the attention of every layer."""
    return all(kernel.is_fused for _, kernel in all_kernels(work))


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
    moved = sum(repeats * kernel.moved for repeats, kernel in all_kernels(work))
    return moved / work.config.model.num_layers


def surplus(work: Workload) -> float:
    """Scores that are computed over those that the masks keep, on average."""
    every = all_kernels(work)
    layers = sum(repeats for repeats, _ in every)
    return sum(repeats * k.surplus for repeats, k in every) / layers if layers else 1.0


def backends(work: Workload) -> str:
    """ "cudnn", or "xla (cudnn: softcap=50.0 is not supported)"; empty without attention."""
    words = {k.backend + (f" ({k.reason})" if k.reason else "") for _, k in all_kernels(work)}
    return ", ".join(sorted(words))


def warnings(work: Workload) -> dict[str, str]:
    """Warnings of attention in plain XLA, by their reason; of several, that of most scores."""
    every = [kernel for _, kernel in all_kernels(work) if kernel.warning]
    return {k.reason: k.warning for k in sorted(every, key=lambda k: k.moved)}
