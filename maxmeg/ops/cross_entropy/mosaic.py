"""Linear + cross entropy by our kernels for Hopper (kernels/linear_cross_entropy.py).

Not yet run on a GPU (compiled only), and not chosen by "auto" until it has been measured. Forward
keeps the logits in registers and writes a few numbers per token. Backward computes the gradient of
the logits of a chunk of words in one kernel, from the log-sum-exp, and XLA multiplies it with w and
h: four matrix products in all. Memory: at most CHUNK elements of this gradient, the chunk's copy of
w, and the float32 gradient of h. Letter beside the legend's: C words of a chunk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.ops.backend import Device, kernel_module, refuses_hopper_kernels
from maxmeg.ops.cross_entropy.spec import (
    CrossEntropySpec,
    Partial,
    combined,
    first_word,
    known_targets,
    losses,
)
from maxmeg.parallel.ordering import together

SUPPORTS = "bfloat16 and float16 on Hopper GPUs, every option, widths and words in multiples of 64"
CHUNK = 2**27  # elements of the logits' gradient that exist at a time: 256 MiB in bfloat16
ROWS = 8  # tokens that TMA moves at once
MULTIPLE = 256  # words: columns of the kernel's tiles


def refuses(h_TD, w_VD, targets_T, weights_T, spec: CrossEntropySpec, device: Device) -> str:
    """Why the kernels cannot run this call; empty if they can."""
    if reason := refuses_hopper_kernels(device):
        return reason
    tokens = h_TD.shape[0] + -h_TD.shape[0] % ROWS
    h_TD = jax.ShapeDtypeStruct((tokens, h_TD.shape[1]), h_TD.dtype)
    return kernel_module("linear_cross_entropy").cross_entropy_refuses(h_TD, w_VD)


def linear_cross_entropy(h_TD, w_VD, targets_T, weights_T, spec: CrossEntropySpec):
    """(loss, token losses). Pads the tokens with weight 0 to whole blocks of the kernels."""
    T = h_TD.shape[0]
    if T % ROWS:
        h_TD = jnp.pad(h_TD, ((0, -T % ROWS), (0, 0)))
        targets_T, weights_T = (jnp.pad(x, (0, -T % ROWS)) for x in (targets_T, weights_T))
    outputs: Any = padded_cross_entropy(h_TD, w_VD, targets_T, weights_T, spec)
    return outputs[0], outputs[1][:T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def padded_cross_entropy(h_TD, w_VD, targets_T, weights_T, spec: CrossEntropySpec):
    return forward(h_TD, w_VD, targets_T, weights_T, spec)[0]


def forward(h_TD, w_VD, targets_T, weights_T, spec: CrossEntropySpec):
    kernels = kernel_module("linear_cross_entropy")
    targets_T = local_targets(targets_T, w_VD, spec)
    partial = kernels.statistics(h_TD, w_VD, targets_T, real_words(w_VD, spec), logits_of(spec))
    logsumexp_T, target_T, sum_T = combined(Partial(*partial), spec)
    result = losses(logsumexp_T, target_T, sum_T, weights_T, spec)
    return result, (h_TD, w_VD, targets_T, weights_T, logsumexp_T)


def backward(spec: CrossEntropySpec, residuals, cotangents):
    h_TD, w_VD, targets_T, weights_T, logsumexp_T = residuals
    kernels, real = kernel_module("linear_cross_entropy"), real_words(w_VD, spec)
    V, size = w_VD.shape[0], chunk_words(h_TD.shape[0], w_VD.shape[0])
    rows = (targets_T, weights_T * cotangents[0], logsumexp_T)

    def add(start, words: int, dh_TD, dw_VD):
        span = (real, jnp.asarray(start, jnp.int32), words)
        d_TC = kernels.logit_gradient(h_TD, w_VD, rows, span, logits_of(spec))
        w_CD = lax.dynamic_slice_in_dim(w_VD, start, words)
        dh_TD += jnp.einsum("TC,CD->TD", d_TC, w_CD, preferred_element_type=jnp.float32)
        dw_CD = jnp.einsum("TC,TD->CD", d_TC, h_TD, preferred_element_type=w_VD.dtype)
        return dh_TD, lax.dynamic_update_slice_in_dim(dw_VD, dw_CD, start, 0)

    sums = (jnp.zeros(h_TD.shape, jnp.float32), jnp.zeros_like(w_VD))
    sums = lax.fori_loop(0, V // size, lambda i, sums: add(i * size, size, *sums), sums)
    if V % size:
        # The barrier keeps XLA from computing this chunk's gradient first and storing it.
        rows, sums = together((rows, sums))
        sums = add(V - V % size, V % size, *sums)
    return sums[0].astype(h_TD.dtype), sums[1], None, None


padded_cross_entropy.defvjp(forward, backward)


def chunk_words(tokens: int, words: int) -> int:
    """Words of a chunk in backward; the last chunk may have fewer."""
    count = -(-words * tokens // CHUNK)
    return min(-(-words // count // MULTIPLE) * MULTIPLE, words)


def logits_of(spec: CrossEntropySpec):
    Logits = kernel_module("linear_cross_entropy").Logits
    return Logits(spec.softcap, spec.z_loss, 1 - spec.smoothing, spec.uniform)


def real_words(w_VD: jax.Array, spec: CrossEntropySpec) -> jax.Array:
    """Number of this device's words that are not padding."""
    return jnp.clip(spec.vocab_size - first_word(w_VD), 0, w_VD.shape[0]).astype(jnp.int32)


def local_targets(targets_T: jax.Array, w_VD: jax.Array, spec: CrossEntropySpec) -> jax.Array:
    """Row of each token's target in w_VD, -1 if it is on another device."""
    targets_T, first = known_targets(targets_T, spec), first_word(w_VD)
    is_local_T = (targets_T >= first) & (targets_T < first + w_VD.shape[0])
    return jnp.where(is_local_T, targets_T - first, -1).astype(jnp.int32)
