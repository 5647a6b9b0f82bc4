"""Tiny configs and batches that tests of layouts share."""

import jax
import numpy as np

from maxmeg.config.model import DType, ModelConfig, Norm, NormPlace, Position, QkNorm
from maxmeg.config.schema import Config, DataConfig, ParallelConfig, TrainConfig
from maxmeg.config.validate import axis_sizes, validate
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.mesh import make_mesh
from maxmeg.parallel.placement import local_rows, place_batch, place_flag
from maxmeg.state import abstract_state, create_state

LENGTH, BATCH, VOCAB = 16, 16, 61
EVERYTHING = {  # fields of a model that has every feature
    "dropout_hidden": 0.2,
    "dropout_attention": 0.1,
    "dropout_embedding": 0.1,
    "tied": True,
    "num_kv_heads": 4,
    "bias_qkv": True,
    "bias_attention_out": True,
    "bias_mlp": True,
    "qk_norm": QkNorm.heads,
    "parallel_norms": True,
    "norm_place": NormPlace.sandwich,
    "attention_sinks": True,
    "attention_window": 9,
    "embedding_scale": 3.0,
    "norm": Norm.layernorm,
    "position": Position.learned,
    "max_position": 16,
    "parallel_block": True,
    "logit_softcap": 5.0,
}

ALTERNATING = {  # units of two layers, the last of one; with dropout that tells layers apart
    "num_layers": 5,
    "attention_window": 5,
    "attention_global_every": 2,
    "rotary_local_base": 50.0,
    "dropout_hidden": 0.1,
}


def tiny(model: dict | None = None, train: dict | None = None, **parallel) -> Config:
    """A config of a tiny float32 model on as many devices as `parallel` names."""
    fields = {
        "vocab_size": VOCAB,
        "vocab_divisible_by": 8,
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 8,
        "dtype": DType.float32,
    }
    return Config(
        model=ModelConfig(**fields | (model or {})),
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


def tiny_batch(config: Config, mesh, seed: int = 0, **extra: np.ndarray) -> dict:
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
    rows = local_rows(mesh, config.train.micro_batch_size)
    local = {name: array[rows(shape[0])] for name, array in batch.items()}
    return place_batch(local, rows, mesh, shape[0])


def tiny_state(config: Config, mesh):
    """(optimizer, abstract state, state)."""
    optimizer = make_optimizer(config.optim)
    abstract = abstract_state(config, optimizer, mesh)
    return optimizer, abstract, create_state(config, optimizer, abstract)


def controls(mesh) -> dict:
    """Learning rate and weight decay of a step, and no wish to stop."""
    rates = {"learning_rate": np.float32(1e-3), "weight_decay": np.float32(0.1)}
    return {**rates, "stop": place_flag(False, mesh)}
