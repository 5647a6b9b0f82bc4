"""QK-clip: Megatron-LM's formulas, logits at the threshold after it, and the same on meshes."""

import dataclasses
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_runs
from layouts import controls, in_model_order, mesh_of, tiny, tiny_batch, tiny_state
from sharded_layers import drawn

from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import DType, Position
from maxmeg.config.optimizers import QkClipConfig
from maxmeg.config.schema import Masters, OptimConfig
from maxmeg.config.setting import with_fields
from maxmeg.config.validate import validate
from maxmeg.layers.attention import AttentionSpec
from maxmeg.layers.context import Context
from maxmeg.layers.mla import MlaSpec
from maxmeg.layers.qk_clip import LARGEST, QkClip
from maxmeg.ops.attention import call as attention_call
from maxmeg.ops.attention.spec import ScoreSpec
from maxmeg.runtime.metrics.attention_logits import logit_hook
from maxmeg.step import make_train_step
from maxmeg.train import main

SAME = 1e-6  # relative
ROUNDED = 1e-5  # relative, of float32 logits, whose products are made anew
OTHER_ORDER = 2e-5  # of weights after steps on meshes, where sums are made in another order
THRESHOLD, ALPHA = 3.0, 0.3
B, L, D, H, K = 2, 6, 16, 4, 8
SIZES = {"hidden_size": D, "num_heads": H, "head_dim": K}
SIZES["clip"] = QkClip(THRESHOLD, ALPHA)
LATENT = {"num_kv_heads": H, "kv_rank": 12, "rotary_size": 4, "value_size": 8}
SPECS = {
    "gqa": AttentionSpec(**SIZES, num_kv_heads=2, bias_qkv=True, sinks=True),
    "gated": AttentionSpec(**SIZES, num_kv_heads=4, output_gate=True, window=3),
    "mla": MlaSpec(**SIZES, **LATENT, query_rank=10),
    "mla, one query projection": MlaSpec(**SIZES, **LATENT),
}


