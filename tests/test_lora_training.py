"""LoRA in the train step: every layout gives one device's losses and gradients; nothing is made for
the frozen base."""

import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import (
    EVERYTHING,
    assert_equal_but_rounding,
    batch_gradients,
    controls,
    mesh_of,
    tiny,
    tiny_abstract,
    tiny_batch,
)
from short_runs import digests, write_corpus

from maxmeg import generate
from maxmeg.checkpoint.names import to_arrays
from maxmeg.config.model import DType
from maxmeg.config.parallel import ParallelConfig, Schedule
from maxmeg.config.schema import Config, LogConfig, LoraConfig, OptimConfig
from maxmeg.inference.load import load_run
from maxmeg.layers.lora import linears
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.trainable import frozen, trained
from maxmeg.planning import hlo
from maxmeg.planning.cost.flops import training_flops
from maxmeg.planning.cost.memory import device_memory
from maxmeg.planning.cost.workload import workload
from maxmeg.state import abstract_state
from maxmeg.step import make_train_step
from maxmeg.train import main

# Relative, float32: the order of sums differs. Sums of low rank cancel, so that rounding exceeds
# 1e-5 with one seed in eight, by a factor of two at most.
TOLERANCE = 3e-5
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
MODELS = {
    "llama": {},
    "everything": EVERYTHING | {"attention.num_kv_heads": 1},
}
REDUCED = 0.25  # of the base's bytes: gradients of adapters, and a pipeline's sums of activations
# Dropout compiles slowly: all projections without it, or two with it.
ADAPTERS = {
    "llama": {"rank": 3, "alpha": 6.0, "targets": ("mixers.*",)},
    "everything": {"rank": 3, "alpha": 6.0, "targets": ("key", "mlp.out"), "dropout": 0.2},
}
COUNTS = {"llama": 7, "everything": 2}
LAYOUTS = [
    ("llama", {"data": 2, "fsdp": 2, "tensor": 2}, {}, 2),
    ("llama", {"pipe": 2, "fsdp": 2}, {}, 2),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama", {"pipe": 2, "fsdp": 2, "tensor": 2}, {}, 2),
            ("llama", {"pipe": 4, "fsdp": 1, "pad_layers": True}, {"num_layers": 5}, 2),
            (
                "everything",
                {"pipe": 2, "data": 2, "fsdp": 1, "tensor": 2, "schedule": Schedule.zero_bubble},
                {"recompute": "selective"},
                2,
            ),
        )
    ),
]


def with_adapters(model: str, fields: dict, micro: int = 0, **parallel) -> Config:
    fields = {"num_layers": 4, **MODELS[model], **fields}
    config = tiny(fields, {"micro_batch_size": micro}, **parallel)
    config.lora = LoraConfig(**ADAPTERS[model])
    return config


def stirred(model):
    """The model with other than zeros in B, so that every adapter has gradients."""
    for linear in linears(model).values():
        if linear.lora is not None:
            b = linear.lora.b.get_value()
            noise = 0.1 * np.random.default_rng(0).standard_normal(b.shape[1:], np.float32)
            made = jax.device_put(np.broadcast_to(noise, b.shape), b.sharding)
            linear.lora.b = linear.lora.b.replace(made)
    return model


def gradients(model: str, parallel: dict, fields: dict, micro: int):
    """(loss, gradients by name in model order) of one batch."""
    config = with_adapters(model, fields, micro, **parallel)
    sums, found, *_ = batch_gradients(config, prepare=stirred)
    return {"loss": sums["loss_sum"] / sums["tokens"]}, found


@functools.cache
def single_device(model: str, layers: int):
    return gradients(model, {"fsdp": 1}, {"num_layers": layers}, 0)


@pytest.mark.parametrize(("model", "parallel", "fields", "micro"), LAYOUTS)
def test_layout_equals_single_device(model, parallel, fields, micro):
    found, wanted = (
        gradients(model, parallel, fields, micro),
        single_device(model, fields.get("num_layers", 4)),
    )
    assert_equal_but_rounding(found, wanted, TOLERANCE, FLOOR)
    assert len(found[1]) == 2 * COUNTS[model] and all(".lora." in name for name in found[1])
    assert all(array.dtype == np.float32 and array.any() for array in found[1].values())


