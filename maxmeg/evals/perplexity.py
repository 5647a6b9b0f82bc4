"""Mean loss of a model over batches of a split."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxmeg.data.placement import LocalRows, place_batch


class MeanLoss(NamedTuple):
    """Cross entropy in nats per token and, if the tokenizer gives bytes per token, per byte.

    Bytes are counted over the targets' text: the end of a document has a loss but no bytes. With a
    classifier, tokens are texts, words or questions; accuracy is the share that is predicted right,
    and confusion [C, C] their numbers by class (rows) and by predicted class.
    """

    per_token: float
    per_byte: float | None
    tokens: float
    accuracy: float | None = None
    confusion: np.ndarray | None = None


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
    names = ("loss_sum", "tokens", "bytes", "right")
    nats, tokens, num_bytes, right = (
        sum(float(part.get(name, 0)) for part in sums) for name in names
    )
    loss = MeanLoss(nats / (tokens or 1.0), nats / num_bytes if num_bytes else None, tokens)
    if not (sums and "right" in sums[0]):
        return loss
    tables = [np.asarray(part["confusion"], int) for part in sums if "confusion" in part]
    table = np.sum(tables, axis=0) if tables else None
    return loss._replace(accuracy=right / max(tokens, 1.0), confusion=table)


def accuracy_lines(loss: MeanLoss, split: str, classes: Sequence[str]) -> list[str]:
    """Return what a classifier got right: accuracy, and by class precision, recall and F1, with
    Matthews' correlation of two classes."""
    words = f"{split} accuracy {100 * (loss.accuracy or 0):.2f} % of {loss.tokens:,.0f}, loss "
    lines = [f"{words}{loss.per_token:.4f} nats"]
    if loss.confusion is None:
        return lines
    table = loss.confusion.astype(float)
    right, true, predictions = np.diag(table), table.sum(axis=1), table.sum(axis=0)
    for name, *numbers in zip(classes, right, true, predictions, strict=True):
        hits, actual, predicted = numbers
        precision, recall = (hits / max(total, 1) for total in (predicted, actual))
        score = 2 * hits / max(predicted + actual, 1)
        rates = f"precision {precision:.4f}, recall {recall:.4f}, F1 {score:.4f}"
        lines.append(f"{name}: {rates} ({actual:,.0f})")
    if len(classes) == 2:
        scale = np.sqrt(np.prod(true) * np.prod(predictions))
        matthews = np.linalg.det(table) / scale if scale else 0.0
        lines.append(f"Matthews correlation {matthews:.4f}")
    return lines


def validation_metrics(losses: Mapping[str, MeanLoss]) -> dict[str, float]:
    """Return validation metrics: the mean over the validation sets, and the loss of each set."""
    metrics, fields = {}, {"loss": 0, "loss_per_byte": 1, "accuracy": 3}
    for metric, field in ((f"validation_{name}", field) for name, field in fields.items()):
        values: dict[str, Any] = {
            name: value for name, loss in losses.items() if (value := loss[field]) is not None
        }
        if values:
            metrics[metric] = float(np.mean([*values.values()]))
            metrics |= {f"{metric}/{name}": value for name, value in values.items() if name}
    return metrics
