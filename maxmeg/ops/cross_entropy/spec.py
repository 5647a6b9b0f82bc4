"""Options of linear cross entropy, and functions that its backends share."""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import VOCAB_AXES

MASKED = -1e30  # logit of a padded vocabulary entry
NO_WORD = -1  # a target outside of the vocabulary


@dataclasses.dataclass(frozen=True)
class CrossEntropySpec:
    """vocab_size: without padding. z_loss: coefficient of logsumexp^2. chunk: number of tokens
    whose logits exist at a time (backend xla). softcap, label_smoothing 0: off.

    With logits z of K words, target t and label smoothing a, the loss of a token is Megatron-LM's

        logsumexp(z) - (1 - s) z_t - s mean(z),  s = a K / (K - 1),

    which gives the target probability 1 - a and every other word a / (K - 1). K is the unpadded
    vocabulary; Megatron-LM uses a rank's part of it, so that its result depends on the ranks.
    """

    vocab_size: int
    z_loss: float = 0.0
    softcap: float = 0.0
    chunk: int = 2048
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        for name, lowest in (("vocab_size", 1), ("chunk", 1), ("z_loss", 0), ("softcap", 0)):
            if not getattr(self, name) >= lowest:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {lowest}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must lie in [0, 1)")

    @property
    def smoothing(self) -> float:
        """s of the formula."""
        return self.label_smoothing * self.vocab_size / max(self.vocab_size - 1, 1)

    @property
    def uniform(self) -> float:
        """s / K, the weight of each word's logit."""
        return self.smoothing / self.vocab_size


def softcapped(logits: jax.Array, softcap: float) -> jax.Array:
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def slope_of_softcap(capped: jax.Array, softcap: float) -> jax.Array:
    return 1 - jnp.square(capped / softcap)


def first_word(w_VD: jax.Array) -> jax.Array | int:
    """Index of the first word of this device's part of the vocabulary."""
    return collectives.first_index(VOCAB_AXES, w_VD.shape[0])


def known_targets(targets_T: jax.Array, spec: CrossEntropySpec) -> jax.Array:
    return jnp.where((targets_T >= 0) & (targets_T < spec.vocab_size), targets_T, NO_WORD)


class Partial(typing.NamedTuple):
    """Statistics of each token over a part of the vocabulary: largest logit, sum of exp(logit -
    largest), the target's logit and, with label smoothing, the sum of logits."""

    largest_T: jax.Array
    total_T: jax.Array
    target_T: jax.Array
    logits_T: jax.Array | None


def combined(partial: Partial, spec: CrossEntropySpec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(log-sum-exp, target's logit, sum of logits) over the whole vocabulary, on all devices."""
    largest_T = collectives.max_over(partial.largest_T, VOCAB_AXES)
    sums: list = [partial.total_T * jnp.exp(partial.largest_T - largest_T), partial.target_T]
    sums += [partial.logits_T] if spec.smoothing else []
    total_T, target_T, *logits_T = collectives.sum_over(sums, VOCAB_AXES)
    logsumexp_T = jnp.log(total_T) + largest_T
    return logsumexp_T, target_T, logits_T[0] if logits_T else jnp.zeros_like(total_T)


def losses(logsumexp_T, target_T, sum_T, weights_T, spec: CrossEntropySpec):
    """(sum of weighted losses, cross entropy of each token); sum_T: sum of the logits."""
    loss_T = logsumexp_T - (1 - spec.smoothing) * target_T
    if spec.smoothing:
        loss_T -= spec.uniform * sum_T
    loss_T += spec.z_loss * jnp.square(logsumexp_T)
    weighted_T = jnp.where(weights_T == 0, 0, weights_T * loss_T)
    return jnp.sum(weighted_T), logsumexp_T - target_T


def check_shapes(h_TD, w_VD, targets_T, weights_T) -> None:
    """ValueError if the shapes or dtypes of a call do not match."""
    T, D = h_TD.shape
    if w_VD.shape[1:] != (D,) or targets_T.shape != (T,) or weights_T.shape != (T,):
        others = f"targets {targets_T.shape}, weights {weights_T.shape}"
        raise ValueError(
            f"h {h_TD.shape}, w {w_VD.shape}, {others} are not [T, D], [V, D], [T], [T]"
        )
    if h_TD.dtype != w_VD.dtype:
        raise ValueError(f"h is {h_TD.dtype} and w is {w_VD.dtype}: cast one to the other's dtype")
