"""How many layers each chunk of a pipeline holds. No JAX."""

from maxmeg.config.schema import ParallelConfig


def layers_of_chunks(
    parallel: ParallelConfig, num_layers: int, layers_of_unit: int = 1
) -> tuple[int, ...]:
    """Layers of every chunk in model order: chunk c lies on stage c % pipe.

    Where kinds of layers alternate, units of `layers_of_unit` layers (the last may have fewer) take
    the place of layers. ValueError, with the choices, where they do not divide and nothing says
    how to.
    """
    try:
        return _counts(parallel, -(-num_layers // layers_of_unit))
    except ValueError as error:
        if layers_of_unit == 1:
            raise
        raise ValueError(
            f"{error}. Here each layer is a unit of {layers_of_unit}, which a pipeline does not "
            "cut: model.attention_global_every, expert_every or expert_pattern makes it so"
        ) from None


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
