"""Counts of experts' tokens, which come as gradients: what moves by them, and what is told of them.

Of a parameter with counts the gradient is [..., experts + tallies] (layers/balance.py), rows being
layers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.layers.balance import TALLIES
from maxmeg.models.lm import layer_places
from maxmeg.ops.routing import updated_bias
from maxmeg.parallel.rules import is_counted, is_variable
from maxmeg.pipeline.layout import Layout


def counted(gradients):
    """(gradients that are counts, None elsewhere; gradients, zero in their place)."""

    def one(wanted: bool):
        def choose(variable):
            value = variable.get_value()
            if value is None:  # of the frozen part
                return variable
            if is_counted(variable):
                own = value[..., : -len(TALLIES)]
                return variable.replace(value if wanted else jnp.zeros_like(own))
            return variable.replace(None) if wanted else variable

        return jax.tree.map(choose, gradients, is_leaf=is_variable)

    return one(True), one(False)


def balanced(updates, counts, model, config: ModelConfig):
    """`updates` of a model's trained part, with those of what moves by counts.

    A bias makes a step up for experts with less than the mean load, down for those with more (Wang
    et al., 2024); a load becomes the counts.
    """
    rate = config.router_bias_rate if config.router_bias else 0.0

    def one(update, count, parameter):
        if count.get_value() is None:
            return update
        counts_E, value_E = count[..., : -len(TALLIES)], parameter[...]
        if parameter.get_metadata()["counts"] == "load":
            return update.replace(counts_E - value_E)
        return update.replace(updated_bias(jnp.zeros_like(value_E), counts_E, rate))

    return jax.tree.map(one, updates, counts, model, is_leaf=is_variable)


def layer_loads(counts, config: ModelConfig, layout: Layout) -> Float[Array, "S N"]:
    """Rows of the layers with experts in model order, then of those outside the stack."""
    paths = jax.tree_util.tree_leaves_with_path(counts, is_leaf=is_variable)
    arrays = {
        tuple(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path): v
        for path, v in paths
        if is_counted(v) and v.get_value() is not None and v.get_metadata()["counts"] == "bias"
    }
    rows = []
    for group, repeat, first in layer_places(config):
        unit = ("stack", "groups", str(group), "sublayers")
        for path, variable in arrays.items():
            if path[:4] == unit and int(path[4]) == first + 1:
                rows.append(variable[layout.places(group)[repeat]])
    rows += [v[...] for path, v in arrays.items() if path[0] != "stack"]
    return jnp.concatenate([row.reshape(-1, row.shape[-1]) for row in rows])
