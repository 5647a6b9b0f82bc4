"""The chunked scan by our kernel for Hopper (kernels/chunk_scan.py). Not yet run on a GPU.

Not chosen by "auto" until it has been measured. The kernel computes forward; the gradients are
those of XLA's form. JAX traces and lowers a kernel at each call; the scan is jitted so that calls
of the same shapes share one kernel.
"""

from typing import Any

import jax

from maxmeg.ops.backend import Device, kernel_module, refuses_hopper_kernels

SUPPORTS = (
    "bfloat16 on Hopper GPUs, Mamba-2's scan (one decay per head, no delta rule), state sizes and "
    "heads of 128 and 64, 128 and 128, 256 and 64"
)


def refuses(inputs: Any, device: Device) -> str:
    """Why the kernel cannot run this call; empty if it can."""
    if reason := refuses_hopper_kernels(device):
        return reason
    is_plain = inputs.beta_BLH is None and inputs.log_decay_BLHI.shape[-1] == 1
    return kernel_module("chunk_scan").scan_refuses(*inputs[:3], is_plain)


@jax.jit
def scan(inputs: Any, docs_BL: jax.Array | None) -> tuple[Any, jax.Array]:
    """(y or None, state after the last token) of `ops.chunk_scan.Inputs`."""
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI, _, state_BHNP = inputs
    arrays = q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI[..., 0], state_BHNP, docs_BL
    return kernel_module("chunk_scan").scan(*arrays)


@jax.jit
def gradients(inputs: Any, docs_BL: jax.Array | None, slopes: tuple[Any, jax.Array]) -> Any:
    """Gradients of `inputs`, which have queries; slopes: those of y and of the last state."""
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI, _, state_BHNP = inputs
    arrays = q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI[..., 0], state_BHNP
    *others, d_log_decay_BLH, d_state_BHNP = kernel_module("chunk_scan_backward").gradients(
        arrays, docs_BL, *slopes
    )
    return type(inputs)(*others, d_log_decay_BLH[..., None], None, d_state_BHNP)
