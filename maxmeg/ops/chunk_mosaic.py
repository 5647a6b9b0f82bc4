"""The chunked scan by our kernels for Hopper (kernels/chunk_scan.py, chunk_scan_backward.py). Not
yet run on a GPU.

Not chosen by "auto" until it has been measured. Without queries the gradients are those of XLA's
form. JAX traces and lowers a kernel at each call; the scans are jitted so that calls of the same
shapes share one kernel.

Kernels take few sizes of states and heads. Others are padded by zeros, which cost time and a copy,
and heads of up to 128 with states of up to 256 become two of 64 each, which cost no more.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxmeg.ops.backend import Device, kernel_module, refuses_hopper_kernels

HALF = 64  # head size that goes with every state size
SUPPORTS = (
    "bfloat16 on Hopper GPUs, Mamba-2's scan (one decay per head, no delta rule), state sizes up "
    "to 256 and heads up to 128"
)


def refuses(inputs: Any, device: Device) -> str:
    """Why the kernels cannot run this call; empty if they can."""
    if reason := refuses_hopper_kernels(device):
        return reason
    is_plain = inputs.beta_BLH is None and inputs.log_decay_BLHI.shape[-1] == 1
    arrays = jax.eval_shape(fitted, inputs) if is_plain else inputs
    return kernel_module("chunk_scan").scan_refuses(*arrays[:3], is_plain)


def kernel_sizes(state: int, value: int) -> tuple[int, int]:
    """Sizes of states and heads, at least these, that the kernels take after heads are split; the
    same ones if there are none."""
    if state > 256 or value > 2 * HALF:
        return state, value
    return 128 if state <= 128 else 256, HALF if value <= HALF else 2 * HALF


def fitted(inputs: Any) -> Any:
    """Inputs in sizes that the kernels take. Linear in each array."""
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI, _, state_BHNP = inputs
    N, P = kernel_sizes(*state_BHNP.shape[2:])
    q_BLGN, k_BLGN = (None if x is None else padded(x, N) for x in (q_BLGN, k_BLGN))
    if N == 256 and P == 2 * HALF:
        log_decay_BLHI = jnp.repeat(log_decay_BLHI, 2, axis=2)
    values = fitted_values(inputs, v_BLHP)
    return type(inputs)(
        q_BLGN, k_BLGN, values, log_decay_BLHI, None, fitted_states(inputs, state_BHNP)
    )


def padded(x: jax.Array, size: int) -> jax.Array:
    """With zeros at the end of the last dimension."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def fitted_values(inputs: Any, v_BLHP: jax.Array) -> jax.Array:
    N, P = kernel_sizes(*inputs.state_BHNP.shape[2:])
    v_BLHP = padded(v_BLHP, P)
    return v_BLHP.reshape(*v_BLHP.shape[:2], -1, HALF) if (N, P) == (256, 2 * HALF) else v_BLHP


def fitted_states(inputs: Any, state_BHNP: jax.Array) -> jax.Array:
    N, P = kernel_sizes(*inputs.state_BHNP.shape[2:])
    state_BHPN = padded(padded(state_BHNP, P).swapaxes(2, 3), N)
    if (N, P) == (256, 2 * HALF):
        state_BHPN = state_BHPN.reshape(len(state_BHPN), -1, HALF, N)
    return state_BHPN.swapaxes(2, 3)


@jax.jit
def scan(inputs: Any, docs_BL: jax.Array | None) -> tuple[Any, jax.Array]:
    """(y or None, state after the last token) of `ops.chunk_scan.Inputs`."""
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI, _, state_BHNP = fitted(inputs)
    arrays = q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI[..., 0], state_BHNP, docs_BL
    y_BLHP, last_BHNP = kernel_module("chunk_scan").scan(*arrays)
    (B, L, H, P), N = inputs.v_BLHP.shape, inputs.state_BHNP.shape[2]
    halves = last_BHNP.shape[1] // H
    last = last_BHNP.swapaxes(2, 3).reshape(B, H, halves * last_BHNP.shape[3], -1)
    last_BHNP = last.swapaxes(2, 3)[:, :, :N, :P]
    return None if y_BLHP is None else y_BLHP.reshape(B, L, H, -1)[..., :P], last_BHNP


@jax.jit
def gradients(inputs: Any, docs_BL: jax.Array | None, slopes: tuple[Any, jax.Array]) -> Any:
    """Gradients of `inputs`, which have queries; slopes: those of y and of the last state."""
    (q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI, _, state_BHNP), pull = jax.vjp(fitted, inputs)
    arrays = q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI[..., 0], state_BHNP
    d_y, d_last = fitted_values(inputs, slopes[0]), fitted_states(inputs, slopes[1])
    *others, d_log_decay_BLH, d_state_BHNP = kernel_module("chunk_scan_backward").gradients(
        arrays, docs_BL, d_y, d_last
    )
    return pull(type(inputs)(*others, d_log_decay_BLH[..., None], None, d_state_BHNP))[0]
