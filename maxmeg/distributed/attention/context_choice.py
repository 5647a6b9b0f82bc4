"""The choice of a strategy of context parallelism by the seconds of communication that it exposes.

A ring's permute runs beside the attention of a round and is exposed for the rest of its time; an
exchange or a gather is exposed completely. Forward alone is counted: backward has twice the bytes
and at least twice the computation. Nothing here runs on a device.
"""

import dataclasses

from maxmeg.config.context import inner_of
from maxmeg.config.parallel import GPUS_A_NODE
from maxmeg.ops.attention.spec import ScoreSpec


@dataclasses.dataclass(frozen=True)
class ContextStrategy:
    """name: ring, exchange, hierarchy, gather, or auto. inner: number of neighbours that exchange
    heads in a hierarchy; 0: by `inner_of`."""

    name: str = "auto"
    inner: int = 0


@dataclasses.dataclass(frozen=True)
class Rates:
    """Operations per second of attention, and bytes per second to a neighbour inside a node and in
    another one. The defaults are of an H100 with bf16, NVLink and 400 Gb/s a GPU."""

    flops: float = 550e12
    inside: float = 350e9
    between: float = 45e9


@dataclasses.dataclass(frozen=True)
class ContextShape:
    """Sizes of one attention call on a device. length: of the whole sequence. travelling: elements
    per token of a key/value head (of latents: of all), where `kv_heads` is 1. head_size: elements
    of a query and of a value together."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    travelling: int
    head_size: int
    bytes: int
    context: int
    tensor: int
    of_each_head: bool = True

    @property
    def half(self) -> int:
        return self.length // (2 * self.context)


def inner_size(strategy: ContextStrategy, shape: ContextShape) -> int:
    """Number of neighbours that exchange heads, at least 1. ValueError if heads do not divide."""
    inner = {"exchange": shape.context, "hierarchy": strategy.inner}.get(strategy.name, 1)
    inner = inner or inner_of(shape.context, shape.tensor, shape.heads * shape.tensor)
    if inner < 1 or shape.heads % inner:
        raise ValueError(
            f"context strategy {strategy.name}: {shape.heads} query heads of a device cannot be "
            f"divided among {inner or 'several'} of {shape.context} devices along context: use ring"
        )
    return inner


def chosen(
    strategy: ContextStrategy, shape: ContextShape, spec: ScoreSpec, rates: Rates | None = None
) -> tuple[ContextStrategy, str]:
    """(the strategy that an attention call uses, why "auto" chose it)."""
    if strategy.name != "auto":
        return strategy, ""
    if halo_of(spec, shape.half) is not None:
        return ContextStrategy("ring"), "each chunk reads only its window"
    names = ["ring"] + ["exchange"] * (shape.heads % shape.context == 0)
    spans_nodes = shape.context * shape.tensor > GPUS_A_NODE
    if spans_nodes and inner_of(shape.context, shape.tensor, shape.heads * shape.tensor):
        names.append("hierarchy")
    seconds = {
        name: exposed_seconds(ContextStrategy(name), shape, spec, rates or Rates())
        for name in names
    }
    best = min(names, key=lambda name: seconds[name])
    each = ", ".join(f"{name} {1e3 * seconds[name]:.3g}" for name in names)
    return ContextStrategy(best), f"milliseconds exposed in a layer's forward: {each}"


def halo_of(spec: ScoreSpec, half: int) -> int | None:
    """Number of tokens before a half that its queries see, rounded up to an even one for cuDNN;
    None: more than a half."""
    if spec.chunk and half % spec.chunk == 0:
        return 0
    even = spec.window - spec.window % 2
    return even if spec.window and spec.causal and even <= half else None


def exposed_seconds(
    strategy: ContextStrategy, shape: ContextShape, spec: ScoreSpec, rates: Rates
) -> float:
    """Seconds of communication in a layer's forward that no attention hides."""

    def seconds(size: float, reach: int) -> float:
        """`reach`: number of consecutive devices that a transfer spans."""
        return size / (rates.inside if reach <= GPUS_A_NODE else rates.between)

    context, inner = shape.context, inner_size(strategy, shape)
    tokens = shape.rows * shape.length / context
    reach = context * shape.tensor
    if strategy.name == "gather":
        return seconds((context - 1) * tokens * travelling(shape), reach)
    exchanged = 0.0
    if inner > 1:
        sent = tokens * shape.heads * shape.head_size * shape.bytes * (inner - 1) / inner
        sent += kv_exchanged(shape, inner) * tokens
        exchanged = seconds(sent, inner * shape.tensor)
    ring = context // inner
    if ring == 1:
        return exchanged
    pieces = travelling(shape, inner) * tokens * inner
    if halo_of(spec, shape.half * inner) is not None:
        return exchanged + seconds(2 * shape.rows * spec.window * travelling(shape, inner), reach)
    pairs = 2 * shape.rows * (shape.length / (2 * ring)) ** 2  # of queries and keys in a round
    attention = 2 * pairs * shape.heads / inner * shape.head_size / rates.flops
    return exchanged + (ring - 1) * max(seconds(pieces, reach) - attention, 0)


def travelling(shape: ContextShape, inner: int = 1) -> float:
    """Bytes per token of keys and values, of 1 / inner of the heads."""
    heads = shape.kv_heads
    if shape.of_each_head and inner > 1:
        heads = repeated(heads, inner) / inner
    return heads * shape.travelling * shape.bytes


def kv_exchanged(shape: ContextShape, inner: int) -> float:
    """Bytes per token that an exchange of keys and values, or a gather of latents, sends."""
    if not shape.of_each_head:
        return travelling(shape) * (inner - 1)
    heads = repeated(shape.kv_heads, inner)
    return heads * shape.travelling * shape.bytes * (inner - 1) / inner


def repeated(heads: int, count: int) -> int:
    """The smallest multiple of a number of key/value heads that is divisible by `count`."""
    return next(n for n in range(heads, heads * count + 1, heads) if n % count == 0)
