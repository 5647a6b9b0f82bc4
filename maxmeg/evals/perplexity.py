"""Mean loss of a model over batches of a split."""

from collections.abc import Callable, Iterable

import numpy as np
from jax.sharding import Mesh

from maxmeg.parallel.placement import LocalRows, place_batch


def mean_loss(
    eval_step: Callable,
    model,
    batches: Iterable[dict[str, np.ndarray]],
    mesh: Mesh,
    batch_size: int,
    rows: LocalRows,
) -> tuple[float, float]:
    """(cross entropy in nats a token, number of tokens) over global batches of `batch_size`.

    Each batch holds `rows`, this process's; they say how many microbatches it is cut into.
    """
    sums = [eval_step(model, place_batch(batch, rows, mesh, batch_size)) for batch in batches]
    tokens = sum(float(part["tokens"]) for part in sums)
    return sum(float(part["loss_sum"]) for part in sums) / max(tokens, 1.0), tokens
