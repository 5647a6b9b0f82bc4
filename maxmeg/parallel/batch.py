"""The arrays of one training or evaluation step."""

import dataclasses
import typing

import jax
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.mesh import BATCH_AXES, CONTEXT_AXES

NO_TARGETS = 1e-20  # divisor of the loss where the sum of the mask is less, because it is 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Arrays [M, B, L] of M microbatches of B rows of L tokens; [B, L] of one microbatch.

    loss_mask: weight of each target in the loss. positions: of each token in its document.
    segment_ids: document of each token, 0 for padding; None if all tokens of a row may attend to
    each other. chunks [M, B, C]: numbers of this device's chunks of each row; None: Megatron-LM's
    order (parallel.sequence). extra: further arrays of the dataset, by name, for some objectives.
    The step sets the other fields. rows [M, B]: index of each row in the global batch. divisors
    [M, losses]: divisor of each loss of the objective. microbatch_weight [M]: weight of each
    microbatch in means over microbatches. max_targets: largest number of targets in a row.
    """

    tokens: jax.Array
    targets: jax.Array
    positions: jax.Array
    loss_mask: jax.Array
    segment_ids: jax.Array | None = None
    chunks: jax.Array | None = None
    extra: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    rows: typing.Any = None
    divisors: typing.Any = None
    microbatch_weight: typing.Any = None
    max_targets: int = dataclasses.field(default=0, metadata={"static": True})

    @classmethod
    def of(cls, arrays: dict[str, typing.Any]) -> "Batch":
        """The batch with a dataset's arrays, by name."""
        names = {field.name for field in dataclasses.fields(cls)}
        fields = {name: array for name, array in arrays.items() if name in names}
        extra = {name: array for name, array in arrays.items() if name not in names}
        return cls(**fields, extra=extra)


def batch_spec(num_dims: int) -> P:
    """PartitionSpec of a batch array [microbatch, sample, token, ...] of `num_dims` dimensions:
    samples are sharded over the batch axes, tokens over context."""
    return P(*(None, BATCH_AXES, CONTEXT_AXES)[:num_dims])
