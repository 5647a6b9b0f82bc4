"""The chunked scan by our kernels for Hopper: Mamba-2's (kernels/chunk_scan.py,
chunk_scan_backward.py) and the gated delta rule's (delta_scan.py, delta_scan_backward.py). Not yet
run on a GPU.

Not chosen by "auto" until it has been measured. Without queries the gradients are those of XLA's
form. JAX traces and lowers a kernel at each call; the scans are jitted so that calls of the same
shapes share one kernel.

Kernels take few sizes of states and heads. Others are padded by zeros, which cost time and a copy,
and of Mamba-2 heads of up to 128 with states of up to 256 become two of 64 each, which cost no
more.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxmeg.ops.backend import Device, kernel_module, refuses_hopper_kernels

HALF = 64  # head size that goes with every state size
PROGRAMS = 100  # fewer leave too many of the 132 multiprocessors of an H100 idle
SUPPORTS = (
    "bfloat16 on Hopper GPUs, one decay per head, head sizes up to 128, and state sizes up to 256 "
    "(Mamba-2) or 128 (the delta rule)"
)


def refuses(inputs: Any, device: Device) -> str:
    """Why the kernels cannot run this call; empty if they can."""
    if reason := refuses_hopper_kernels(device):
        return reason
    if inputs.log_decay_BLHI.shape[-1] > 1:
        return "decays of channels (kda) are not supported, only one decay per head"
    return kernels(inputs).scan_refuses(*jax.eval_shape(fitted, inputs)[:3])


def leaves_idle(inputs: Any) -> str:
    """Why "auto" takes another backend: a program runs the chunks of a head one after the other."""
    rows, _, heads, _ = inputs.v_BLHP.shape
    if rows * heads >= PROGRAMS:
        return ""
    return f"{rows} rows of {heads} heads fill no GPU, fewer than {PROGRAMS} in all"


def kernels(inputs: Any, direction: str = "") -> Any:
    """The module of the kernels. direction: "_backward" or ""."""
    name = "chunk_scan" if inputs.beta_BLH is None else "delta_scan"
    return kernel_module(name + direction)


def kernel_sizes(inputs: Any) -> tuple[int, int]:
    """Sizes of states and heads, at least those of the inputs, that the kernels take after heads
    are split; the same ones if there are none."""
    state, value = inputs.state_BHNP.shape[2:]
    if inputs.beta_BLH is not None and (inputs.q_BLGN is None or value <= 2 * HALF):
        return max(state, 2 * HALF), -(-value // HALF) * HALF
    if state > 256 or value > 2 * HALF:
        return state, value
    return 128 if state <= 128 else 256, HALF if value <= HALF else 2 * HALF


def fitted(inputs: Any) -> Any:
    """Inputs in sizes that the kernels take. Linear in each array."""
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI, beta_BLH, state_BHNP = inputs
    N = kernel_sizes(inputs)[0]
    q_BLGN, k_BLGN = (None if x is None else padded(x, N) for x in (q_BLGN, k_BLGN))
    if is_split(inputs):
        log_decay_BLHI = jnp.repeat(log_decay_BLHI, 2, axis=2)
    values, states = fitted_values(inputs, v_BLHP), fitted_states(inputs, state_BHNP)
    return type(inputs)(q_BLGN, k_BLGN, values, log_decay_BLHI, beta_BLH, states)


def is_split(inputs: Any) -> bool:
    """Whether heads become two."""
    return inputs.beta_BLH is None and kernel_sizes(inputs) == (256, 2 * HALF)


def padded(x: jax.Array, size: int) -> jax.Array:
    """With zeros at the end of the last dimension."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def fitted_values(inputs: Any, v_BLHP: jax.Array) -> jax.Array:
    v_BLHP = padded(v_BLHP, kernel_sizes(inputs)[1])
    return v_BLHP.reshape(*v_BLHP.shape[:2], -1, HALF) if is_split(inputs) else v_BLHP


def fitted_states(inputs: Any, state_BHNP: jax.Array) -> jax.Array:
    N, P = kernel_sizes(inputs)
    state_BHPN = padded(padded(state_BHNP, P).swapaxes(2, 3), N)
    if is_split(inputs):
        state_BHPN = state_BHPN.reshape(len(state_BHPN), -1, HALF, N)
    return state_BHPN.swapaxes(2, 3)


@jax.jit
def scan(inputs: Any, docs_BL: jax.Array | None) -> tuple[Any, jax.Array]:
    """(y or None, state after the last token) of `ops.chunk_scan.Inputs`."""
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI, beta_BLH, state_BHNP = fitted(inputs)
    arrays = q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI[..., 0], state_BHNP
    y_BLHP, last_BHNP = kernels(inputs).scan(arrays, beta_BLH, docs_BL)
    (B, L, H, P), N = inputs.v_BLHP.shape, inputs.state_BHNP.shape[2]
    halves = last_BHNP.shape[1] // H
    last = last_BHNP.swapaxes(2, 3).reshape(B, H, halves * last_BHNP.shape[3], -1)
    last_BHNP = last.swapaxes(2, 3)[:, :, :N, :P]
    return None if y_BLHP is None else y_BLHP.reshape(B, L, H, -1)[..., :P], last_BHNP


@jax.jit
def gradients(inputs: Any, docs_BL: jax.Array | None, slopes: tuple[Any, jax.Array]) -> Any:
    """Gradients of `inputs`, which have queries; slopes: those of y and of the last state."""
    fit, pull = jax.vjp(fitted, inputs)
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI, beta_BLH, state_BHNP = fit
    arrays = q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI[..., 0], state_BHNP
    d_y, d_last = fitted_values(inputs, slopes[0]), fitted_states(inputs, slopes[1])
    call = arrays, beta_BLH, docs_BL, (d_y, d_last)
    d_arrays, d_beta_BLH = kernels(inputs, "_backward").gradients(*call)
    *others, d_log_decay_BLH, d_state_BHNP = d_arrays
    return pull(type(inputs)(*others, d_log_decay_BLH[..., None], d_beta_BLH, d_state_BHNP))[0]
