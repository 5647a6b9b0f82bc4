"""OptimConfig -> one optax chain whose learning rate and weight decay come in with each update."""

import re

import jax
import jax.numpy as jnp
import optax

from maxmeg.config.schema import OptimConfig, Optimizer

NO_DECAY = re.compile(r"norm|bias")  # paths of parameters without weight decay


def make_optimizer(config: OptimConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov and Hutter, 2019) or SGD with momentum and decoupled weight decay.

    update(gradients, state, parameters, learning_rate=, weight_decay=), the two being scalars.
    Elementwise on sharded arrays: no communication.
    """
    if config.optimizer is Optimizer.adamw:
        direction = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    else:
        direction = optax.trace(config.momentum)
    return optax.chain(direction, descend())


def descend() -> optax.GradientTransformationExtraArgs:
    """u -> -learning_rate * (u + weight_decay * p), without decay on norms and biases."""

    def update(updates, state, params=None, **rates):
        learning_rate, weight_decay = rates["learning_rate"], rates["weight_decay"]

        def one(path, u, p):
            decay = 0.0 if NO_DECAY.search(jax.tree_util.keystr(path)) else weight_decay
            return -learning_rate * (u + decay * p)

        return jax.tree_util.tree_map_with_path(one, updates, params), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def clip(gradients, limit: float):
    """(gradients scaled so that their global L2 norm is at most `limit`, that norm before).

    The arrays are global, so the norm is exact however they are sharded. limit 0: not scaled.
    """
    norm = optax.global_norm(gradients)
    if not limit:
        return gradients, norm
    scale = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale, gradients), norm
