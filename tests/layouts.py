"""Tiny configs and batches that tests of layouts share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.checkpoint.disk import orders_of
from maxmeg.checkpoint.initialize import create_state
from maxmeg.checkpoint.names import nested, to_arrays
from maxmeg.config.architectures import use_architecture
from maxmeg.config.data import DataConfig
from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import DType, ModelConfig, Norm, NormPlace, Position
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.config.validate import axis_sizes, validate
from maxmeg.data.placement import local_rows, place_batch, place_flag
from maxmeg.models.lm import LM
from maxmeg.objectives.objective import Objective
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.mesh import make_mesh
from maxmeg.state import abstract_state
from maxmeg.step import make_gradients

LENGTH, BATCH, VOCAB = 16, 16, 61
# Half as much to compile, for what attention proves nothing of.
MLP_ONLY = {"layers": "*(mlp)", "attention.num_heads": ModelConfig().attention.num_heads}
DROPOUT = {"dropout_hidden": 0.2, "attention.dropout": 0.1, "dropout_embedding": 0.1}
EVERYTHING = DROPOUT | {
    "tied": True,
    "attention.num_kv_heads": 2,
    "attention.bias_qkv": True,
    "attention.bias_out": True,
    "mlp.bias": True,
    "attention.qk_norm": QkNorm.heads,
    "parallel_norms": True,
    "norm_place": NormPlace.sandwich,
    "attention.sinks": True,
    "layers": "*(local+mlp)",
    "attention.window": 9,
    "embedding_scale": 3.0,
    "norm": Norm.layernorm,
    "position": Position.learned,
    "max_position": 16,
    "logit_softcap": 5.0,
}

ALTERNATING = {
    "num_layers": 5,
    "layers": "*(local,mlp attention,mlp)",
    "attention.chunk": 5,
    "attention.local_head_dim": 6,
    "attention.local_kv_heads": 4,
    "attention.keys_as_values": True,
    "attention.value_norm": True,
    "layer_scale": True,
    "attention.temperature_length": 3,
    "rotary.local_base": 50.0,
    "dropout_hidden": 0.1,
}

SHARED_KEYS = {
    "num_layers": 6,
    "layers": "local,mlp,layer_embedding attention,mlp,layer_embedding "
    "*(shared_local,wide_mlp,layer_embedding shared_attention,wide_mlp,layer_embedding)",
    "layer_embedding.size": 8,
    "layer_scale": True,
    "norm_place": NormPlace.sandwich,
    "attention.num_kv_heads": 1,
    "attention.qk_norm": QkNorm.head,
    "attention.window": 9,
    "attention.local_head_dim": 6,
}

CONVOLUTIONS = {
    "num_layers": 5,
    "layers": "*(conv,mlp attention,mlp)",
    "conv.kernel_size": 4,
    "conv.bias": True,
}

DELTA = {
    "num_layers": 2,
    "layers": "*(gated_delta,mlp attention,mlp)",
    "attention.output_gate": True,
    "delta.num_heads": 8,
    "delta.num_key_heads": 4,
    "delta.key_size": 6,
    "delta.value_size": 4,
    "delta.kernel_size": 3,
    "delta.chunk": 4,
}
KDA = {
    "num_layers": 2,
    "layers": "*(kda,mlp attention,mlp)",
    "delta.num_heads": 8,
    "delta.key_size": 4,
    "delta.rank": 3,
    "delta.chunk": 4,
}
HYBRID = {
    "num_layers": 5,
    "layers": "*(mamba attention+mamba,mlp)",
    "mamba.num_heads": 8,
    "mamba.head_dim": 6,
    "mamba.num_groups": 2,
    "mamba.state_size": 5,
    "mamba.chunk": 4,
    "mamba.scales": (0.5, 1.5, 0.7, 0.8, 0.9),
    "mamba.output_scale": 0.8,
    "residual_scale": 0.7,
    "logit_scale": 0.5,
}


def of(name: str, gpus: int, samples: int, microbatches: int, recompute="minimal", **parallel):
    """A named architecture on `gpus` devices, with so many samples a microbatch."""
    sizes = ParallelConfig(**parallel)
    batch = samples * microbatches * gpus // (sizes.tensor * sizes.pipe)
    train = TrainConfig(global_batch_size=batch, micro_batch_size=samples)
    config = use_architecture(Config(parallel=sizes, train=train), name)
    config.model.recompute = recompute
    return config


def tiny(model: dict | None = None, train: dict | None = None, **parallel) -> Config:
    """A config of a tiny float32 model on as many devices as `parallel` names."""
    fields = {
        "vocab_size": VOCAB,
        "vocab_divisible_by": 8,
        "num_layers": 2,
        "hidden_size": 32,
        "attention.num_heads": 8,
        "dtype": DType.float32,
    }
    return Config(
        model=with_fields(ModelConfig(), fields | (model or {})),
        train=TrainConfig(**{"global_batch_size": BATCH, "loss_chunk": 24} | (train or {})),
        data=DataConfig(sequence_length=LENGTH),
        parallel=ParallelConfig(**parallel),
    )


def mesh_of(config: Config):
    """The config's mesh on the first devices, validated."""
    parallel = config.parallel
    validate(config, parallel.devices)
    sizes = axis_sizes(parallel, parallel.devices)
    return make_mesh(sizes, jax.devices()[: parallel.devices], parallel.fold)


