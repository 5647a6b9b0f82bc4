"""The train step: every layout gives the single device's losses and gradients; one reduction."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import (
    ALTERNATING,
    BATCH,
    CONVOLUTIONS,
    DELTA,
    DROPOUT,
    EVERYTHING,
    MLP_ONLY,
    SHARED_KEYS,
    assert_equal_but_rounding,
    batch_gradients,
    controls,
    mesh_of,
    model_gradients,
    named_gradients,
    on_host,
    tiny,
    tiny_abstract,
    tiny_batch,
    tiny_state,
)
from tables import thinned

from maxmeg.checkpoint.names import to_arrays
from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import DType
from maxmeg.config.parallel import Schedule
from maxmeg.config.schema import LossBackend, LossReduction
from maxmeg.eval_step import make_compute_copy, make_eval_step
from maxmeg.objectives.language_modelling import LANGUAGE_MODELLING
from maxmeg.ops import backend
from maxmeg.ops.attention import cudnn
from maxmeg.ops.backend import Device
from maxmeg.step import make_gradients, make_train_step

TOLERANCE = 2e-6  # relative, float32: the order of sums differs
BFLOAT16 = 2**-8  # the largest error of one rounding
OVERLAP_TOLERANCE = 1e-6  # the same, of products in parts and of layers in other loops
MEANS_TOLERANCE = 1e-5  # the same, of means of 16 microbatches with logits that are not fused
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic (a key's bias before a softmax)

CONTEXT = {"fsdp": 2, "context": 2, "fsdp_context": True, "tensor": 2}
MODELS = {
    "llama": {"attention.num_kv_heads": 1, "attention.qk_norm": QkNorm.head},
    "everything": EVERYTHING | {"recompute": "full"},
    "no dropout": EVERYTHING | dict.fromkeys(DROPOUT, 0.0) | {"recompute": "full"},
    "dropout": DROPOUT,
    "alternating": ALTERNATING | {"attention.num_kv_heads": 4},
    "convolutions": CONVOLUTIONS,
    "delta": DELTA,
    "shared keys": SHARED_KEYS,
}
LAYOUTS = [
    ("no dropout", CONTEXT, {"loss_backend": LossBackend.tiled}),
    ("dropout", {"fsdp": 2, "tensor": 2}, {"micro_batch_size": 4}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama", {"data": 8, "fsdp": 1}, {"micro_batch_size": 1}),
            ("llama", {"fsdp": 1, "tensor": 8}, {}),
            ("alternating", {"data": 2, "fsdp": 2, "tensor": 2}, {"micro_batch_size": 2}),
            ("convolutions", {"data": 2, "fsdp": 2, "tensor": 2}, {"micro_batch_size": 2}),
            ("delta", CONTEXT, {"micro_batch_size": 2}),
            ("shared keys", CONTEXT, {"micro_batch_size": 4}),
            ("everything", {"data": 2, "fsdp": 4, "zero1": False}, {}),
            ("everything", {"fsdp": 1}, {"micro_batch_size": 4}),
        )
    ),
]


def gradients(model: str | dict, parallel: dict, train: dict, dtype: DType = DType.float32):
    """(token-mean loss, gradients by name) of one batch on a layout."""
    train = {"z_loss": 1e-3, "label_smoothing": 0.1, **train}
    fields = MODELS[model] if isinstance(model, str) else model
    loss, found = model_gradients(tiny(fields | {"dtype": dtype}, train, **parallel))
    return {"loss": loss}, found


@functools.cache
def single_device(model: str, dtype: DType = DType.float32):
    return gradients(model, {"fsdp": 1}, {}, dtype)


@pytest.mark.each_commit
@pytest.mark.parametrize(("model", "parallel", "train"), LAYOUTS)
def test_layout_equals_single_device(model, parallel, train):
    found = gradients(model, parallel, train)
    assert_equal_but_rounding(found, single_device(model), TOLERANCE, FLOOR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "unroll"),
    [({"pipe": 2, "fsdp": 1, "pad_layers": True}, 3), ({"fsdp": 2, "tensor": 2}, 2)],
)
def test_layers_per_iteration_change_no_gradient(parallel, unroll):
    """2 and 7 repeats of two units; of the 7 one is left over."""
    model = {
        "num_layers": 9,
        "layers": "2(local,mlp) *(attention,mlp)",
        "attention.window": 5,
        "recompute": "selective",
    }
    found, wanted = (
        gradients(model | {"scan_unroll": each}, parallel, {"micro_batch_size": 4})
        for each in (unroll, 1)
    )
    assert_equal_but_rounding(found, wanted, OVERLAP_TOLERANCE, FLOOR)


def test_initial_state_is_bitwise_the_same_on_every_layout():
    states = []
    for parallel in ({"fsdp": 1}, {"data": 2, "fsdp": 2, "tensor": 2}):
        config = tiny(MODELS["everything"], **parallel)
        arrays = to_arrays(tiny_state(config, mesh_of(config))[2])
        states.append({name: np.asarray(array) for name, array in arrays.items()})
    for name in states[0]:
        a, b = states[0][name], states[1][name]
        if a.ndim:  # the padding of the vocabulary depends on tensor
            assert not a[len(b) :].any() and not b[len(a) :].any()
            a, b = a[: len(b)], b[: len(a)]
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.slow
def test_megatron_reduction_is_the_mean_of_microbatch_means():
    train = {"micro_batch_size": 2, "loss_reduction": LossReduction.megatron}
    _, found, model, batch = batch_gradients(tiny({}, train, data=2, fsdp=1))

    def mean_of_means(model):
        means = []
        for m in range(batch.tokens.shape[0]):
            for rank in range(2):
                here = m, slice(rank * 2, rank * 2 + 2)
                part = jax.tree.map(lambda a, here=here: jnp.asarray(np.asarray(a)[here]), batch)
                logits = model(part.tokens)
                each = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(
                    logits, part.targets[..., None], axis=-1
                ).squeeze(-1)
                means.append((each * part.loss_mask).sum() / part.loss_mask.sum())
        return sum(means) / len(means)

    wanted = named_gradients(jax.jit(jax.grad(mean_of_means))(on_host(model)))
    assert_equal_but_rounding(({}, found), ({}, wanted), MEANS_TOLERANCE, FLOOR)


@pytest.mark.parametrize(
    ("parallel", "microbatch"), [({"fsdp": 1}, 0), ({"data": 2, "fsdp": 1}, 4)]
)
def test_targets_have_weights_in_the_mean_of_the_whole_batch(parallel, microbatch):
    """Only ratios count, also where the sum is below 1; and a row of weight 2 is the row twice.

    Rows 0 and 15 are equal, and belong to other devices and microbatches.
    """
    config = tiny(MLP_ONLY | {"num_layers": 1}, {"micro_batch_size": microbatch}, **parallel)
    mesh, rng = mesh_of(config), np.random.default_rng(3)
    _, abstract, state = tiny_state(config, mesh)
    function = jax.jit(make_gradients(config, mesh, abstract.model))
    tokens, targets = rng.integers(0, config.model.vocab_size, (2, BATCH, 16), dtype=np.int32)
    mask = rng.choice(np.float32([0, 1e-4, 3e-4, 2e-3]), tokens.shape)
    for array in (tokens, targets, mask):
        array[15] = array[0]
    moved = mask.copy()
    moved[0], moved[15] = 2 * mask[0], 0
    found = []
    for each in (mask, 1024 * mask, moved):
        arrays = {"tokens": tokens, "targets": targets, "loss_mask": each}
        gradients, sums = function(state.model, tiny_batch(config, mesh, **arrays), state.key)
        loss = float(LANGUAGE_MODELLING.metrics(sums)["loss"])
        assert float(sums["tokens"]) == pytest.approx(each.sum())
        found.append(({"loss": loss}, named_gradients(gradients)))
    small, large, once = found
    assert mask.sum() < 1 and small[0] == large[0]
    for name, array in small[1].items():
        np.testing.assert_array_equal(array, large[1][name], err_msg=name)
    assert_equal_but_rounding(once, small, TOLERANCE, FLOOR)
    logits_BLV = np.asarray(on_host(state.model)(jnp.asarray(tokens)), np.float64)
    chosen_BL1 = np.take_along_axis(logits_BLV, targets[..., None], axis=-1)
    losses_BL = np.log(np.exp(logits_BLV).sum(-1)) - chosen_BL1[..., 0]
    wanted = np.average(losses_BL, weights=moved)
    assert once[0]["loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.each_commit
def test_step_compiles_once_learns_and_names_its_parts():
    """The compiler writes the scopes of each operation into traces."""
    config = tiny({}, {"micro_batch_size": 2}, data=2, fsdp=2, tensor=2)
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    batch = tiny_batch(config, mesh)
    text = step.lower(state, batch, controls(mesh)).as_text(debug_info=True)
    for part in ("embedding", "norm", "attention", "mlp", "loss"):
        assert f"jvp({part})" in text
    for part in ("embedding", "norm", "loss"):
        assert f"transpose(jvp({part}))" in text
    for part in ("clip_gradients", "reduce_gradients", "optimizer"):
        assert f"{part}/" in text

    losses = []
    for _ in range(5):
        state, metrics = step(state, batch, controls(mesh))
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1
    assert losses == sorted(losses, reverse=True) and int(state.step) == 5
    whole = jax.tree.map(lambda array: array.reshape(1, BATCH, -1), batch)
    sums = make_eval_step(config, mesh, abstract.model)(state.model, whole)
    assert float(sums["loss_sum"] / sums["tokens"]) < losses[-1]


@pytest.mark.parametrize(
    ("dtype", "parallel"),
    [
        (DType.bfloat16, {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param(DType.bfloat16, {"fsdp": 8}, marks=pytest.mark.slow),
        pytest.param(DType.float32, {"fsdp": 2, "expert": 4}, marks=pytest.mark.slow),
        (DType.float32, {"fsdp": 8}),
    ],
)
def test_an_evaluation_casts_and_gathers_its_weights_once(dtype, parallel):
    """The copy is sharded as layers read it, and no batch casts or gathers over data again."""
    experts = {"layers": "*(attention,moe)", "moe.num_experts": 8, "moe.bias_balancing": True}
    heads = {"attention.num_kv_heads": 1}  # fewer than devices along tensor
    config = tiny({"num_layers": 1, "dtype": dtype} | experts | heads, {}, **parallel)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    copy = make_compute_copy(config, mesh, abstract.model)(state.model)
    config.parallel.zero1 = False
    expected = to_arrays(tiny_abstract(config, mesh)[1].model)
    masters = to_arrays(state.model)
    for name, array in to_arrays(copy).items():
        kept = name.endswith("moe.bias")
        assert array.dtype == (jnp.float32 if kept else dtype.value), name
        assert array.sharding.is_equivalent_to(expected[name].sharding, array.ndim), name
        np.testing.assert_array_equal(array, masters[name].astype(array.dtype), err_msg=name)
        master = masters[name]
        same = master.dtype == array.dtype and master.sharding.is_equivalent_to(
            array.sharding, array.ndim
        )
        assert (array is master) == same, name  # no memory for what neither changes

    evaluate, batch = make_eval_step(config, mesh, abstract.model), tiny_batch(config, mesh)
    shapes = {a.sharding.shard_shape(a.shape) for a in jax.tree.leaves(copy)}

    def casts(model) -> bool:
        text = evaluate.lower(model, batch).as_text()
        found = re.findall(r"convert .*tensor<([0-9x]+)xf32>\) -> tensor<\1xbf16>", text)
        return not shapes.isdisjoint(tuple(map(int, sizes.split("x"))) for sizes in found)

    assert not casts(copy) and casts(state.model) == (dtype is DType.bfloat16)
    if dtype is DType.bfloat16:
        whole, cast = (evaluate(model, batch)["loss_sum"] for model in (state.model, copy))
        assert whole == cast


def computed(jaxpr, primitive: str, depth: int = 0) -> Counter:
    """How often a jaxpr computes a primitive, by the number of loops around it."""
    found = Counter()
    for equation in jaxpr.eqns:
        found[depth] += equation.primitive.name == primitive
        inner = depth + (equation.primitive.name in ("scan", "while"))
        for nested in jax.tree.leaves([*equation.params.values()]):
            if hasattr(nested := getattr(nested, "jaxpr", nested), "eqns"):
                found += computed(nested, primitive, inner)
    return +found


@pytest.mark.parametrize(
    ("model", "parallel", "count"),
    thinned(
        [
            ({"recompute": "full"}, {"tensor": 2, "fsdp": 1}, 2),
            ({**ALTERNATING, "rotary.local_base": 50.0}, {"fsdp": 1}, 4),
            ({"layers": "*(mla,mlp)", "mla.kv_rank": 16, "mla.rotary_size": 4}, {"fsdp": 1}, 2),
            ({"scan_layers": False}, {"fsdp": 1}, 2),
            ({}, {"pipe": 2, "fsdp": 1}, 4),
            ({}, {"pipe": 2, "fsdp": 1, "schedule": Schedule.zero_bubble}, 8),
        ],
        3,
    ),
)
def test_layers_share_the_rotations_of_a_microbatch(model, parallel, count):
    """Forward and recomputation of all layers read the same cosines, and so does backward."""
    traced = traced_gradients(tiny(model, {"micro_batch_size": 4}, **parallel))
    for primitive in ("cos", "sin"):
        # In the loop over ticks, by each lane; none in loops over layers.
        assert computed(traced.jaxpr, primitive) == {1: count}


def traced_gradients(config, **extra: np.ndarray):
    mesh = mesh_of(config)
    _, abstract = tiny_abstract(config, mesh)
    gradients = make_gradients(config, mesh, abstract.model)
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return jax.make_jaxpr(gradients)(abstract.model, tiny_batch(config, mesh, **extra), key)


def test_layers_share_the_mask_of_a_microbatch_that_cudnn_reads(monkeypatch):
    """One of each window, by forward and by backward; none in loops over layers."""
    visible, hopper = cudnn.visible, Device("cuda", (9, 0))

    def marked(*call):
        return jnp.cbrt(visible(*call).astype(jnp.float32)) > 0

    monkeypatch.setattr(cudnn, "visible", marked)
    monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda: 92800)
    for user in (backend, cudnn):
        monkeypatch.setattr(user, "target_device", lambda: hopper)
    fields = {"dtype": DType.bfloat16, "hidden_size": 64, "recompute": "selective"}
    fields |= {"num_layers": 5, "layers": "*(local,mlp attention,mlp)", "attention.window": 5}
    config = tiny(fields, {"micro_batch_size": 4}, fsdp=1)
    documents = np.ones((BATCH, config.data.sequence_length), np.int32)
    traced = traced_gradients(config, segment_ids=documents)
    assert computed(traced.jaxpr, "cbrt") == {1: 4}


@pytest.mark.parametrize(
    "parallel", [{"data": 8}, {"expert": 8}, {"data": 2, "fsdp": 2, "expert": 2}]
)
def test_zero1_shards_masters_and_moments_over_all_that_replicate_them(parallel):
    experts = {"layers": "*(attention,moe)", "moe.num_experts": 8}
    config = tiny(experts if "expert" in parallel else {}, {}, **{"fsdp": 1} | parallel)
    _, abstract = tiny_abstract(config, mesh_of(config))
    whole = local = 0
    for array in jax.tree.leaves(abstract):
        whole += array.size * array.dtype.itemsize
        local += np.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    assert local < 1.02 * whole / 8


@pytest.mark.parametrize("parallel", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_few_parameter_bytes_are_replicated(parallel):
    fields = {"hidden_size": 128, "attention.bias_qkv": True, "mlp.bias": True}
    config = tiny(fields, {}, **parallel)
    _, abstract = tiny_abstract(config, mesh_of(config))
    sizes = {True: 0, False: 0}
    for array in jax.tree.leaves(abstract.model):
        sizes[array.sharding.is_fully_replicated] += array.size
    assert sizes[True] < 0.02 * sizes[False]
