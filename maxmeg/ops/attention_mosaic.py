"""Attention by our flash attention kernels for Hopper (kernels/attention.py). Not yet run on a GPU.

Never chosen by "auto" before it has been measured. Its gradients are the same in every run: no
sum depends on the order in which programs finish.
"""

from maxmeg.ops.attention_flash import flash
from maxmeg.ops.attention_spec import Operands, ScoreSpec
from maxmeg.ops.backend import Device, kernel_module, refuses_hopper_kernels

SUPPORTS = (
    "bfloat16 and float16 on Hopper GPUs, every mask, documents each in one piece, softcap, sinks, "
    "any lengths and offset, head dims 64, 80, 96, 128, 256, 192 with values of 128"
)


def refuses(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands, device: Device) -> str:
    """Why the kernels cannot run this call; empty if they can."""
    if reason := refuses_hopper_kernels(device):
        return reason
    if operands.dropout is not None:
        return "attention dropout is not supported"
    return kernel_module("attention").flash_refuses(q_BLHK, k_BMGK, v_BMGV)


def attend(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands):
    """Output [B, L, H, V] and log-sum-exp [B, L, H] in float32."""
    return flash(kernel_module("attention").flash_attention, q_BLHK, k_BMGK, v_BMGV, spec, operands)