@jax.jit
def clipped(layer, x_BLD):
    """Each head's largest logit before and after clipping, and what evaluation reports."""
    ctx = Context(jnp.broadcast_to(jnp.arange(L), (B, L)), rows_B=jnp.arange(B), training=True)
    before_H = layer(x_BLD, ctx)[2][LARGEST].value
    layer.update({LARGEST: before_H})
    evaluated = layer(x_BLD, dataclasses.replace(ctx, training=False))[2]
    return before_H, layer(x_BLD, ctx)[2][LARGEST].value, evaluated


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_at_most_the_threshold_afterwards(name):
    """Heads above it are then at it, with grouped queries the largest of the group."""
    layer = drawn(SPECS[name].make, 0.6)
    x_BLD = jnp.float32(np.random.default_rng(0).normal(size=(B, L, D)))
    before_H, after_H, evaluated = jax.device_get(clipped(layer, x_BLD))
    groups = before_H.reshape(layer.spec.num_kv_heads, -1).max(axis=1, keepdims=True)
    eta_GJ = np.minimum(1, THRESHOLD / groups) * np.ones((1, H // len(groups)))
    expected_H = before_H * eta_GJ.ravel()
    np.testing.assert_allclose(after_H, expected_H, rtol=ROUNDED)
    assert before_H.max() > THRESHOLD >= expected_H.max() * (1 - ROUNDED)
    assert evaluated == {}


# The power of a group's factor that multiplies its columns of each projection, by Megatron-LM's
# _clip_linear_qkv (core/transformer/attention.py), _clip_q_proj_weight and _clip_kv_proj_weight
# (core/transformer/multi_latent_attention.py). The last columns of a head's queries are rotated.
POWERS = {
    "gqa": {"query": ALPHA, "key": 1 - ALPHA, "value": 0, "out": 0},
    "mla": {
        "query_up": np.repeat([ALPHA, 1], [K, LATENT["rotary_size"]]),
        **{"key_up": 1 - ALPHA, "value_up": 0, "query_down": 0, "kv_down": 0, "out": 0},
    },
}


@pytest.mark.parametrize("name", POWERS)
def test_weights_are_those_of_megatrons_formulas(name):
    """Two stacked layers; logits above, at and below the threshold, also negative ones."""
    largest_NH = np.array([[6.0, 1.0, -2.0, 2.5], [3.0, 3.5, 100.0, -1e30]], np.float32)
    spec, groups = SPECS[name], SPECS[name].num_kv_heads
    old = drawn(lambda key: jax.vmap(spec.make)(jax.random.split(key)), 0.5)

    @jax.jit
    def updated(layer):
        layer.update({LARGEST: jnp.asarray(largest_NH)})
        return layer

    new = updated(old)
    largest_NG = largest_NH.reshape(2, groups, -1).max(axis=2)
    eta_NG = np.where(largest_NG > THRESHOLD, THRESHOLD / largest_NG, 1)
    for part, power in POWERS[name].items():
        before, after = (np.asarray(getattr(x, part).weight[...]) for x in (old, new))
        if np.any(power):
            before = before.reshape(*before.shape[:2], groups, -1)
            before = before * eta_NG[:, None, :, None] ** power
        np.testing.assert_allclose(after, before.reshape(after.shape), rtol=SAME)


def largest(spec: ScoreSpec, *qkv: jax.Array):
    """The largest score of each head that attention reports."""

    @jax.jit
    def report(*qkv):
        results = attention_call.attention_with_lse(*qkv, spec)
        return attention_call.output_and_largest(*results)[1]

    return report(*qkv)


def test_a_backend_without_the_largest_scores_gives_a_bound(monkeypatch):
    rng = np.random.default_rng(0)
    qkv = [jnp.float32(rng.normal(size=(B, L, H, K))) for _ in "qkv"]
    spec = ScoreSpec(largest=True)
    exact_H = np.asarray(largest(spec, *qkv))
    scores = np.einsum("blhk,bmhk->bhlm", *qkv[:2]) * K**-0.5
    scores = np.where(np.tri(L, dtype=bool), scores, -np.inf)
    np.testing.assert_allclose(exact_H, scores.max(axis=(0, 2, 3)), rtol=ROUNDED)
    xla = attention_call.BACKENDS["xla"]
    without = types.SimpleNamespace(
        SUPPORTS="", refuses=xla.refuses, attend=lambda *call: xla.attend(*call)[:2]
    )
    monkeypatch.setitem(attention_call.BACKENDS, "xla", without)
    bound_H = np.asarray(largest(spec, *qkv))
    assert (bound_H > exact_H).all() and (bound_H <= exact_H + math.log(L)).all()
    assert largest(ScoreSpec(), *qkv) is None


MODELS = {
    "gqa": {"attention.num_kv_heads": 2, "attention.bias_qkv": True},
    "deepseek": {
        **{"num_layers": 4, "layers": "mla,mlp *(mla,moe)", "mtp.num_layers": 1},
        **{"moe.num_experts": 4, "moe.top_k": 2, "moe.bias_balancing": True},
        **{"mla.kv_rank": 16, "mla.query_rank": 16, "mla.rotary_size": 4},
    },
}


def steps(model: str, train: dict, rate: float, optim: dict, **parallel) -> tuple[list, dict]:
    """(each layer's and head's largest logit of two steps, parameters after them)."""
    dtype = DType.bfloat16 if "masters" in optim else DType.float32
    config = tiny(MODELS[model] | {"init_std": 0.5, "dtype": dtype}, train, **parallel)
    config.optim = OptimConfig(eps=1e-3, qk_clip=QkClipConfig(THRESHOLD, ALPHA), **optim)
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step, logits = make_train_step(config, mesh, optimizer, abstract), []
    for _ in range(2):
        how = controls(mesh) | {"learning_rate": np.float32(rate)}
        state, metrics = step(state, tiny_batch(config, mesh), how)
        assert not metrics["skipped"]
        logits.append(np.asarray(metrics["layers"][LARGEST]))
    return logits, jax.device_get(in_model_order({"model": state.model}))


@pytest.mark.parametrize(
    "optim", [{}, pytest.param({"masters": Masters.remainders}, marks=pytest.mark.slow)]
)
def test_steps_clip_by_the_maxima_of_all_devices_and_microbatches(optim):
    """At rate 0 the first layer's input stays the same."""
    (first, second), _ = steps(
        "gqa", {"micro_batch_size": 4}, 0.0, optim, tensor=2, fsdp=2, zero1=True
    )
    groups_G = first[0].reshape(2, 4).max(axis=1)
    assert (groups_G > 2 * THRESHOLD).all()
    tolerance = 0.02 if optim else ROUNDED
    np.testing.assert_allclose(second[0].reshape(2, 4).max(axis=1), THRESHOLD, rtol=tolerance)


MESHES = [
    ("gqa", {}, {"tensor": 2, "fsdp": 2}),
    ("gqa", {"micro_batch_size": 4}, {"tensor": 4, "data": 2}),  # a key head on two devices
    ("gqa", {"micro_batch_size": 2}, {"pipe": 2, "data": 2, "tensor": 2}),
    *(
        ("gqa", {}, {"context": 4, "tensor": 2, "context_strategy": name})
        for name in ("ring", "gather", "exchange", "hierarchy")
    ),
    ("deepseek", {"micro_batch_size": 2}, {"pipe": 2, "tensor": 2, "data": 2, "pad_layers": True}),
    ("deepseek", {}, {"context": 2, "tensor": 2, "fsdp": 2, "zero1": False}),
]


@pytest.fixture(scope="module")
def on_one_device():
    return {name: steps(name, {}, 1e-3, {}, fsdp=1) for name in MODELS}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "train", "parallel"), MESHES)
