"""A model whose adapters are merged into its weights."""

import jax
import jax.numpy as jnp
from flax import nnx

from maxmeg.layers.lora import linears
from maxmeg.parallel.parameter import is_variable, replaced


def merged(model):
    """The float32 model with its adapters merged into the weights, nothing frozen."""

    def thaw(node):
        return replaced(node, node.get_value().astype(jnp.float32), frozen=False)

    model = jax.tree.map(thaw, model, is_leaf=is_variable)
    for linear in linears(model).values():
        if linear.lora is not None:
            change = linear.lora.a.get_value() @ linear.lora.b.get_value()
            linear.weight.set_value(linear.weight.get_value() + linear.lora.scale * change)
            linear.lora = nnx.data(None)
    return model
