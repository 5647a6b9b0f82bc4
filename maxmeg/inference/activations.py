"""The activations of a model by name, for looking inside of it.

"embedding"            the stack's input                                     [B, L, D]
"layers.3"             the residual stream after layer 3                     [B, L, D]
"layers.3.mlp"         what the mixer adds to the residual stream            [B, L, D]
"layers.3.mlp.mlp_up"  an activation of the mixer that has a name in config/recompute.py
"final_norm"           the input of the output projection                    [B, L, D]

Mixers of a parallel block are one: "layers.3.attention+mlp".
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, Int

from maxmeg.config.hints import nearest_few
from maxmeg.config.layers import places
from maxmeg.config.model import ModelConfig
from maxmeg.layers.context import Context
from maxmeg.layers.residual import Residual
from maxmeg.layers.stream import Stream
from maxmeg.models.lm import LM

MIXER_OUTPUT = "mixer_output"  # the name under which layers/residual.py stores it


def capture(
    model: LM, config: ModelConfig, ids_BL: Int[Array, "B L"], patterns: Sequence[str]
) -> dict[str, jax.Array]:
    """Return the activations whose names match a pattern, in the order of the forward pass.

    patterns: "layers.*.mlp": * stands for any characters but a dot. The layers run one after the
    other instead of in a loop, so compiling takes longer with every layer. The function is pure:
    jit and differentiate it. ValueError for a pattern without a match.
    """
    expressions = [re.compile(re.escape(pattern).replace(r"\*", "[^.]*")) for pattern in patterns]
    captured: dict[str, jax.Array] = {}
    names: list[str] = []

    def keep(name: str, x: jax.Array) -> None:
        names.append(name)
        if any(expression.fullmatch(name) for expression in expressions):
            captured[name] = x

    positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1]), ids_BL.shape)
    ctx = Context(positions_BL, tokens_BL=ids_BL)
    x = model.embed_tokens(ids_BL, ctx)
    ctx = model.stack.with_tables(ctx, x["target"].dtype)
    keep("embedding", x["target"])
    firsts = [sum(repeats for _, repeats in config.groups[:i]) for i in range(len(config.groups))]
    for number, place in enumerate(places(config.groups)):
        unit = jax.tree.map(lambda leaf, at=place.repeat: leaf[at], model.stack.groups[place.group])
        layer_ctx = dataclasses.replace(ctx, layer=firsts[place.group] + place.repeat)
        for i in range(place.sublayer, place.sublayer + len(config.layer_kinds[number])):
            sublayer = unit.sublayers[i]
            x, named = run_named(sublayer, x, dataclasses.replace(layer_ctx, sublayer=i))
            mixer = f"layers.{number}.{'+'.join(sublayer.mixers)}"
            mixer += f"_{i}" if mixer in names else ""
            for name, array in named.items():
                keep(mixer if name == MIXER_OUTPUT else f"{mixer}.{name}", array)
        keep(f"layers.{number}", x["target"])
    keep("final_norm", model.outputs(x, ctx))
    for pattern, expression in zip(patterns, expressions, strict=True):
        if not any(map(expression.fullmatch, names)):
            raise ValueError(
                f"no activation is named {pattern!r}: nearest are {nearest_few(pattern, names)}"
            )
    return captured


def run_named(sublayer: Residual, x: Stream, ctx: Context) -> tuple[Stream, dict[str, jax.Array]]:
    """Return a sublayer's output, and the activations that it stores under names."""
    leaves, structure = jax.tree.flatten(x)

    def run(*leaves: jax.Array) -> Stream:
        return sublayer(jax.tree.unflatten(structure, leaves), ctx)[0]

    closed = jax.make_jaxpr(run)(*leaves)
    named = {
        equation.params["name"]: equation.outvars[0]
        for equation in closed.jaxpr.eqns
        if equation.primitive.name == "name"
    }
    jaxpr = closed.jaxpr.replace(outvars=[*closed.jaxpr.outvars, *named.values()])
    function: Callable = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, closed.consts))
    arrays = function(*leaves)
    y = jax.tree.unflatten(structure, arrays[: len(leaves)])
    return y, dict(zip(named, arrays[len(leaves) :], strict=True))
