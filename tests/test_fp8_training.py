"""Training with 8-bit products: the same on every mesh, resumed bitwise, as good as bfloat16."""

import functools

import numpy as np
import pytest
import short_runs
from layouts import (
    HYBRID,
    assert_equal_but_rounding,
    mesh_of,
    model_gradients,
    tiny,
    tiny_abstract,
    tiny_batch,
    tiny_state,
)
from tables import thinned

from maxmeg.config.mixers import ExpertBackend, TensorOverlap
from maxmeg.config.quantization import Fp8Format, QuantizationConfig, QuantizationRecipe
from maxmeg.config.schema import LoraConfig
from maxmeg.config.validate import validate
from maxmeg.layers import quantized
from maxmeg.ops.backend import Device
from maxmeg.ops.quantized import Recipe
from maxmeg.step import make_eval_step
from maxmeg.train import main

TENSORWISE, MXFP8, BLOCKWISE = map(
    QuantizationConfig,
    (QuantizationRecipe.tensorwise, QuantizationRecipe.mxfp8, QuantizationRecipe.blockwise),
)
DISPATCHED = QuantizationConfig(QuantizationRecipe.mxfp8, dispatch=True)
TOLERANCE, FLOOR = 1e-5, 1e-7  # relative, float32: the order of sums differs
FLIPPED = 2e-2  # where that makes single numbers round to the next code, the other way
# Relative, in the L2 norm: single codes that round the other way give 4.5e-4. Quantization itself
# gives 3.6e-3 to 0.1, and so would other scales or blocks.
SINGLE_CODES = 2e-3
QUANTIZED = 2e-3  # of the loss of a model with random weights
MODELS = {
    "dense": {"attention.num_kv_heads": 4, "mlp.bias": True, "dropout_hidden": 0.1},
    "experts": {
        **{"layers": "*(attention,moe)", "moe.num_experts": 8, "moe.top_k": 2},
        **{"moe.ffn_size": 64, "moe.shared_ffn_size": 32},
    },
    "latent": {
        **{"layers": "*(mla,mlp)", "mla.kv_rank": 16, "mla.query_rank": 16, "mla.rotary_size": 4},
        "recompute": "full",
    },
    "hybrid": HYBRID,
}
ENDS = {"num_layers": 6, "first_layers_bf16": 1, "last_layers_bf16": 2}
MODELS["ends"] = MODELS["dense"] | ENDS
MODELS["shared heads"] = MODELS["dense"] | {"attention.num_kv_heads": 2}
WIDE = {"hidden_size": 128, "mlp.ffn_size": 256}  # a device's parts of matrices are multiples of 32
MODELS |= {
    "wide": MODELS["dense"] | WIDE,
    "wider": MODELS["dense"] | {"hidden_size": 256, "mlp.ffn_size": 512},
    "wide experts": {
        **{"layers": "*(attention,moe)", "moe.num_experts": 4, "moe.top_k": 2},
        **{"moe.ffn_size": 64, "moe.shared_ffn_size": 128, "moe.backend": ExpertBackend.batched},
        "attention.num_kv_heads": 4,
        **WIDE,
    },
}
MODELS["grouped experts"] = MODELS["wide experts"] | {"moe.backend": ExpertBackend.xla}
LAYOUTS = [
    (MXFP8, "wide", {"pipe": 2, "fsdp": 2, "tensor": 2}, 1),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (TENSORWISE, "ends", {"pipe": 2, "data": 2}, 1),
            (TENSORWISE, "dense", {"pipe": 2, "data": 2, "tensor": 2}, 1),
            (TENSORWISE, "shared heads", {"pipe": 2, "tensor": 4}, 1),
            (TENSORWISE, "experts", {"data": 2, "fsdp": 2, "expert": 2}, 2),
            (TENSORWISE, "latent", {"pipe": 2, "fsdp": 2, "tensor": 2}, 1),
            (TENSORWISE, "hybrid", {"fsdp": 2, "context": 2, "tensor": 2}, 0),
            (MXFP8, "wide", {"pipe": 2, "data": 2, "tensor": 2}, 1),
            (BLOCKWISE, "wider", {"pipe": 2, "fsdp": 2}, 1),
            (MXFP8, "wide experts", {"fsdp": 2, "expert": 2}, 2),
            (DISPATCHED, "wide experts", {"data": 2, "expert": 2}, 2),
            (DISPATCHED, "grouped experts", {"fsdp": 2, "expert": 2}, 2),
            (DISPATCHED, "grouped experts", {"pipe": 2, "tensor": 2, "expert": 2}, 2),
        )
    ),
]


def gradients(
    model: str, fp8: QuantizationConfig, micro: int = 0, **parallel: int
) -> tuple[dict, dict]:
    train = {"quantization": fp8, "micro_batch_size": micro}
    loss, found = model_gradients(tiny(MODELS[model], train, **parallel))
    return {"loss": loss}, found


@functools.cache
def alone(model: str, recipe: QuantizationRecipe) -> tuple[dict, dict]:
    return gradients(model, QuantizationConfig(recipe), fsdp=1)


