"""OptimConfig -> an optax chain that gets learning rate and weight decay with each update."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from maxmeg.config.optimizers import Group, MuonScale
from maxmeg.config.schema import OptimConfig, Optimizer
from maxmeg.optim.adafactor import scale_by_adafactor
from maxmeg.optim.muon import scale_by_muon
from maxmeg.optim.soap import scale_by_soap
from maxmeg.optim.storage import stored
from maxmeg.optim.trees import is_matrix_of_layer
from maxmeg.parallel.parameter import info, is_variable


def make_optimizer(
    config: OptimConfig, mesh: Mesh | None = None, zero1: bool = False, width: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov and Hutter, 2019), SGD with momentum, Lion (Chen et al., 2023), Adafactor,
    Muon or SOAP, each with decoupled weight decay.

    update(gradients, state, parameters, learning_rate=, weight_decay=, key=) takes both as scalars;
    key: the step's, for stochastic rounding of moments that are not float32 (optim/storage.py).
    AdamW, SGD and Lion are elementwise on sharded arrays, without communication. mesh, zero1: of
    the masters, for Muon and SOAP; None: one device has all of each. width: the model's, relative
    to muP's base model; all gradients are proportional to 1 / width, and so is Adam's epsilon.
    """
    config = dataclasses.replace(config, eps=config.eps / width)
    directions = {
        Optimizer.adamw: lambda: optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        Optimizer.sgd: lambda: optax.trace(config.momentum),
        Optimizer.lion: lambda: optax.scale_by_lion(config.beta1, config.beta2),
        Optimizer.adafactor: lambda: scale_by_adafactor(config.adafactor),
        Optimizer.muon: lambda: scale_by_muon(config, mesh, zero1),
        Optimizer.soap: lambda: scale_by_soap(config, mesh, zero1),
    }
    direction = directions[config.optimizer]()
    return stored(optax.chain(direction, descend(config, width)), config.moments)


def decays(variable: nnx.Variable) -> bool:
    """Whether weight decay applies: to matrices, as in Megatron-LM, which exempts every parameter
    of one dimension and every `.bias`.

    The logical axes decide. Embeddings, projections, experts, routers and LoRA matrices decay;
    norms, biases (also [E, F] of experts: one vector per expert) and attention sinks do not.
    """
    return info(variable).has_matrices


def mup_factors(config: OptimConfig, width: float) -> tuple[float, float]:
    """muP's factors of the learning rates of layers' matrices that read a width, and of all
    other parameters, for a model of `width` times the base width (Yang et al., 2022, table 8).

    Updates of AdamW, Lion and Adafactor do not shrink with their gradients, those of SGD do. Muon's
    have a spectral norm of sqrt(width) with scale=spectral, and should have that of the base model.
    """
    if config.optimizer is Optimizer.sgd:
        return 1.0, width
    if config.optimizer is Optimizer.muon:
        return (width**-0.5 if config.muon.scale is MuonScale.spectral else 1.0), 1.0
    return 1 / width, 1.0


def descend(config: OptimConfig, width: float = 1.0) -> optax.GradientTransformationExtraArgs:
    """u -> -learning_rate * (u + weight_decay * p), with decay only if `decays`, both times the
    factors of the parameter's group.

    The learning rate of what Muon leaves to AdamW is multiplied by muon.adamw_lr / lr. width: of
    `mup_factors`, which matrices of adapters, whose ranks are not widths, do not have. ValueError
    for a group without parameters.
    """
    ratio = config.muon.adamw_lr / config.lr if config.muon.adamw_lr else 1.0
    of_matrices, of_others = mup_factors(config, width)
    groups, everything = [Group.of(text) for text in config.groups], Group("*", 1.0, 1.0)

    def rate(path, parameter) -> float:
        if not is_matrix_of_layer(path, parameter):
            return ratio * of_others
        if "lora" in info(parameter).axes:
            return 1.0
        return of_matrices if info(parameter).reads_width else of_others

    def update(updates, state, params=None, **rates):
        learning_rate, weight_decay = rates["learning_rate"], rates["weight_decay"]
        matched = set[Group]()

        def one(path, update, parameter):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            group = next((g for g in groups if g.matches(name)), everything)
            matched.add(group)
            decay = group.decay * weight_decay if decays(parameter) else 0.0
            factor = group.rate * rate(path, parameter)

            def step(u, p):
                return -factor * learning_rate * (u + decay * p)

            return jax.tree.map(step, update, parameter)

        mapped = jax.tree_util.tree_map_with_path(one, updates, params, is_leaf=is_variable)
        if unused := [group.pattern for group in groups if group not in matched]:
            raise ValueError(
                f"optim.groups: {', '.join(unused)} has no parameters: no name matches, or only "
                "names that an earlier pattern matches too; log.parameters=true prints all names"
            )
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
