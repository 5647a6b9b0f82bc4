"""The chunked scan is that of transformers' Mamba-2, Qwen3-Next and Kimi-Linear models."""

import jax
import numpy as np
import pytest
import torch
from ops.chunk_scan_cases import Case, inputs_of, slopes_of
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from maxmeg.ops.chunk_scan import ScanSpec, chunk_scan, chunk_scan_step

TOLERANCE = 1e-5  # of the largest value, float32: the order of sums differs
CASES = {
    "mamba": Case("mamba", documents=False, length=70, groups=2, chunk=16, decay=0.1),
    "delta": Case("delta", documents=False, length=70, groups=2, chunk=16, decay=0.1),
    "kda": Case("kda", documents=False, length=70, groups=4, chunk=16, decay=0.1),
}
NAMES = ("q", "k", "v", "log_decay", "beta", "state")


def mamba_theirs(q, k, v, log_decay, beta, state, one_token: bool):
    """A is -1 in all heads, so that steps are the decays; values are multiplied by them again."""
    rate = -torch.ones(v.shape[2])
    steps = -log_decay
    values = v / steps[..., None]
    state = state.transpose(-1, -2)  # [B, H, P, N]
    if not one_token:
        y, last = mamba2.mamba2_chunk_scan(
            *(values, steps, rate, k, q, 16), initial_states=state, return_final_states=True
        )
        return y, last.transpose(-1, -2)
    state = state.clone()
    steps, rate = steps[:, 0, :, None].expand(values[:, 0].shape), rate[:, None, None]
    inputs = values[:, 0], steps, rate.expand(state.shape[1:]), k[:, 0], q[:, 0]
    y = mamba2.mamba2_selective_state_update(state, *inputs)
    return y[:, None], state.transpose(-1, -2)


def delta_theirs(q, k, v, log_decay, beta, state, one_token: bool):
    rules = qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule
    return theirs_of(rules[not one_token], q, k, v, log_decay, beta, state)


def kda_theirs(q, k, v, log_decay, beta, state, one_token: bool):
    rules = kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention
    return theirs_of(rules[not one_token], q, k, v, log_decay, beta, state)


def theirs_of(rule, q, k, v, log_decay, beta, state):
    q = q * q.shape[-1] ** 0.5  # they divide by it
    return rule(q, k, v, log_decay, beta, initial_state=state, output_final_state=True)


THEIRS = {"mamba": mamba_theirs, "delta": delta_theirs, "kda": kda_theirs}


def tensors_of(arrays: dict) -> list:
    tensors = (None if name not in arrays else torch.tensor(arrays[name]) for name in NAMES)
    return [None if t is None else t.float().requires_grad_() for t in tensors]


def check(found, wanted: torch.Tensor, name: str = "") -> None:
    wanted = wanted.detach().numpy()
    assert np.abs(np.asarray(found) - wanted).max() <= TOLERANCE * np.abs(wanted).max(), name


@pytest.mark.parametrize("kind", CASES)
def test_values_and_gradients_are_theirs(kind):
    case = CASES[kind]
    arrays, _ = inputs_of(case)
    arrays["log_decay"] -= 0.1  # Mamba-2 is divided by it
    tensors, slopes = tensors_of(arrays), slopes_of(case)
    results = THEIRS[kind](*tensors, one_token=False)
    torch.autograd.backward(results, [torch.tensor(slope).float() for slope in slopes])

    @jax.jit
    def ours(arrays, slopes):
        def scan(arrays):
            *inputs, state = (arrays.get(name) for name in NAMES)
            return chunk_scan(*inputs, None, state, ScanSpec(case.chunk))

        results, pull = jax.vjp(scan, arrays)
        return results, pull(slopes)[0]

    found, gradients = ours(*jax.tree.map(np.float32, (arrays, slopes)))
    for one, other in zip(found, results, strict=True):
        check(one, other)
    for name, tensor in zip(NAMES, tensors, strict=True):
        if tensor is not None:
            check(gradients[name], tensor.grad, name)


@pytest.mark.parametrize("kind", CASES)
def test_a_token_more_is_theirs(kind):
    arrays, _ = inputs_of(CASES[kind])
    arrays = {name: x if name == "state" else x[:, :1] for name, x in arrays.items()}
    with torch.no_grad():
        results = THEIRS[kind](*tensors_of(arrays), one_token=True)
    given = (arrays.get(name) for name in NAMES)
    found = chunk_scan_step(*(None if x is None else jax.numpy.float32(x) for x in given))
    for one, other in zip(found, results, strict=True):
        check(one, other)
