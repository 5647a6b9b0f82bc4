"""Output projection and cross entropy in one, over chunks of tokens, vocabulary-parallel.

Logits of more than one chunk never exist, neither in forward nor in backward: each chunk's
gradients are made while its logits are there (as Liger Kernel does), so backward only scales.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import VOCAB_AXES

MASKED = -1e30  # logit of a padded vocabulary entry


@dataclasses.dataclass(frozen=True)
class CrossEntropySpec:
    """vocab_size without padding; z_loss weighs logsumexp^2; chunk in tokens; softcap 0: off."""

    vocab_size: int
    z_loss: float = 0.0
    softcap: float = 0.0
    chunk: int = 2048


def softcapped(logits: jax.Array, softcap: float) -> jax.Array:
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def linear_cross_entropy(
    h_TD: Float[Array, "T D"],
    w_VD: Float[Array, "V D"],
    targets_T: Int[Array, " T"],
    weights_T: Float[Array, " T"],
    spec: CrossEntropySpec,
) -> tuple[Float[Array, ""], Float[Array, " T"]]:
    """Sum of weights * (cross entropy + z_loss * logsumexp^2), and each token's cross entropy.

    w_VD is this device's part of the vocabulary (over pipe and tensor); tokens are the same on
    every device of those axes, and so are the results. Only the sum has a gradient, with respect
    to h (partial sums over the vocabulary's axes) and w; float32 inside.
    """
    loss, token_loss = over_chunks(h_TD, w_VD, targets_T, weights_T, spec, gradients=False)
    return loss, token_loss


def forward(h_TD, w_VD, targets_T, weights_T, spec):
    loss, token_loss, dh_TD, dw_VD = over_chunks(
        h_TD, w_VD, targets_T, weights_T, spec, gradients=True
    )
    return (loss, token_loss), (dh_TD, dw_VD)


def backward(_, residuals, cotangents):
    dh_TD, dw_VD = residuals
    scale = cotangents[0]
    return (dh_TD * scale.astype(dh_TD.dtype), dw_VD * scale.astype(dw_VD.dtype), None, None)


linear_cross_entropy.defvjp(forward, backward)


def over_chunks(h_TD, w_VD, targets_T, weights_T, spec: CrossEntropySpec, gradients: bool):
    """(loss, token losses) and, with gradients, dh and dw behind them."""
    T = h_TD.shape[0]
    one = functools.partial(one_chunk, spec=spec, gradients=gradients)
    if spec.chunk >= T:
        sums, rows = one(h_TD, w_VD, targets_T, weights_T)
    else:
        num_chunks = -(-T // spec.chunk)
        size = -(-T // num_chunks)  # chunks of equal size, the last padded with weight 0

        def cut(x):
            padded = jnp.pad(x, [(0, num_chunks * size - T)] + [(0, 0)] * (x.ndim - 1))
            return padded.reshape(num_chunks, size, *x.shape[1:])

        def body(total, chunk):
            sums, rows = one(chunk[0], w_VD, *chunk[1:])
            return jax.tree.map(jnp.add, total, sums), rows

        chunks = (cut(h_TD), cut(targets_T), cut(weights_T))
        zeros = [jnp.zeros((), jnp.float32)]
        zeros += [jnp.zeros(w_VD.shape, jnp.float32)] if gradients else []
        sums, rows = lax.scan(body, zeros, chunks)
        rows = [row.reshape(-1, *row.shape[2:])[:T] for row in rows]
    if not gradients:
        return [sums[0], rows[0]]
    return [sums[0], rows[0], rows[1], sums[1].astype(w_VD.dtype)]


def one_chunk(h_TD, w_VD, targets_T, weights_T, *, spec: CrossEntropySpec, gradients: bool):
    """Over the tokens of one chunk: sums [loss, dw] and rows [token losses, dh]."""
    V = w_VD.shape[0]
    raw_TV = jnp.einsum("TD,VD->TV", h_TD, w_VD, preferred_element_type=jnp.float32)
    ids_V = collectives.axis_index(VOCAB_AXES) * V + jnp.arange(V)
    capped_TV = softcapped(raw_TV, spec.softcap)
    logits_TV = jnp.where(ids_V < spec.vocab_size, capped_TV, MASKED)
    largest_T = collectives.max_over(jnp.max(logits_TV, axis=-1), VOCAB_AXES)
    exp_TV = jnp.exp(logits_TV - largest_T[:, None])
    hit_TV = ids_V[None] == targets_T[:, None]
    partial = (jnp.sum(exp_TV, axis=-1), jnp.sum(jnp.where(hit_TV, logits_TV, 0.0), axis=-1))
    total_T, target_T = collectives.sum_over(partial, VOCAB_AXES)
    logsumexp_T = jnp.log(total_T) + largest_T
    token_loss_T = logsumexp_T - target_T
    loss = jnp.sum(weights_T * (token_loss_T + spec.z_loss * jnp.square(logsumexp_T)))
    if not gradients:
        return [loss], [token_loss_T]
    slope_T = (1 + 2 * spec.z_loss * logsumexp_T) / total_T
    d_TV = exp_TV * (weights_T * slope_T)[:, None] - jnp.where(hit_TV, weights_T[:, None], 0.0)
    if spec.softcap:
        d_TV *= 1 - jnp.square(capped_TV / spec.softcap)
    d_TV = d_TV.astype(h_TD.dtype)
    dh_TD = jnp.einsum("TV,VD->TD", d_TV, w_VD, preferred_element_type=jnp.float32)
    dw_VD = jnp.einsum("TV,TD->VD", d_TV, h_TD, preferred_element_type=jnp.float32)
    return [loss, dw_VD], [token_loss_T, dh_TD.astype(h_TD.dtype)]
