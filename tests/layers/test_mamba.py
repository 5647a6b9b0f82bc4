"""Mamba-2: its recurrence, documents, meshes, initial values, and decoding with its state."""

import jax
import numpy as np
import pytest
from mixer_cases import (
    SEGMENTS,
    B,
    D,
    L,
    check_decoding,
    check_documents,
    check_mesh,
    randomized,
)
from tables import thinned

from maxmeg.layers.mamba import Mamba, MambaSpec
from maxmeg.layers.norm import NormSpec
from maxmeg.layers.residual import ResidualSpec
from maxmeg.optim.build import decays
from maxmeg.parallel.rules import is_exact

SIZES = {"num_heads": 8, "head_dim": 4, "state_size": 6, "chunk": 4, "std": 0.3, "out_std": 0.3}
SPECS = {
    "groups": MambaSpec(D, num_groups=4, **SIZES),
    "one group": MambaSpec(D, num_groups=1, conv_bias=False, **SIZES),
    "falcon": MambaSpec(
        D,
        num_groups=2,
        bias=True,
        norm_eps=None,
        scales=(0.5, 2.0, 0.7, 1.5, 0.25),
        steps=(0.005, 0.015),
        **SIZES,
    ),
}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def defined(layer: Mamba, x_LD: np.ndarray) -> np.ndarray:
    """The published recurrence over one document, token by token, in float64."""
    spec = layer.spec
    H, P, G, N = spec.num_heads, spec.head_dim, spec.num_groups, spec.state_size

    def numbers(parameter):
        return 0.0 if parameter is None else np.asarray(parameter[...], np.float64)

    def projected(name: str, scale: float = 1.0) -> np.ndarray:
        linear = getattr(layer, name)
        return scale * (x_LD @ numbers(linear.weight) + numbers(linear.bias))

    def convolved(name: str, x_LX: np.ndarray) -> np.ndarray:
        conv = getattr(layer, f"{name}_conv")
        taps = numbers(conv.weight)[:, 0]
        before = np.concatenate((np.zeros((len(taps) - 1, x_LX.shape[1])), x_LX))
        sums = sum(tap * before[i : i + len(x_LX)] for i, tap in enumerate(taps))
        return silu(sums + numbers(conv.bias))

    z, x, k, q, dt = (
        projected(n, s)
        for n, s in zip(("gate", "value", "key", "query", "step"), spec.scales, strict=True)
    )
    x, k, q = convolved("value", x), convolved("key", k), convolved("query", q)
    dt = np.clip(np.log1p(np.exp(dt + numbers(layer.step_bias))), *spec.steps)
    rate, skip, state = -np.exp(numbers(layer.decay_log)), numbers(layer.skip), np.zeros((H, N, P))
    y = np.zeros_like(x)
    for t in range(len(x)):
        x_HP = x[t].reshape(H, P)
        k_HN, q_HN = (np.repeat(a[t].reshape(G, N), H // G, axis=0) for a in (k, q))
        state *= np.exp(rate * dt[t])[:, None, None]
        state += k_HN[:, :, None] * (dt[t][:, None] * x_HP)[:, None]
        y[t] = (np.einsum("hn,hnp->hp", q_HN, state) + skip[:, None] * x_HP).reshape(-1)
    y *= silu(z)
    if layer.gated_norm is not None:
        groups = y.reshape(len(y), G, -1)
        groups = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + spec.norm_eps)
        y = groups.reshape(y.shape) * numbers(layer.gated_norm.weight)
    return y @ numbers(layer.out.weight) + numbers(layer.out.bias)


@pytest.mark.parametrize("name", thinned(SPECS, 3))
def test_documents_have_the_output_of_the_definition_alone(name):
    layer = randomized(Mamba(jax.random.key(0), SPECS[name]))
    for segments_BL in (np.ones((B, L), int), SEGMENTS):
        check_documents(layer, defined, segments_BL)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("groups", {"fsdp": 2, "tensor": 4}, marks=pytest.mark.slow),
        ("falcon", {"tensor": 4}),
        pytest.param("groups", {"tensor": 8}, marks=pytest.mark.slow),
        pytest.param("one group", {"tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_equals_one_device(name, sizes):
    """Also with fewer groups than devices."""
    check_mesh(ResidualSpec(NormSpec(), (SPECS[name],)), sizes)


@pytest.mark.parametrize("name", ["groups", "falcon"])
def test_decoding_with_a_state_equals_the_whole_sequence(name):
    check_decoding(randomized(Mamba(jax.random.key(0), SPECS[name])))


def test_initial_values_are_those_of_mamba_2():
    layer = Mamba(jax.random.key(0), MambaSpec(8, num_heads=4096, head_dim=1, num_groups=1))
    rates, steps = np.exp(layer.decay_log[...]), np.log1p(np.exp(layer.step_bias[...]))
    assert 1 <= rates.min() < 1.1 and 15.9 < rates.max() <= 16 and abs(rates.mean() - 8.5) < 0.3
    assert 1e-3 <= steps.min() < 1.1e-3 and 0.095 < steps.max() <= 0.1001
    assert abs(np.log(steps).mean() - np.log(1e-2)) < 0.1
    assert (layer.skip[...] == 1).all() and (layer.gated_norm.weight[...] == 1).all()
    for exact in (layer.decay_log, layer.step_bias, layer.skip):
        assert is_exact(exact) and not decays(exact)
