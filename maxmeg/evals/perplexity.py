"""Mean loss of a model over batches of a split."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxmeg.parallel.placement import LocalRows, place_batch


class MeanLoss(NamedTuple):
    """Cross entropy in nats per token and, if the tokenizer gives bytes per token, per byte.

    Bytes are counted over the targets' text: the end of a document has a loss but no bytes.
    """

    per_token: float
    per_byte: float | None
    tokens: float


class StopRequested(Exception):
    """A process of the run was asked to stop while it evaluated."""


def mean_loss(
    eval_step: Callable,
    model,
    batches: Iterable[dict[str, np.ndarray]],
    mesh: Mesh,
    batch_size: int,
    rows: LocalRows,
    stop: Callable[[], jax.Array | None] = lambda: None,
) -> MeanLoss:
    """Return the mean loss over global batches of `batch_size`.

    Each batch holds the `rows` of this process. stop: returns one stop flag per device before each
    batch. Raises StopRequested on all processes once any device's flag is set.
    """
    sums = []
    for batch in batches:
        sums.append(eval_step(model, place_batch(batch, rows, mesh, batch_size), stop()))
        if len(sums) > 1:  # the newest batch is still running
            previous = jax.block_until_ready(sums[-2])
            if previous.get("stop", 0) > 0:
                raise StopRequested
    nats, tokens, num_bytes = (
        sum(float(part.get(name, 0)) for part in sums) for name in ("loss_sum", "tokens", "bytes")
    )
    return MeanLoss(nats / max(tokens, 1.0), nats / num_bytes if num_bytes else None, tokens)


def validation_metrics(losses: Mapping[str, MeanLoss]) -> dict[str, float]:
    """Return validation metrics: the mean over the validation sets, and the loss of each set."""
    metrics = {}
    for metric, field in (("validation_loss", 0), ("validation_loss_per_byte", 1)):
        values = {
            name: value for name, loss in losses.items() if (value := loss[field]) is not None
        }
        if values:
            metrics[metric] = float(np.mean([*values.values()]))
            metrics |= {f"{metric}/{name}": value for name, value in values.items() if name}
    return metrics
