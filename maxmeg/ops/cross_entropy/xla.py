"""Linear + cross entropy in plain XLA over chunks of tokens: the reference, on every device.

Only the logits of one chunk exist at a time. Forward computes each chunk's gradients along with its
logits (as Liger Kernel does): three matrix products in all. Backward only scales them. The weight's
gradient is one product over all tokens if the logits' gradient takes no more memory than a float32
sum of the weight's gradient; otherwise such a sum is read and written for each chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.ops.backend import Device
from maxmeg.ops.cross_entropy.spec import (
    MASKED,
    CrossEntropySpec,
    first_word,
    known_targets,
    losses,
    slope_of_softcap,
    softcapped,
)
from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import VOCAB_AXES
from maxmeg.parallel.ordering import together, zeros_after

DTYPES = ("bfloat16", "float16", "float32", "float64")
SUPPORTS = f"every option, on every device, in {', '.join(DTYPES)}"


def refuses(h_TD, w_VD, targets_T, weights_T, spec: CrossEntropySpec, device: Device) -> str:
    """Why this call cannot run; empty if it can."""
    if h_TD.dtype not in DTYPES:
        return f"dtype {h_TD.dtype} is not one of {', '.join(DTYPES)}"
    return ""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def linear_cross_entropy(h_TD, w_VD, targets_T, weights_T, spec: CrossEntropySpec):
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


def multiplies_once(tokens: int, width: int, itemsize: int) -> bool:
    """Whether the gradient of the weight [V, width] is one product over all tokens: e T <= 4 D."""
    return itemsize * tokens <= 4 * width


def over_chunks(h_TD, w_VD, targets_T, weights_T, spec: CrossEntropySpec, gradients: bool):
    """[loss, token losses], and with gradients [loss, token losses, dh, dw]."""
    T = h_TD.shape[0]
    once = gradients and multiplies_once(T, h_TD.shape[1], h_TD.dtype.itemsize)
    run = functools.partial(one_chunk, spec=spec, gradients=gradients, stores=once)
    targets_T = known_targets(targets_T, spec)
    if spec.chunk >= T:
        sums, rows = run(h_TD, w_VD, targets_T, weights_T)
    else:
        num_chunks = -(-T // spec.chunk)
        size = -(-T // num_chunks)  # chunks of equal size, the last padded with weight 0

        def split(x):
            padded = jnp.pad(x, [(0, num_chunks * size - T)] + [(0, 0)] * (x.ndim - 1))
            return padded.reshape(num_chunks, size, *x.shape[1:])

        def body(carry, chunk):
            i, total, stored = carry
            sums, rows = run(chunk[0], w_VD, *chunk[1:])
            put = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
            return (
                i + 1,
                jax.tree.map(jnp.add, total, sums),
                jax.tree.map(put, stored, rows),
            ), None

        chunks = (split(h_TD), split(targets_T), split(weights_T))
        zeros = [jnp.zeros((), jnp.float32)]
        zeros += [zeros_after(h_TD, w_VD.shape)] if gradients and not once else []
        rows = jax.eval_shape(lambda c: run(c[0][0], w_VD, c[1][0], c[2][0])[1], chunks)
        stored = [zeros_after(h_TD, (num_chunks, *r.shape), r.dtype) for r in rows]
        (_, sums, rows), _ = lax.scan(body, (0, zeros, stored), chunks)
        rows = [row.reshape(-1, *row.shape[2:])[:T] for row in rows]
    if not gradients:
        return [sums[0], rows[0]]
    dh_TD, dw_VD = products(rows[1], h_TD, w_VD) if once else (rows[1], sums[1])
    return [sums[0], rows[0], dh_TD, dw_VD.astype(w_VD.dtype)]


def one_chunk(
    h_TD, w_VD, targets_T, weights_T, *, spec: CrossEntropySpec, gradients: bool, stores: bool
):
    """Sums [loss, dw] and rows [token losses, dh] of one chunk of tokens.

    stores: instead of dw and dh, the gradient of the logits is one of the rows.
    """
    raw_TV = jnp.einsum("TD,VD->TV", h_TD, w_VD, preferred_element_type=jnp.float32)
    ids_V = first_word(w_VD) + jnp.arange(w_VD.shape[0])
    real_V = ids_V < spec.vocab_size
    capped_TV = softcapped(raw_TV, spec.softcap)
    logits_TV = jnp.where(real_V, capped_TV, MASKED)
    largest_T = collectives.max_over(jnp.max(logits_TV, axis=-1), VOCAB_AXES)
    hit_TV = ids_V[None] == targets_T[:, None]
    total_T = jnp.sum(jnp.exp(logits_TV - largest_T[:, None]), axis=-1)
    partial = [total_T, jnp.sum(jnp.where(hit_TV, logits_TV, 0.0), axis=-1)]
    if spec.smoothing:
        partial.append(jnp.sum(jnp.where(real_V, capped_TV, 0.0), axis=-1))
    total_T, target_T, *sum_T = collectives.sum_over(partial, VOCAB_AXES)
    logsumexp_T = jnp.log(total_T) + largest_T
    loss, token_loss_T = losses(logsumexp_T, target_T, sum_T[0] if sum_T else 0.0, weights_T, spec)
    if not gradients:
        return [loss], [token_loss_T]
    weights_T1 = weights_T[:, None]
    slope_T = (1 + 2 * spec.z_loss * logsumexp_T) / total_T
    # Not the exponentials above: XLA for B200s would store them, as many bytes as the logits.
    barrier_T = together(largest_T)
    exp_TV = jnp.exp(logits_TV - barrier_T[:, None])
    d_TV = exp_TV * slope_T[:, None] - jnp.where(hit_TV, 1 - spec.smoothing, 0.0)
    if spec.smoothing:
        d_TV -= jnp.where(real_V, spec.uniform, 0.0)
    if spec.softcap:
        d_TV *= slope_of_softcap(capped_TV, spec.softcap)
    d_TV = jnp.where(weights_T1 == 0, 0, d_TV * weights_T1).astype(h_TD.dtype)
    if stores:
        return [loss], [token_loss_T, d_TV]
    dh_TD, dw_VD = products(d_TV, h_TD, w_VD)
    return [loss, dw_VD], [token_loss_T, dh_TD]


def products(d_TV, h_TD, w_VD):
    """dh in the dtype of h, dw in float32."""
    dh_TD = jnp.einsum("TV,VD->TD", d_TV, w_VD, preferred_element_type=jnp.float32)
    dw_VD = jnp.einsum("TV,TD->VD", d_TV, h_TD, preferred_element_type=jnp.float32)
    return dh_TD.astype(h_TD.dtype), dw_VD
