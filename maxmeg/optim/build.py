"""OptimConfig -> an optax chain that gets learning rate and weight decay with each update."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxmeg.config.schema import OptimConfig, Optimizer
from maxmeg.parallel.rules import is_variable

STACKING_AXES = ("layers", "expert")  # dimensions along which whole parameters are stacked


def make_optimizer(config: OptimConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov and Hutter, 2019) or SGD with momentum and decoupled weight decay.

    update(gradients, state, parameters, learning_rate=, weight_decay=) takes both as scalars. It is
    elementwise on sharded arrays, without communication.
    """
    if config.optimizer is Optimizer.adamw:
        direction = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    else:
        direction = optax.trace(config.momentum)
    return optax.chain(direction, descend())


def decays(variable: nnx.Variable) -> bool:
    """Whether weight decay applies: to matrices, as in Megatron-LM, which exempts every parameter
    of one dimension and every `.bias`.

    The logical axes decide. Embeddings, projections, experts, routers and LoRA matrices decay;
    norms, biases (also [E, F] of experts: one vector per expert) and attention sinks do not.
    """
    axes = variable.get_metadata()["axes"]
    return sum(axis not in STACKING_AXES for axis in axes) >= 2


def descend() -> optax.GradientTransformationExtraArgs:
    """u -> -learning_rate * (u + weight_decay * p), with decay only if `decays`."""

    def update(updates, state, params=None, **rates):
        learning_rate, weight_decay = rates["learning_rate"], rates["weight_decay"]

        def one(update, parameter):
            decay = weight_decay if decays(parameter) else 0.0

            def step(u, p):
                return -learning_rate * (u + decay * p)

            return jax.tree.map(step, update, parameter)

        return jax.tree.map(one, updates, params, is_leaf=is_variable), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@jax.named_scope("clip_gradients")
def clip(gradients, limit: float):
    """(gradients scaled to a global L2 norm of at most `limit`, their norm before).

    The arrays are global, so sharding does not change the norm. limit 0: no scaling.
    """
    norm = optax.global_norm(gradients)
    if not limit:
        return gradients, norm
    scale = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale, gradients), norm