def tiny_batch(config: Config, mesh, seed: int = 0, **extra: np.ndarray) -> Batch:
    """A random batch on the mesh, the same for every layout."""
    rng = np.random.default_rng(seed)
    shape = (config.train.global_batch_size, config.data.sequence_length)
    batch = {
        "tokens": rng.integers(0, config.model.vocab_size, shape, dtype=np.int32),
        "targets": rng.integers(0, config.model.vocab_size, shape, dtype=np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "loss_mask": (rng.random(shape) < 0.8).astype(np.float32),
        **extra,
    }
    rows = local_rows(mesh, config.train.micro_batch_size, config.parallel.context_chunks)
    local = {name: array[rows(shape[0])] for name, array in batch.items()}
    return place_batch(local, rows, mesh, shape[0])


def tiny_abstract(config: Config, mesh):
    """(optimizer, abstract state), which compile nothing."""
    width = config.model.width_multiplier
    optimizer = make_optimizer(config.optim, mesh, config.parallel.zero1, width)
    return optimizer, abstract_state(config, optimizer, mesh)


def tiny_state(config: Config, mesh):
    """(optimizer, abstract state, state)."""
    optimizer, abstract = tiny_abstract(config, mesh)
    return optimizer, abstract, create_state(config, optimizer, abstract)


def by_name(tree) -> dict[str, np.ndarray]:
    """The arrays of {"model": a model} by name, layers in model order, without padding."""
    arrays, orders = to_arrays(tree), orders_of(tree)
    for name, array in arrays.items():
        array = np.asarray(array)
        if order := orders.get(name.replace(".", "/")):
            array = array[np.array([order.index(n) for n in range(max(order) + 1)])]
        arrays[name] = array
    return arrays


def in_model_order(tree) -> dict:
    """`by_name` as nested dicts."""
    return nested(by_name(tree))


def named_gradients(gradients) -> dict[str, np.ndarray]:
    """Return gradients by name, layers in model order. Padded layers must have zero gradients."""
    arrays = by_name({"model": gradients})
    for name, array in to_arrays({"model": gradients}).items():
        assert np.count_nonzero(array) == np.count_nonzero(arrays[name]), name
    return {name.removeprefix("model."): array for name, array in arrays.items()}


def assert_equal_but_rounding(
    found: tuple, wanted: tuple, tolerance: float, floor: float, flipped: float = 0.0
) -> None:
    """(losses, gradients) by name of two layouts. tolerance: of a loss, and of an array's largest
    number; floor: of gradients that are zero in exact arithmetic. flipped: relative distance in the
    L2 norm that passes as well, of products of codes: a sum on the border between two codes rounds
    to either of them, which changes a few numbers by much more than the tolerance."""
    for name, value in wanted[0].items():
        assert float(found[0][name]) == pytest.approx(float(value), rel=tolerance), name
    assert found[1].keys() == wanted[1].keys()
    for name, array in wanted[1].items():
        part = found[1][name][: len(array)]  # the padding of the vocabulary depends on tensor
        assert not found[1][name][len(array) :].any() and not array[len(part) :].any(), name
        off = part - array[: len(part)]
        is_close = np.abs(off).max() <= tolerance * np.abs(array).max() + floor
        assert is_close or np.linalg.norm(off) <= flipped * np.linalg.norm(array), name


def batch_gradients(
    config: Config,
    make_batch: Callable = tiny_batch,
    prepare: Callable = lambda model: model,
) -> tuple[dict, dict[str, np.ndarray], LM, Batch]:
    """(sums, gradients by name, model, batch) of make_batch(config, mesh) and of the initial model,
    which `prepare` may change."""
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    model, batch = prepare(state.model), make_batch(config, mesh)
    function = jax.jit(make_gradients(config, mesh, abstract.model))
    found, sums = function(model, batch, state.key)
    return sums, named_gradients(found), model, batch


def first_samples(samples: Callable[[np.ndarray], dict]) -> Callable:
    """Makes the batch of samples(numbers of the first ones), for `batch_gradients`."""

    def make_batch(config: Config, mesh) -> Batch:
        rows = local_rows(mesh, config.train.micro_batch_size)
        return place_batch(samples(np.arange(BATCH)[rows(BATCH)]), rows, mesh, BATCH)

    return make_batch


def on_host(model):
    """The model on a single device, for references that know no mesh."""
    return jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), model)


def model_gradients(
    config: Config,
    objective: Objective | None = None,
    **extra: np.ndarray,
) -> tuple[float, dict[str, np.ndarray]]:
    """(token-mean loss, gradients by name, layers in model order) of `tiny_batch`."""
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    function = jax.jit(make_gradients(config, mesh, abstract.model, objective))
    found, sums = function(state.model, tiny_batch(config, mesh, **extra), state.key)
    return float(sums["loss_sum"] / sums["tokens"]), named_gradients(found)


def controls(mesh) -> dict:
    """Learning rate and weight decay of a step, and no wish to stop."""
    rates = {"learning_rate": np.float32(1e-3), "weight_decay": np.float32(0.1)}
    return {**rates, "stop": place_flag(False, mesh)}