def compiled(**parallel):
    """(abstract state, compiled step) of a model whose base is larger than what it computes."""
    config = with_adapters("llama", {"hidden_size": 256}, 2, **parallel)
    mesh = mesh_of(config)
    optimizer, abstract = tiny_abstract(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    return abstract, step.lower(abstract, tiny_batch(config, mesh), controls(mesh)).compile()


def bytes_of(tree) -> int:
    """On one device."""
    shards = [(a.sharding.shard_shape(a.shape), a.dtype) for a in jax.tree.leaves(tree)]
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 2, "fsdp": 2},
        {"pipe": 2, "fsdp": 1, "data": 2},
    ],
)
def test_the_frozen_base_has_no_gradients_or_moments(parallel):
    """It is not in the optimizer and goes through the step in place; all that is made is less than
    its float32 gradients would take, and all that is reduced is little beside it."""
    abstract, program = compiled(**parallel)
    memory, base = program.memory_analysis(), bytes_of(frozen(abstract.model))
    assert not jax.tree.leaves(frozen(abstract.optimizer))
    assert bytes_of(trained(abstract)) < 0.1 * base
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.01 * base
    assert memory.temp_size_in_bytes < base
    reduced = {"all-reduce": 0, "reduce-scatter": 0}
    for row in hlo.collectives(hlo.parse(program.as_text()), {}):
        if row.kind in reduced:
            reduced[row.kind] += row.volume
    assert 0 < sum(reduced.values()) < REDUCED * base


@pytest.mark.parametrize(
    "parallel", [{"data": 2, "fsdp": 2, "tensor": 2}, {"pipe": 2, "data": 4, "fsdp": 1}], ids=str
)
def test_planned_memory_is_that_of_the_real_state(parallel):
    config = with_adapters("llama", {}, 1, **parallel)
    config.model.dtype = DType.bfloat16
    mesh = mesh_of(config)
    state = abstract_state(config, make_optimizer(config.optim), mesh)
    found = device_memory(workload(config, mesh.size))
    assert found["master weights"] == bytes_of(trained(state.model))
    assert found["optimizer"] == 2 * found["master weights"]
    assert found["frozen"] == bytes_of(frozen(state.model))
    assert found["gradients"] <= 4 * found["master weights"]  # ZeRO-1 scatters over four at most
    whole = training_flops(config.model, 16)
    assert whole / 2 < training_flops(config.model, 16, frozen=True) < whole


def settings(prefix: str, run_dir: Path, steps: int, base: Path | None = None) -> Config:
    """A run of a tiny model; with adapters where there is a base."""
    config = with_adapters("llama", {"num_layers": 2, "max_position": 32, "vocab_size": 0}, 1)
    config.lora.targets, config.lora.dropout = ("query", "mlp.out"), 0.2
    config.parallel = ParallelConfig(pipe=2, fsdp=2, tensor=2)
    config.run_dir, config.data.paths, config.data.split = str(run_dir), (prefix,), "8,1,1"
    config.optim = OptimConfig(lr=1e-2, warmup_steps=1, decay_steps=9)
    config.train.num_steps, config.train.eval_every, config.train.eval_steps = steps, 4, 1
    config.log = LogConfig(every=1, tensorboard=False)
    config.checkpoint.keep_last, config.checkpoint.save_every = 9, 2 if base else 1
    if base is None:
        config.lora, config.parallel = LoraConfig(), ParallelConfig()
    else:
        config.checkpoint.init_from, config.model.dtype = str(base), DType.bfloat16
    return config


@pytest.mark.slow
def test_a_run_saves_its_adapters_alone_and_resumes_bitwise(tmp_path, capsys):
    prefix, base = write_corpus(tmp_path), tmp_path / "base"
    main(settings(prefix, base, 2))
    held = digests(base, 2)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    main(settings(prefix, whole, 4, base))
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step_00000004")
    main(settings(prefix, broken, 4, base))
    assert "resumed at step 2" in capsys.readouterr().out
    saved = digests(whole, 4)
    assert saved == digests(broken, 4) and saved != digests(broken, 2)
    arrays = [name for name in saved if name.startswith("model/")]
    assert len(arrays) == 2 * 2 and all("/lora/" in name for name in saved if "stack" in name)

    assert digests(base, 2) == held
    names = to_arrays({"model": frozen(load_run(str(whole)).model)})
    plain = to_arrays({"model": load_run(str(base), master_weights=True).model})
    assert names.keys() == plain.keys()
    for name, array in names.items():
        np.testing.assert_array_equal(array, plain[name].astype(jnp.bfloat16), err_msg=name)
    generate.main(generate.Options(prompt=("abc",), run_dir=str(whole), num_tokens=4))
    assert capsys.readouterr().out.startswith("abc")

    shutil.rmtree(base / "checkpoints" / "step_00000002")  # an older one is left: another base
    with pytest.raises(ValueError, match=r"frozen base .* no checkpoint of step 2 .*has .1."):
        load_run(str(whole))
    with pytest.raises(ValueError, match="cannot be read: no checkpoint of step 2"):
        main(settings(prefix, broken, 5, base))
