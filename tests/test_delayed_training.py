"""Training with delayed scaling: maxima reach the history from every layer and every mesh."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import short_runs
from layouts import MLP_ONLY, by_name, controls, mesh_of, tiny, tiny_batch, tiny_state
from test_quantized_training import MODELS as EARLIER

from maxmeg.config.mixers import ExpertBackend
from maxmeg.config.model import DType
from maxmeg.config.parallel import Schedule
from maxmeg.config.quantization import AmaxAlgorithm, QuantizationConfig, QuantizationRecipe
from maxmeg.config.validate import validate
from maxmeg.ops.delayed import GRADIENT, INPUT, WEIGHT
from maxmeg.state import to_arrays
from maxmeg.step import make_train_step
from maxmeg.train import main

LENGTH, STEPS = 3, 4
DELAYED = QuantizationConfig(QuantizationRecipe.delayed, amax_history_length=LENGTH)
# Relative, of losses, gradient norms and maxima. Numbers that another order of sums rounds to the
# next code change the rest, where scans amplify it.
TOLERANCES = {"hybrid": (1e-4, 1e-2, 1e-1)}
SAME = (1e-5, 1e-3, 1e-3)
SAME_LOSS = 5e-3  # relative, of four steps
MODELS = EARLIER | {
    "tokens ahead": EARLIER["dense"] | {"mtp.num_layers": 1},
    "batched": EARLIER["experts"] | {"moe.backend": ExpertBackend.batched},
}
LAYOUTS = [
    ("dense", {"fsdp": 2, "tensor": 2}, 0),
    ("dense", {"pipe": 2, "fsdp": 1}, 4),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("dense", {"pipe": 2, "fsdp": 2, "schedule": Schedule.zero_bubble}, 1),
            ("ends", {"pipe": 2, "data": 2, "tensor": 2}, 2),
            ("shared heads", {"pipe": 2, "tensor": 4, "schedule": Schedule.zero_bubble}, 1),
            ("tokens ahead", {"pipe": 2, "data": 2, "tensor": 2}, 2),
            ("batched", {"data": 2, "fsdp": 2, "expert": 2}, 2),
            ("batched", {"expert": 4, "expert_buffer": 1.0}, 0),  # in several rounds
            ("experts", {"pipe": 2, "context": 2, "tensor": 2}, 2),
            ("experts", {"expert": 4, "expert_nodes": 2, "expert_buffer": 1.0}, 0),
            ("latent", {"pipe": 2, "fsdp": 2, "tensor": 2}, 1),
            ("hybrid", {"fsdp": 2, "context": 2, "tensor": 2}, 0),
        )
    ),
]


def trained(model: str, micro: int = 0, **parallel):
    """(losses, gradient norms, {name: history of a layer}) of a few steps."""
    config = tiny(MODELS[model], {"quantization": DELAYED, "micro_batch_size": micro}, **parallel)
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step, rows = make_train_step(config, mesh, optimizer, abstract), []
    for seed in range(STEPS):
        state, found = step(state, tiny_batch(config, mesh, seed), controls(mesh))
        rows.append((float(found["loss"]), float(found["grad_norm"])))
    assert step._cache_size() == 1
    histories = by_name({"history": state.history})
    return *np.array(rows).T, histories


@functools.cache
def alone(model: str):
    return trained(model, fsdp=1)


@pytest.mark.parametrize(("model", "parallel", "micro"), LAYOUTS)
def test_every_mesh_gives_the_same(model, parallel, micro):
    found, wanted = trained(model, micro, **parallel), alone(model)
    loss, norm, maximum = TOLERANCES.get(model, SAME)
    np.testing.assert_allclose(found[0], wanted[0], rtol=loss)
    np.testing.assert_allclose(found[1], wanted[1], rtol=norm)
    assert found[2].keys() == wanted[2].keys()
    for name, history in wanted[2].items():
        other = found[2][name]
        np.testing.assert_array_equal(other[..., 0], history[..., 0], err_msg=name)
        np.testing.assert_allclose(other, history, rtol=maximum, err_msg=name)


def test_all_operands_of_quantized_layers_have_histories():
    """Query, key and value share one, as they are one product."""
    losses, _, histories = alone("dense")
    assert np.isfinite(losses).all()
    matrices = {name.removesuffix(".weight").rpartition(".")[2] for name in histories}
    assert (matrices, len(histories)) == ({"query", "out", "up", "gate"}, 5)
    for name, history in histories.items():
        assert history.shape == (2, 3, 1 + LENGTH)
        assert (history[:, :, 1:] > 0).all(), name
        assert (history[:, (WEIGHT, GRADIENT), 0] < 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["experts", "batched"])
def test_all_experts_of_a_layer_share_the_history_of_a_projection(model: str):
    experts = {
        name.rpartition(".")[2]: history
        for name, history in alone(model)[2].items()
        if "experts" in name
    }
    assert experts.keys() == {"up", "gate", "out"}
    for history in experts.values():
        assert history.shape == (2, 3, 1 + LENGTH)
        assert (history[:, :, 1:] > 0).all()
    np.testing.assert_array_equal(experts["up"][:, INPUT], experts["gate"][:, INPUT])


def test_a_skipped_step_keeps_the_history():
    config = tiny(MLP_ONLY | {"dtype": DType.float16}, {"quantization": DELAYED})
    config.optim.loss_scale.initial = 2.0**40
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    state, found = step(state, tiny_batch(config, mesh), controls(mesh))
    histories = [*to_arrays({"history": state.history}).values()]
    assert (float(found["skipped"]), np.isfinite(found["loss"])) == (1, True)
    assert all((np.asarray(history) == 0).all() for history in histories)
    scaler = dataclasses.replace(state.scaler, scale=jax.numpy.float32(2**8))
    state, found = step(
        dataclasses.replace(state, scaler=jax.device_put(scaler, abstract.scaler.scale.sharding)),
        tiny_batch(config, mesh),
        controls(mesh),
    )
    assert float(found["skipped"]) == 0
    assert all(np.asarray(history).any() for history in to_arrays(state.history).values())


@pytest.mark.parametrize(
    "settings",
    [{"margin": 1}, {"amax_history_length": 16}, {"amax_algorithm": AmaxAlgorithm.most_recent}],
)
def test_settings_of_the_history_need_the_recipe(settings):
    for recipe in (QuantizationRecipe.tensorwise, QuantizationRecipe.none):
        fp8 = QuantizationConfig(recipe, **settings)
        with pytest.raises(ValueError, match=r"has no effect without .*recipe=delayed"):
            validate(tiny({}, {"quantization": fp8}), 1)
    validate(tiny({}, {"quantization": QuantizationConfig(DELAYED.recipe, **settings)}), 1)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    corpus = short_runs.write_corpus(tmp_path)

    def run(folder, steps, parallel={"fsdp": 4, "tensor": 2}, fp8=DELAYED):  # noqa: B006
        config = short_runs.config(corpus, folder, steps, {}, parallel)
        config.train.quantization = fp8
        main(config)

    whole = short_runs.resumed_bitwise(run, tmp_path)
    names = [name for name in short_runs.digests(whole, 4) if name.startswith("history/")]
    assert len(names) == 5
    losses = [row["loss"] for row in short_runs.curve(whole)]
    for name, changed in {
        "mesh": {"parallel": {"pipe": 2, "data": 2, "tensor": 2}},
        "length": {"fp8": dataclasses.replace(DELAYED, amax_history_length=5)},
        "none": {"fp8": QuantizationConfig()},
    }.items():
        short_runs.copy_run(whole, tmp_path / name, 2)
        run(tmp_path / name, 4, **changed)
        found = [row["loss"] for row in short_runs.curve(tmp_path / name)]
        assert found == pytest.approx(losses, rel=SAME[0] if name == "mesh" else SAME_LOSS)
        kept = [n for n in short_runs.digests(tmp_path / name, 4) if n.startswith("history/")]
        assert kept == ([] if name == "none" else names)
    run(tmp_path / "none", 6)  # its checkpoint has no history
    assert np.isfinite([row["loss"] for row in short_runs.curve(tmp_path / "none")]).all()
