"""Mamba-2: its published recurrence and initial values. (On meshes, decoding: test_mixers.py.)"""

import jax
import numpy as np
import pytest
from mixer_cases import D, check_documents, convolved, numbers, projected, silu
from tables import thinned

from maxmeg.layers.mamba import Mamba, MambaSpec
from maxmeg.optim.build import decays
from maxmeg.parallel.parameter import info

SIZES = {"num_heads": 8, "head_dim": 4, "state_size": 6, "chunk": 4}
SPECS = {
    "groups": MambaSpec(D, num_groups=4, **SIZES),
    "one group": MambaSpec(D, num_groups=1, conv_bias=False, **SIZES),
    "falcon": MambaSpec(
        D,
        num_groups=2,
        bias=True,
        norm_eps=None,
        scales=(0.5, 2.0, 0.7, 1.5, 0.25),
        steps=(0.5, 1.5),
        **SIZES,
    ),
}


def defined(layer: Mamba, x_LD: np.ndarray) -> np.ndarray:
    """The recurrence over one document, token by token, in float64."""
    spec = layer.spec
    H, P, G, N = spec.num_heads, spec.head_dim, spec.num_groups, spec.state_size
    names = ("gate", "value", "key", "query", "step")
    z, x, k, q, dt = (
        scale * projected(getattr(layer, name), x_LD)
        for name, scale in zip(names, spec.scales, strict=True)
    )
    convs = (layer.value_conv, x), (layer.key_conv, k), (layer.query_conv, q)
    x, k, q = (silu(convolved(*pair)) for pair in convs)
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
    return projected(layer.out, y)


@pytest.mark.parametrize("name", thinned(SPECS, 2))
def test_documents_have_the_output_of_the_definition_alone(name):
    check_documents(SPECS[name], defined)


def test_initial_values_are_those_of_mamba_2():
    spec = MambaSpec(8, num_heads=4096, head_dim=1, num_groups=1)
    layer = jax.jit(spec.make)(jax.random.key(0))
    rates, steps = np.exp(layer.decay_log[...]), np.log1p(np.exp(layer.step_bias[...]))
    assert 1 <= rates.min() < 1.1 and 15.9 < rates.max() <= 16 and abs(rates.mean() - 8.5) < 0.3
    assert 1e-3 <= steps.min() < 1.1e-3 and 0.095 < steps.max() <= 0.1001
    assert abs(np.log(steps).mean() - np.log(1e-2)) < 0.1
    assert (layer.skip[...] == 1).all() and (layer.gated_norm.weight[...] == 1).all()
    for exact in (layer.decay_log, layer.step_bias, layer.skip):
        assert info(exact).is_exact and not decays(exact)
