"""OptimConfig -> an optax chain that gets learning rate and weight decay with each update."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from maxmeg.config.schema import OptimConfig, Optimizer
from maxmeg.optim.muon import STACKING_AXES, is_orthogonalized, scale_by_muon
from maxmeg.parallel.rules import is_variable


def make_optimizer(
    config: OptimConfig, mesh: Mesh | None = None, zero1: bool = False
) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov and Hutter, 2019), SGD with momentum, or Muon (optim/muon.py), each with
    decoupled weight decay.

    update(gradients, state, parameters, learning_rate=, weight_decay=) takes both as scalars. AdamW
    and SGD are elementwise on sharded arrays, without communication. mesh, zero1: of the masters,
    for Muon; None: one device has all of each.
    """
    if config.optimizer is Optimizer.adamw:
        direction = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    elif config.optimizer is Optimizer.muon:
        direction = scale_by_muon(config, mesh, zero1)
    else:
        direction = optax.trace(config.momentum)
    return optax.chain(direction, descend(config))


def decays(variable: nnx.Variable) -> bool:
    """Whether weight decay applies: to matrices, as in Megatron-LM, which exempts every parameter
    of one dimension and every `.bias`.

    The logical axes decide. Embeddings, projections, experts, routers and LoRA matrices decay;
    norms, biases (also [E, F] of experts: one vector per expert) and attention sinks do not.
    """
    axes = variable.get_metadata()["axes"]
    return sum(axis not in STACKING_AXES for axis in axes) >= 2


def descend(config: OptimConfig) -> optax.GradientTransformationExtraArgs:
    """u -> -learning_rate * (u + weight_decay * p), with decay only if `decays`.

    The learning rate of what Muon leaves to AdamW is multiplied by muon.adamw_lr / lr.
    """
    ratio = config.muon.adamw_lr / config.lr if config.muon.adamw_lr else 1.0

    def is_adamws(path, parameter) -> bool:
        return ratio != 1.0 and not is_orthogonalized(path, parameter)

    def update(updates, state, params=None, **rates):
        learning_rate, weight_decay = rates["learning_rate"], rates["weight_decay"]

        def one(path, update, parameter):
            decay = weight_decay if decays(parameter) else 0.0
            factor = ratio if is_adamws(path, parameter) else 1.0

            def step(u, p):
                return -factor * learning_rate * (u + decay * p)

            return jax.tree.map(step, update, parameter)

        mapped = jax.tree_util.tree_map_with_path(one, updates, params, is_leaf=is_variable)
        return mapped, state

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