def test_a_mesh_clips_like_one_device(model, train, parallel, on_one_device):
    logits, found = steps(model, train, 1e-3, {}, **parallel)
    wanted_logits, wanted = on_one_device[model]
    np.testing.assert_allclose(logits, wanted_logits, rtol=1e-4)
    assert np.max(wanted_logits[0]) > 2 * THRESHOLD > np.max(wanted_logits[1])

    def compare(a, b):
        np.testing.assert_allclose(a, b[tuple(map(slice, a.shape))], atol=OTHER_ORDER)

    jax.tree.map(compare, wanted, found)


def test_the_metric_is_the_largest_of_all():
    layers = {LARGEST: np.array([[1.0, 7.0], [2.0, 3.0]])}
    metrics = {"layers": dict(layers)}
    logit_hook().call(1, metrics)
    assert metrics == {LARGEST: 7.0}
    metrics = {"layers": layers | {"expert_tokens": 1}}
    logit_hook().call(1, metrics)
    assert metrics == {LARGEST: 7.0, "layers": {"expert_tokens": 1}}


@pytest.mark.slow
def test_a_run_logs_the_largest_logit(tmp_path):
    fields = {"layers": "*(attention,moe)", "moe.num_experts": 4, "init_std": 0.5}
    corpus = short_runs.write_corpus(tmp_path)
    config = short_runs.config(corpus, tmp_path / "run", 3, fields, {})
    config.optim.qk_clip.threshold = THRESHOLD
    main(config)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, lines) if LARGEST in line]
    assert found[0][LARGEST] > 2 * THRESHOLD > found[-1][LARGEST]
    assert all("expert_load_max" in line for line in found)


@pytest.mark.parametrize(
    ("fields", "clip", "message"),
    [
        ({"lora.rank": 2}, {}, r"with lora\.rank=2: set the threshold to 0"),
        ({"model.layers": "*(mamba)"}, {}, r"model.layers=\*\(mamba\) has no attention"),
        ({"model.attention.qk_norm": QkNorm.head}, {}, "with model.attention.qk_norm=head: set"),
        ({"model.attention.softcap": 5.0}, {}, "or model.attention.softcap=0.0"),
        ({"model.position": Position.relative}, {}, "biases of model.position=relative"),
        ({}, {"alpha": 1.5}, "optim.qk_clip.alpha=1.5 must be at least 0 and at most 1"),
        ({}, {"alpha": 0.3, "threshold": 0.0}, "qk_clip.alpha=0.3 has no effect without"),
        ({}, {"threshold": -1.0}, "optim.qk_clip.threshold=-1.0 must be at least 0"),
    ],
)
def test_invalid_settings_are_refused(fields, clip, message):
    config = with_fields(tiny(), fields)
    config.optim.qk_clip = with_fields(QkClipConfig(100.0), clip)
    with pytest.raises(ValueError, match=message):
        validate(config, 1)
