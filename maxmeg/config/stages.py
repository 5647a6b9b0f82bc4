"""The number of layers of each pipeline chunk. No JAX."""

import itertools
from collections.abc import Sequence

from maxmeg.config.layers import stage_layers
from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.setting import with_fields


def units_of_chunks(
    model: ModelConfig, parallel: ParallelConfig, costs: Sequence[int] = ()
) -> tuple[int, ...]:
    """Number of units (see `ModelConfig.groups`) of every chunk in model order.

    costs: of a unit of each group (`models.mixers.unit_costs`); empty: its number of layers. Where
    units differ and no setting divides them, the most expensive chunk is as cheap as possible.
    Chunk c lies on stage c % pipe. Raises ValueError, with the nearest choices, where the units
    cannot be divided among the chunks.
    """
    if parallel.pipe == 1:  # the stages that a hybrid string names do not matter
        return _counts(parallel, model.num_units)
    sizes = [len(unit) for unit, _ in model.groups]
    balanced = is_balanced(model, parallel)
    unequal = any(size != sizes[0] for size in sizes[:-1]) or sizes[-1] > sizes[0]
    if unequal and not balanced:
        raise ValueError(
            f"model.layers={model.layers!r} repeats units of {', '.join(map(str, sizes))} layers, "
            f"which parallel.pipe={parallel.pipe} cannot divide among stages: choose a pattern "
            "that repeats from the first layer on, pipe=1, or no chunk_layers, pad_layers, '|' and "
            "first/last_stage_layers: then the costs of the layers decide"
        )
    named = stage_layers(model.layers)
    if named:
        parallel = _with_chunks(parallel, named, sizes[0], model.layers)
    try:
        if balanced:
            pairs = zip(costs or sizes, model.groups, strict=True)
            return _balanced([cost for cost, (_, times) in pairs for _ in range(times)], parallel)
        return _counts(parallel, model.num_units)
    except ValueError as error:
        if sizes[0] == 1:
            raise
        raise ValueError(
            f"{error}. Here model.layers={model.layers!r} repeats units of {sizes[0]} layers, "
            f"which stages do not cut: model.num_layers={model.num_layers} layers are "
            f"{model.num_units} units"
        ) from None


def is_balanced(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether the costs of the units decide how many of them each chunk has."""
    named = parallel.chunk_layers or parallel.first_stage_layers or parallel.last_stage_layers
    named = named or parallel.pad_layers or stage_layers(model.layers)
    return parallel.pipe > 1 and len(model.groups) > 1 and not named


def _balanced(costs: Sequence[int], parallel: ParallelConfig) -> tuple[int, ...]:
    """Equal numbers of units where no other ones have a cheaper most expensive chunk."""
    count, chunks = len(costs), parallel.pipe * parallel.chunks
    if chunks > count:
        return _counts(parallel, count)  # its error
    sums = (0, *itertools.accumulate(costs))
    # Of the first `end` units in so many chunks: (largest cost, sum of squares, units of chunks).
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for chunk in range(1, chunks + 1):
        best = {
            end: min(
                (max(most, cost), squares + cost**2, (*units, end - start))
                for start, (most, squares, units) in best.items()
                if start < end
                for cost in [sums[end] - sums[start]]
            )
            for end in range(chunk, count - chunks + chunk + 1)
        }
    most, _, units = best[count]
    each = count // chunks
    even = [sums[start + each] - sums[start] for start in range(0, each * chunks, each)]
    return (each,) * chunks if count % chunks == 0 and max(even) == most else units


def _with_chunks(
    parallel: ParallelConfig, named: tuple[int, ...], unit: int, pattern: str
) -> ParallelConfig:
    """`parallel` with the chunks that a hybrid string names by `|`, in units of `unit` layers."""
    chunks = parallel.pipe * parallel.chunks
    if len(named) != chunks:
        raise ValueError(
            f"model.layers={pattern!r} names {len(named)} pipeline chunks by '|', and "
            f"parallel.pipe={parallel.pipe} x chunks={parallel.chunks} are {chunks}: make them "
            "equal"
        )
    if parallel.chunk_layers or any(count % unit for count in named):
        raise ValueError(
            f"model.layers={pattern!r} names chunks of {named} layers by '|': leave "
            f"parallel.chunk_layers={parallel.chunk_layers} out, and put '|' after a multiple of "
            f"{unit} layers"
        )
    return with_fields(parallel, {"chunk_layers": tuple(count // unit for count in named)})


def _counts(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    stages, chunks = parallel.pipe, parallel.pipe * parallel.chunks
    named = (parallel.first_stage_layers, parallel.last_stage_layers)
    ways = [bool(parallel.chunk_layers), any(named), parallel.pad_layers]
    if sum(ways) > 1:
        raise ValueError(
            f"parallel.chunk_layers={parallel.chunk_layers}, first/last_stage_layers={named} and "
            f"pad_layers={parallel.pad_layers} say it twice: set one of the three"
        )
    if chunks > num_layers:
        raise ValueError(
            f"model.num_layers={num_layers} cannot fill parallel.pipe={stages} x "
            f"chunks={parallel.chunks} = {chunks} chunks: choose at most {num_layers}"
        )
    if parallel.chunk_layers:
        return _explicit(parallel, num_layers)
    if any(named):
        return _first_and_last(parallel, num_layers)
    each, left = divmod(num_layers, chunks)
    if left and not parallel.pad_layers:
        fitting = ", ".join(str(n) for n in range(1, num_layers + 1) if num_layers % n == 0)
        raise ValueError(
            f"model.num_layers={num_layers} is not divisible by parallel.pipe={stages} x "
            f"chunks={parallel.chunks} = {chunks}: choose a product in {fitting}; or set "
            "pad_layers=True, first_stage_layers / last_stage_layers, or chunk_layers"
        )
    return (each + 1,) * left + (each,) * (chunks - left)


def _explicit(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    counts, chunks = parallel.chunk_layers, parallel.pipe * parallel.chunks
    if len(counts) != chunks or min(counts) < 1 or sum(counts) != num_layers:
        raise ValueError(
            f"parallel.chunk_layers={counts} must be {chunks} (pipe x chunks) positive numbers "
            f"with the sum model.num_layers={num_layers}; they are {len(counts)} with the sum "
            f"{sum(counts)}"
        )
    return counts


def _first_and_last(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    """Megatron-LM's uneven pipeline: the stages between the named ones share what is left."""
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    stages, chunks = parallel.pipe, parallel.chunks
    between = stages - bool(first) - bool(last)
    left = num_layers - first - last
    parts = max(between * chunks, 1)
    fits = between >= 0 and min(first, last) >= 0 and left >= (between > 0) and left % parts == 0
    if not fits or first % chunks or last % chunks or (between == 0 and left):
        raise ValueError(
            f"model.num_layers={num_layers} less first_stage_layers={first} and "
            f"last_stage_layers={last} leaves {left} for {max(between, 0)} stages of {chunks} "
            "chunks: these, and both numbers, must divide by the chunks; change them, or set "
            "chunk_layers"
        )
    middle = left // parts
    of_stage = [middle * chunks] * stages
    if first:
        of_stage[0] = first
    if last:
        of_stage[-1] = last
    return tuple(count // chunks for count in of_stage) * chunks
