"""Strategies of context parallelism, by kind of layer, and their rules. No JAX."""

import math
from collections.abc import Iterator

from maxmeg.config.hints import nearest_few
from maxmeg.config.layers import SHARED
from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.setting import divisors

STRATEGIES = ("auto", "ring", "exchange", "hierarchy", "gather")
DELTA = ("gated_delta", "kda")
# Mixers that attend.
KINDS = ("attention", "local", "raw_attention", "nope_attention", "mla", "local_mla", *SHARED)


def strategy_of(parallel: ParallelConfig, mixer: str) -> str:
    """Return the strategy of a kind of layer; "auto" for one that is not named.

    Chunks whose owners are chosen by row are for "gather" alone.
    """
    named = strategies(parallel.context_strategy)
    if parallel.context_chunks:
        return "gather"
    return named.get(mixer, named.get("", "auto"))


def strategies(text: str) -> dict[str, str]:
    """Return the strategy by kind of layer; by "" one for all kinds."""
    words = [word.partition("=") for word in text.split(",")]
    return {
        kind.strip() if equals else "": name.strip()
        for kind, equals, name in (
            (left, equals, right if equals else left) for left, equals, right in words
        )
    }


def context_problems(
    model: ModelConfig, parallel: ParallelConfig, length: int, tensor: int
) -> Iterator[str]:
    """Yield the broken rules of sequences of `length` tokens that are cut over context."""
    context = parallel.context
    if context == 1:
        return
    chunks = parallel.context_chunks or 2
    unit = math.lcm(chunks * context, context * tensor)
    if length % unit:
        below = length // unit * unit
        nearest = f"{below} and {below + unit}" if below else f"{unit}"
        yield (
            f"data.sequence_length={length} cannot be cut over parallel.context={context} x "
            f"tensor={tensor}, where every device has {chunks} chunks: it must be a multiple of "
            f"{unit}, nearest {nearest}"
        )
    yield from strategy_problems(model, parallel, tensor)
    yield from owner_problems(model, parallel)
    chunk = length // (2 * context)
    for group, mixers in (("conv", ["conv"]), ("mamba", ["mamba"]), ("delta", DELTA)):
        kernel = getattr(model, group).kernel_size
        if model.has(*mixers) and kernel - 1 > chunk:
            yield (
                f"model.{group}.kernel_size={kernel} reads more than the {chunk} tokens of a chunk "
                f"before it, with data.sequence_length={length} and parallel.context={context}: "
                "reduce context"
            )


def owner_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield what stands against owners of chunks that are chosen by row."""
    if not (chunks := parallel.context_chunks):
        return
    others = set(strategies(parallel.context_strategy).values()) - {"auto", "gather"}
    if others:
        yield (
            f"parallel.context_chunks={chunks} is for context_strategy=gather, whose kernels skip "
            f"masked blocks, not for {', '.join(sorted(others))}: set one of them alone"
        )
    if model.has("conv", "mamba", *DELTA):
        yield (
            f"parallel.context_chunks={chunks} gives devices chunks that are not neighbours, and "
            f"model.layers={model.layers!r} has convolutions or states, which continue the tokens "
            "before a chunk: set context_chunks=0"
        )


def strategy_problems(model: ModelConfig, parallel: ParallelConfig, tensor: int) -> Iterator[str]:
    context, inner, heads = parallel.context, parallel.context_inner, model.attention.num_heads
    setting = f"parallel.context_strategy={parallel.context_strategy}"
    named, mixers = strategies(parallel.context_strategy), [k for k in KINDS if model.has(k)]
    for kind, name in named.items():
        if name not in STRATEGIES:
            yield (
                f"{setting}: {name!r} is not a strategy; nearest are "
                f"{nearest_few(name, STRATEGIES)}"
            )
        if kind and kind not in mixers:
            yield (
                f"{setting}: model.layers={model.layers!r} has no mixer {kind!r}; those that "
                f"attend are {', '.join(mixers) or 'none'}"
            )
    if inner and "hierarchy" not in named.values():
        yield (
            f"parallel.context_inner={inner} is for parallel.context_strategy=hierarchy: set that, "
            "or leave it out"
        )
    if inner and (context % inner or not 1 < inner < context):
        choices = [n for n in range(2, context) if context % n == 0]
        remedy = f"choose it in {', '.join(map(str, choices))}" if choices else "use a ring"
        yield (
            f"parallel.context_inner={inner} is no divisor of parallel.context={context} between "
            f"them: {remedy}"
        )
    elif "hierarchy" in named.values() and not inner and not inner_of(context, tensor, heads):
        yield (
            f"{setting}: no number of devices in a node, between 1 and parallel.context={context}, "
            f"divides it and the {heads // tensor} heads of a device along tensor: use a ring, or "
            "set context_inner"
        )
    exchanging = {"exchange": context, "hierarchy": inner}
    for name in named.values():
        count = exchanging.get(name, 0)
        if count and context % count == 0 and heads // tensor % count:
            yield (
                f"{setting}: the {heads // tensor} query heads of a device (model.attention."
                f"num_heads={heads}, parallel.tensor={tensor}) are not divisible by the {count} "
                f"devices that exchange them: use a ring, or as many devices as one of "
                f"{divisors(heads // tensor)}"
            )


def inner_of(context: int, tensor: int, heads: int, gpus_a_node: int = 8) -> int:
    """Return the number of neighbours inside a node that exchange heads in a hierarchy; 0: none.

    heads: of all devices along tensor.
    """
    most = min(context - 1, gpus_a_node // tensor)
    sizes = (n for n in range(most, 1, -1) if context % n == 0 and heads // tensor % n == 0)
    return next(sizes, 0)
