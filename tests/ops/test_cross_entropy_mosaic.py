"""What stands around the kernels of linear + cross entropy: chunks, devices, the loss's options.

The kernels are replaced by what they compute; tests/kernels/test_linear_cross_entropy.py runs them.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from ops.cross_entropy_cases import CASES, TOLERANCE, arrays_of, error, expected, run
from ops.test_cross_entropy import check_over_vocabulary

import maxmeg.ops.cross_entropy.mosaic as mosaic
from maxmeg.ops.backend import Device
from maxmeg.ops.cross_entropy.call import CrossEntropySpec


@dataclasses.dataclass(frozen=True)
class Logits:
    softcap: float
    z_loss: float
    target_share: float
    uniform: float


def capped(h_TD, w_VD, logits):
    z_TV = jnp.einsum("TD,VD->TV", h_TD, w_VD, preferred_element_type=jnp.float32)
    return logits.softcap * jnp.tanh(z_TV / logits.softcap) if logits.softcap else z_TV


def statistics(h_TD, w_VD, targets_T, real, logits):
    z_TV, ids_V = capped(h_TD, w_VD, logits), jnp.arange(w_VD.shape[0])
    masked_TV = jnp.where(ids_V < real, z_TV, -1e30)
    largest_T = masked_TV.max(axis=1)
    total_T = jnp.exp(masked_TV - largest_T[:, None]).sum(axis=1)
    target_T = jnp.where(ids_V == targets_T[:, None], z_TV, 0).sum(axis=1)
    sum_T = jnp.where(ids_V < real, z_TV, 0).sum(axis=1) if logits.uniform else None
    return largest_T, total_T, target_T, sum_T


def logit_gradient(h_TD, w_VD, rows, span, logits):
    (targets_T, weights_T, lse_T), (real, start, words) = rows, span
    ids_C = start + jnp.arange(words)
    z_TC = capped(h_TD, w_VD[ids_C], logits)
    d_TC = jnp.exp(z_TC - lse_T[:, None]) * (1 + 2 * logits.z_loss * lse_T[:, None])
    d_TC -= logits.uniform + jnp.where(ids_C == targets_T[:, None], logits.target_share, 0)
    d_TC *= 1 - (z_TC / logits.softcap) ** 2 if logits.softcap else 1
    return jnp.where(ids_C < real, d_TC * weights_T[:, None], 0).astype(h_TD.dtype)


@pytest.fixture
def modelled(monkeypatch):
    """The backend with plain functions for its kernels, in chunks of 8 words."""
    kernels = types.SimpleNamespace(
        Logits=Logits,
        statistics=statistics,
        logit_gradient=logit_gradient,
    )
    monkeypatch.setattr(mosaic, "kernel_module", lambda name: kernels)
    monkeypatch.setattr(mosaic, "refuses", lambda *call: "")
    monkeypatch.setattr(mosaic, "MULTIPLE", 4)
    return monkeypatch


@pytest.mark.parametrize("name", ["plain", "padded", "bad targets", "all"])
def test_losses_and_gradients_equal_the_reference(name, modelled):
    case = CASES[name]
    modelled.setattr(mosaic, "CHUNK", 8 * case.tokens)
    assert mosaic.chunk_words(case.tokens, case.words) == 8
    arrays = arrays_of(case, "float32")
    wanted, actual = expected(case, arrays), run(case, arrays, "mosaic", jax.jit)
    errors = {key: error(actual[key], wanted[key]) for key in wanted}
    assert all(e <= TOLERANCE["float32"] for e in errors.values()), errors


def test_a_vocabulary_over_devices_is_the_whole_one(modelled):
    check_over_vocabulary(CASES["all"], arrays_of(CASES["all"], "float32"), "mosaic")


def test_other_devices_are_refused():
    h, w = (jax.ShapeDtypeStruct((n, 64), jnp.bfloat16) for n in (128, 256))
    targets, weights = (jax.ShapeDtypeStruct((128,), d) for d in (jnp.int32, jnp.float32))
    call = (h, w, targets, weights, CrossEntropySpec(256))
    assert "not a CUDA GPU" in mosaic.refuses(*call, Device("cpu"))
    assert "needs a Hopper GPU" in mosaic.refuses(*call, Device("cuda", (8, 0)))