@pytest.mark.parametrize(("fp8", "model", "parallel", "micro"), LAYOUTS)
def test_every_mesh_gives_the_same(fp8: QuantizationConfig, model, parallel, micro):
    found, wanted = gradients(model, fp8, micro, **parallel), alone(model, fp8.recipe)
    # Scans amplify rounding; in the other case numbers of queries' and keys' gradients flip.
    flips = model == "hybrid" or (fp8.dispatch and "tensor" in parallel)
    assert_equal_but_rounding(found, wanted, FLIPPED if flips else TOLERANCE, FLOOR, SINGLE_CODES)
    assert found[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("fp8", "model"),
    [
        *thinned([(MXFP8, "wide"), (TENSORWISE, "dense"), (BLOCKWISE, "wide")], 3),
        pytest.param(TENSORWISE, "grouped experts", marks=pytest.mark.slow),
        pytest.param(MXFP8, "grouped experts", marks=pytest.mark.slow),
    ],
)
def test_products_are_quantized_and_little_else_changes(fp8: QuantizationConfig, model: str):
    found, exact = alone(model, fp8.recipe), gradients(model, QuantizationConfig(), fsdp=1)
    assert 0 < abs(found[0]["loss"] - exact[0]["loss"]) < QUANTIZED * exact[0]["loss"]
    for name, array in exact[1].items():
        if np.abs(array).max():
            norms = np.linalg.norm(array) * np.linalg.norm(found[1][name])
            assert 0.9 < np.vdot(array, found[1][name]) / norms < 1 - 1e-9, name


@pytest.mark.slow
def test_groups_of_rows_give_what_blocks_of_rows_give():
    """Blocks of scales along tokens begin with each expert in both."""
    grouped, batched = (alone(name, MXFP8.recipe) for name in ("grouped experts", "wide experts"))
    assert_equal_but_rounding(grouped, batched, TOLERANCE, FLOOR)


def test_first_and_last_layers_are_groups_that_stay_wide():
    model = tiny_abstract(config := tiny(MODELS["ends"]), mesh_of(config))[1].model
    assert model.stack.repeats == (1, 3, 2)
    found = [
        getattr(module, name) for module, name in quantized.quantized_matrices(model, Recipe())
    ]
    assert [weight.shape[0] for weight in found] == [3] * 7
    config.model.first_layers_bf16 = 4
    with pytest.raises(ValueError, match=r"last_layers_bf16 = 6 must be less than model\.num_la"):
        validate(config, 1)


@pytest.mark.slow
def test_evaluation_and_adapters_compute_with_codes():
    for lora in (LoraConfig(), LoraConfig(rank=2)):
        losses = []
        for fp8 in (TENSORWISE, QuantizationConfig()):
            config = tiny({"attention.num_kv_heads": 4}, {"quantization": fp8}, fsdp=2)
            config.lora = lora
            mesh = mesh_of(config)
            _, abstract, state = tiny_state(config, mesh)
            text = make_eval_step(config, mesh, abstract.model).lower(
                state.model, tiny_batch(config, mesh)
            )
            losses.append("f8E4M3FN" in text.as_text())
        assert losses == [True, False]
    loss, _ = model_gradients(config)
    assert np.isfinite(loss)


def test_what_cannot_run_is_refused(monkeypatch):
    config = tiny({}, {"quantization": TENSORWISE}, fsdp=2)
    monkeypatch.setattr(quantized, "target_device", lambda: Device("cuda", (8, 0)))
    with pytest.raises(ValueError, match=r"8\.9 \(Ada\) or newer, found 8\.0: set train"):
        model_gradients(config)
    config.train.quantization = MXFP8
    monkeypatch.setattr(quantized, "target_device", lambda: Device("cuda", (9, 0)))
    with pytest.raises(ValueError, match=r"10\.0 \(Blackwell\) or newer, found 9\.0: set .*wise"):
        model_gradients(config)
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=r"blocks of 32 weights, so the sizes of the 16 x \d+ shard"
    ):
        model_gradients(config)
    config.train.quantization = BLOCKWISE
    with pytest.raises(ValueError, match=r"no effect: no matrix .* sizes .* multiples of 128; cho"):
        model_gradients(config)
    with pytest.raises(ValueError, match=r"dispatch=True has no effect where tokens are not exch"):
        validate(tiny(MODELS["grouped experts"], {"quantization": DISPATCHED}, fsdp=2), 2)
    config = tiny({}, {"quantization": TENSORWISE}, fsdp=2)
    config.parallel.tensor_overlap = TensorOverlap.on
    with pytest.raises(
        ValueError, match=r"cannot be combined with train\.quantization\.recipe=tensorwise"
    ):
        validate(config, 2)
    for fp8 in (
        QuantizationConfig(format=Fp8Format.e4m3),
        QuantizationConfig(QuantizationRecipe.mxfp8, Fp8Format.e4m3),
    ):
        with pytest.raises(ValueError, match=r"train\.quantization\.format=e4m3 has no effect"):
            validate(tiny({}, {"quantization": fp8}), 1)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    corpus = short_runs.write_corpus(tmp_path)

    def run(folder, steps):
        config = short_runs.config(corpus, folder, steps, {}, {"fsdp": 4, "tensor": 2})
        config.train.quantization = TENSORWISE
        main(config)

    short_runs.resumed_bitwise(run, tmp_path)
