"""Mixers with a state on meshes as on one device; all mixers token by token as all at once."""

import dataclasses
import math

import cached
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixer_cases import DEVIATION, SEGMENTS, B, D, L, inputs, positions, run
from sharded_layers import check_equal, drawn, on_mesh
from test_attention_options import OPTIONS
from test_attention_options import PLAIN as ATTENTION
from test_delta import SPECS as DELTAS
from test_mamba import SPECS as MAMBAS
from test_mla import SPECS as LATENTS
from test_mla import model as latent_attention
from test_short_conv import SPECS as CONVS

from maxmeg.config.schema import LoraConfig
from maxmeg.layers.context import Context
from maxmeg.layers.norm import NormSpec
from maxmeg.layers.residual import Residual, ResidualSpec

SIZE = cached.size_of(B, L)
SPECS = {**CONVS, **MAMBAS, **DELTAS}
CUT, TENSOR = {"fsdp": 2, "tensor": 4}, {"tensor": 8}
MESHES = {  # also with fewer groups than devices; the convolution with dropout
    "quick": [("biases", CUT), ("falcon", {"tensor": 4}), ("gated_delta", CUT)],
    "slow": [
        *(("groups", TENSOR), ("one group", {"tensor": 2}), ("gated_delta", TENSOR)),
        *(("one key head", {"tensor": 2}), ("kda", CUT)),
    ],
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*MESHES["quick"], *(pytest.param(*case, marks=pytest.mark.slow) for case in MESHES["slow"])],
)
def test_a_mesh_equals_one_device(name, sizes):
    """Output and gradients of a sublayer, documents kept apart."""
    spec = ResidualSpec(NormSpec(), (SPECS[name],), dropout=0.2 if name in CONVS else 0.0)
    layer = drawn(lambda key: Residual(key, spec), DEVIATION)
    how = {"dropout_key": jax.random.key(3), "training": True}

    def output(layer, x_BLD):
        count = len(x_BLD)
        rows_B = jax.lax.axis_index("fsdp") * count + jnp.arange(count)
        segments_BL = jnp.asarray(SEGMENTS)[rows_B]
        ctx = Context(positions()[:count], segments_BL, rows_B, **how)
        return layer({"target": x_BLD}, ctx)[0]["target"]

    alone = on_mesh(output, layer, {})(layer, *inputs())
    check_equal(on_mesh(output, layer, sizes)(layer, *inputs()), alone)
    assert all(np.abs(np.asarray(leaf)).max() > 0 for leaf in jax.tree.leaves(alone))


@jax.jit
def run_cached(layer, x_BLD, ctx: Context, cache):
    return layer(x_BLD, ctx, cache)[:2]


def layer_of(name: str):
    """Latent attention with adapters, options of attention, or a mixer with a state."""
    if name in LATENTS:
        return latent_attention(LATENTS[name], LoraConfig(3, 2.0, 0.4, ()))
    if name in OPTIONS:
        spec = dataclasses.replace(ATTENTION, hidden_size=D, **OPTIONS[name])
        return drawn(spec.make, DEVIATION)
    return drawn(SPECS[name].make, DEVIATION)


@pytest.mark.parametrize(
    "name",
    [
        *(*CONVS, "groups", "falcon", "gated_delta", "kda"),
        *("deepseek-v3", "options", "chunk", "everything"),
    ],
)
def test_decoding_equals_the_whole_sequence(name):
    """Rows of 2 and of 5 tokens, then two further at once and one alone."""
    layer, (x_BLD, _) = layer_of(name), map(np.asarray, inputs())
    whole_BLD, lengths_B = np.asarray(run(layer, x_BLD)), np.array([2, 5])
    ctx = cached.context(SIZE, 0, 5, lengths_B)
    found_BLD, cache = run_cached(layer, x_BLD[:, :5], ctx, cached.empty(layer, SIZE))
    for row, length in enumerate(lengths_B):
        check_equal(found_BLD[row, :length], whole_BLD[row, :length])
    for count in (2, 1):
        places_BL1 = (lengths_B[:, None] + np.arange(count))[..., None]
        next_BLD = np.take_along_axis(x_BLD, places_BL1, axis=1)
        found_BLD, cache = run_cached(
            layer, next_BLD, cached.context(SIZE, lengths_B, count), cache
        )
        check_equal(found_BLD, np.take_along_axis(whole_BLD, places_BL1, axis=1))
        lengths_B = lengths_B + count


def named_widths(jaxpr) -> dict[str, int]:
    """Name -> elements per token of the activations that layers name for recomputation."""
    found = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            found[equation.params["name"]] = math.prod(equation.outvars[0].aval.shape[2:])
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                found |= named_widths(value.jaxpr)
    return found


@pytest.mark.parametrize("name", [*SPECS, *LATENTS, *OPTIONS])
def test_widths_are_those_of_the_activations(name):
    """The planner, fused projections and recomputation ask for them."""
    spec = {**SPECS, **LATENTS}.get(name) or dataclasses.replace(
        ATTENTION, hidden_size=D, **OPTIONS[name]
    )
    layer = jax.eval_shape(spec.make, jax.random.key(0))
    x_BLD = jax.ShapeDtypeStruct((B, L, D), jnp.float32)
    actual = named_widths(jax.make_jaxpr(lambda m, x: m(x, Context(positions()))[0])(layer, x_BLD))
    widths = spec.widths()
    told = {**widths.stored, **widths.replicated}
    assert told and {each: actual[each] for each in told} == told
