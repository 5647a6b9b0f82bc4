"""Training with products in 8 and 4 bits: the same on every mesh, resumed bitwise, little else."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from layouts import (
    HYBRID,
    MLP_ONLY,
    assert_equal_but_rounding,
    mesh_of,
    model_gradients,
    named_gradients,
    tiny,
    tiny_abstract,
    tiny_batch,
    tiny_state,
)

from maxmeg.config.mixers import ExpertBackend
from maxmeg.config.quantization import Fp8Format, QuantizationConfig, QuantizationRecipe
from maxmeg.config.schema import LoraConfig
from maxmeg.config.validate import validate
from maxmeg.eval_step import make_eval_step
from maxmeg.ops import recipes
from maxmeg.ops.backend import Device
from maxmeg.ops.quantized import Recipe
from maxmeg.step import make_gradients
from maxmeg.weights import quantized

RECIPES = {recipe.name: QuantizationConfig(recipe) for recipe in QuantizationRecipe}
TENSORWISE, MXFP8, BLOCKWISE = (RECIPES[n] for n in ("tensorwise", "mxfp8", "blockwise"))
NVFP4, MXFP4 = RECIPES["nvfp4"], RECIPES["mxfp4"]
TRAINING_AWARE = [RECIPES[name] for name in ("qat_nvfp4", "qat_mxfp4", "qat_int8")]
NO_FORMAT = r"train\.quantization\.format=e4m3 has no effect"
DISPATCHED = QuantizationConfig(QuantizationRecipe.mxfp8, dispatch=True)
TOLERANCE, FLOOR = 1e-5, 1e-7  # relative, float32: the order of sums differs
FLIPPED = 2e-2  # where that makes single numbers round to the next code, the other way
# Relative, in the L2 norm: single codes that round the other way give 4.5e-4 in 8 bits. Wrong
# scales or blocks give as much as quantization itself: 3.6e-3 to 0.1 in 8 bits, 6.6e-3 to 0.3 in
# int8 and 4 bits.
SINGLE_CODES, SINGLE_CODES_OF_4_BITS = 2e-3, 5e-3
QUANTIZED, QUANTIZED_TO_4_BITS = 2e-3, 5e-3  # of the loss of a model with random weights
ALIGNED = 0.9  # cosine of gradients
SPREAD = 1.25  # distance of two meshes' gradients, in distances of two keys on one device
# Of experts' gradients: each mesh puts other tokens into the blocks that nvfp4's transform mixes.
MIXED = 0.3
WIDE = {"hidden_size": 128, "mlp.ffn_size": 256}  # a device's parts of matrices are multiples of 32
MODELS = {
    "dense": {"attention.num_kv_heads": 4, "mlp.bias": True},
    "experts": {
        **{"layers": "*(attention,moe)", "moe.num_experts": 8, "moe.top_k": 2},
        **{"moe.ffn_size": 64, "moe.shared_ffn_size": 32},
    },
    "latent": {
        **{"layers": "*(mla,mlp)", "mla.kv_rank": 16, "mla.query_rank": 16, "mla.rotary_size": 4},
        "recompute": "full",
    },
    "hybrid": HYBRID,
    "narrow": MLP_ONLY | {"mlp.bias": True},
    "wide mlp": MLP_ONLY | WIDE,
}
ENDS = {"num_layers": 6, "first_layers_bf16": 1, "last_layers_bf16": 2}
MODELS["ends"] = MODELS["dense"] | ENDS
# With the usual weights one number of a gradient lies on the border between two codes.
MODELS["shared heads"] = MODELS["dense"] | {"attention.num_kv_heads": 2, "init_std": 0.03}
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
ALL = {"pipe": 2, "fsdp": 2, "tensor": 2}
# With tensor, qat_int8 scales parts of tokens. Two devices along data cut weights by ZeRO-1.
LAYOUTS = [
    (MXFP8, "wide", {"fsdp": 2, "tensor": 2}, 0),
    (TENSORWISE, "narrow", {"pipe": 2, "data": 2}, 1),
    (NVFP4, "wide mlp", {"fsdp": 2, "tensor": 2}, 0),
    (RECIPES["qat_int8"], "wide mlp", {"pipe": 2, "data": 2}, 1),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (MXFP8, "wide", ALL, 1),
            (TENSORWISE, "ends", {"pipe": 2, "data": 2}, 1),
            (TENSORWISE, "shared heads", {"pipe": 2, "tensor": 4}, 1),
            (TENSORWISE, "experts", {"data": 2, "fsdp": 2, "expert": 2}, 2),
            (TENSORWISE, "latent", ALL, 1),
            (TENSORWISE, "hybrid", {"fsdp": 2, "context": 2, "tensor": 2}, 0),
            (BLOCKWISE, "wider", {"pipe": 2, "fsdp": 2}, 1),
            (MXFP8, "wide experts", {"fsdp": 2, "expert": 2}, 2),
            (DISPATCHED, "wide experts", {"data": 2, "expert": 2}, 2),
            (DISPATCHED, "grouped experts", {"pipe": 2, "tensor": 2, "expert": 2}, 2),
            *((recipe, "wide", ALL, 1) for recipe in (NVFP4, MXFP4, *TRAINING_AWARE[:2])),
            (RECIPES["qat_int8"], "wide", {"pipe": 2, "fsdp": 4}, 1),
            (NVFP4, "wide", {"pipe": 2, "data": 2}, 1),
            (NVFP4, "wide experts", {"fsdp": 2, "expert": 2}, 0),
        )
    ),
]


@pytest.fixture
def to_nearest(monkeypatch):
    recipe = recipes.RECIPES[QuantizationRecipe.nvfp4]
    nearest = dataclasses.replace(recipe, draws=False)
    monkeypatch.setitem(recipes.RECIPES, QuantizationRecipe.nvfp4, nearest)


def gradients(
    model: str, recipe: QuantizationConfig, micro: int = 0, **parallel: int
) -> tuple[dict, dict]:
    train = {"quantization": recipe, "micro_batch_size": micro}
    loss, found = model_gradients(tiny(MODELS[model], train, **parallel))
    return {"loss": loss}, found


@functools.cache
def alone(model: str, recipe: QuantizationRecipe) -> tuple[dict, dict]:
    return gradients(model, QuantizationConfig(recipe), fsdp=1)


def in_8_bits(config: QuantizationConfig) -> bool:
    return config in (TENSORWISE, MXFP8, BLOCKWISE, DISPATCHED)


@pytest.mark.usefixtures("to_nearest")
@pytest.mark.parametrize(("config", "model", "parallel", "micro"), LAYOUTS)
def test_every_mesh_gives_the_same(config: QuantizationConfig, model, parallel, micro):
    results = gradients(model, config, micro, **parallel), alone(model, config.recipe)
    # Scans amplify rounding; in the other case numbers of queries' and keys' gradients flip.
    flips = model == "hybrid" or (config.dispatch and "tensor" in parallel)
    codes = SINGLE_CODES if in_8_bits(config) else SINGLE_CODES_OF_4_BITS
    for of_experts in (False, True):
        tolerance = FLIPPED if flips else TOLERANCE
        if of_experts and config == NVFP4:
            tolerance = MIXED
        sides = (
            (loss, {n: a for n, a in arrays.items() if (".experts." in n) == of_experts})
            for loss, arrays in results
        )
        assert_equal_but_rounding(*sides, tolerance, FLOOR, codes)
    assert results[0][0]["loss"] == pytest.approx(results[1][0]["loss"], rel=TOLERANCE)


@pytest.mark.usefixtures("to_nearest")
@pytest.mark.parametrize(
    ("config", "model"),
    [
        (MXFP8, "wide"),
        (NVFP4, "wide mlp"),
        (RECIPES["qat_int8"], "wide mlp"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (TENSORWISE, "dense"),
                (BLOCKWISE, "wide"),
                (MXFP8, "grouped experts"),
                *((recipe, "wide") for recipe in (NVFP4, MXFP4, *TRAINING_AWARE)),
            )
        ),
    ],
)
def test_products_are_quantized_and_gradients_keep_their_direction(config, model):
    found, exact = alone(model, config.recipe), gradients(model, QuantizationConfig(), fsdp=1)
    limit = QUANTIZED if in_8_bits(config) else QUANTIZED_TO_4_BITS
    assert 0 < abs(found[0]["loss"] - exact[0]["loss"]) < limit * exact[0]["loss"]
    for name, array in exact[1].items():
        if np.abs(array).max():
            norms = np.linalg.norm(array) * np.linalg.norm(found[1][name])
            assert ALIGNED < np.vdot(array, found[1][name]) / norms < 1 - 1e-9, name


@pytest.mark.slow
def test_meshes_differ_by_what_two_keys_differ_by():
    """Stochastic rounding draws other numbers for other microbatches and shards."""
    found = []
    for devices, seeds in ((1, (0, 0, 1)), (4, (0,))):
        config = tiny(MODELS["wide"], {"quantization": NVFP4}, fsdp=devices)
        mesh = mesh_of(config)
        _, abstract, state = tiny_state(config, mesh)
        function = jax.jit(make_gradients(config, mesh, abstract.model))
        batch = tiny_batch(config, mesh)
        for key in map(jax.random.key, seeds):
            arrays, _ = function(state.model, batch, jax.random.key_data(key))
            found.append(np.concatenate([a.ravel() for a in named_gradients(arrays).values()]))
    first, again, other, mesh = found
    np.testing.assert_array_equal(first, again)
    keys = np.linalg.norm(first - other)
    assert keys > 0.01 * np.linalg.norm(first)
    assert keys / SPREAD < np.linalg.norm(mesh - first) < keys * SPREAD


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
    def refused(fp8: QuantizationConfig, message: str) -> None:
        config = tiny({}, {"quantization": fp8}, fsdp=2)
        mesh = mesh_of(config)
        _, abstract = tiny_abstract(config, mesh)
        function = make_gradients(config, mesh, abstract.model)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(function, abstract.model, tiny_batch(config, mesh), abstract.key)

    monkeypatch.setattr(quantized, "target_device", lambda: Device("cuda", (8, 0)))
    refused(TENSORWISE, r"8\.9 \(Ada\) or newer, found 8\.0: set train")
    monkeypatch.setattr(quantized, "target_device", lambda: Device("cuda", (9, 0)))
    refused(MXFP8, r"10\.0 \(Blackwell\) or newer, found 9\.0: set .*wise")
    monkeypatch.undo()
    refused(MXFP8, r"blocks of 32 weights, so the sizes of the 16 x \d+ shard")
    refused(BLOCKWISE, r"no effect: no matrix .* sizes .* multiples of 128; cho")


@pytest.mark.parametrize(
    ("fp8", "fields", "parallel", "message"),
    [
        (DISPATCHED, "grouped experts", {}, r"dispatch=True has no effect where tokens are not ex"),
        (QuantizationConfig(format=Fp8Format.e4m3), "dense", {}, NO_FORMAT),
        (QuantizationConfig(MXFP8.recipe, Fp8Format.e4m3), "dense", {}, NO_FORMAT),
    ],
)
def test_settings_without_effect_are_refused(fp8, fields, parallel, message):
    with pytest.raises(ValueError, match=message):
        validate(tiny(MODELS[fields], {"quantization": fp8}, fsdp=2, **parallel), 2)
