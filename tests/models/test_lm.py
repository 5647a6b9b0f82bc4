"""Properties of every kind of language model."""

import dataclasses
import enum
import functools

import cached
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import thinned

from maxmeg.config.layers import places
from maxmeg.config.mixers import Activation, QkNorm, RotaryScaling, RouterScore
from maxmeg.config.model import ModelConfig, Norm, NormPlace, Position
from maxmeg.config.schema import TrainConfig
from maxmeg.config.setting import get, walk, with_fields
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.models.mixers import pattern
from maxmeg.parallel.trainable import trained
from maxmeg.state import array_name

SAME = 1e-5  # absolute, of logits about 1: the order of sums differs
VOCAB, LENGTH = 37, 12
KINDS = {
    "llama": {"attention.num_kv_heads": 2, "attention.qk_norm": QkNorm.l2},
    "gpt2": {
        "mlp.activation": Activation.gelu_tanh,
        "norm": Norm.layernorm,
        "position": Position.learned,
        "max_position": LENGTH,
        "attention.bias_qkv": True,
        "attention.bias_out": True,
        "mlp.bias": True,
        "tied": True,
    },
    "neox": {
        "mlp.activation": Activation.gelu,
        "norm": Norm.layernorm,
        "rotary.fraction": 0.5,
        "layers": "*(attention+mlp)",
        "mlp.bias": True,
        "parallel_norms": True,
        "attention.sinks": True,
    },
    "gemma": {
        "mlp.activation": Activation.geglu,
        "norm_one_plus": True,
        "attention.qk_norm": QkNorm.head,
        "logit_softcap": 5.0,
        "attention.softcap": 2.0,
        "attention.scale": 0.5,
        "layers": "*(local,mlp)",
        "attention.window": 8,
        "norm_place": NormPlace.sandwich,
        "embedding_scale": 4.0,
        "attention.num_kv_heads": 1,
        "attention.head_dim": 12,
        "tied": True,
    },
    "odd": {
        "mlp.activation": Activation.relu_squared,
        "norm": Norm.layernorm,
        "norm_one_plus": True,
        "rotary.interleaved": True,
        "norm_place": NormPlace.post,
        "attention.qk_norm": QkNorm.heads,
        "scaled_output_init": False,
    },
    "alternating": {
        "num_layers": 3,
        "layers": "*(local,mlp attention,mlp)",
        "attention.window": 6,
        "rotary.base": 1000.0,
        "rotary.local_base": 20.0,
        "rotary.scaling": RotaryScaling.linear,
        "rotary.factor": 2.0,
        "attention.qk_norm": QkNorm.head,
    },
    "mixtral": {
        "layers": "*(attention,moe attention,mlp)",
        "moe.num_experts": 4,
        "attention.num_kv_heads": 2,
        "moe.softmax_before_topk": True,
    },
    "deepseek": {
        "num_layers": 3,
        "layers": "mla,mlp *(mla,moe)",
        "moe.num_experts": 8,
        "moe.top_k": 3,
        "moe.ffn_size": 24,
        "moe.shared_ffn_size": 16,
        "moe.score": RouterScore.sigmoid,
        "moe.normalize_weights": True,
        "moe.scale": 2.5,
        "moe.num_groups": 4,
        "moe.topk_groups": 2,
        "moe.group_score_topk": 1,
        "moe.bias_balancing": True,
        "attention.head_dim": 6,
        "mla.kv_rank": 12,
        "mla.query_rank": 20,
        "mla.rotary_size": 4,
        "mla.value_size": 5,
        "mla.norm_eps": 0.1,
        "rotary.interleaved": True,
    },
    "gated experts": {
        "layers": "*(attention,moe)",
        "moe.num_experts": 4,
        "moe.latent_size": 12,
        "moe.shared_ffn_size": 16,
        "moe.shared_gate": True,
        "mlp.bias": True,
        "mlp.activation": Activation.quick_geglu,
        "mlp.activation_clamp": 1.0,
        "mlp.glu_offset": 1.0,
        "moe.logit_bias": True,
        "moe.score": RouterScore.sqrt_softplus,
    },
    "without positions": {
        "position": Position.none,
        "mlp.ffn_size": 20,
        "norm_place": NormPlace.post_residual,
    },
}
FEW = thinned(KINDS, 3)


def make_config(kind: str, **changes) -> ModelConfig:
    fields = {"vocab_size": VOCAB, "num_layers": 2, "hidden_size": 32, "attention.num_heads": 4}
    return with_fields(ModelConfig(), fields | KINDS[kind] | changes)


def make(kind: str, **changes) -> tuple[ModelConfig, LM]:
    """Every array is random, norms and biases too; made without compiling."""
    config = make_config(kind, **changes)
    shapes = jax.eval_shape(lambda key: LM(key, config), jax.random.key(0))
    rng = np.random.default_rng(0)

    def draw(path, like):
        name = array_name(path)
        start = name.endswith("norm.weight") and not config.norm_one_plus
        return jnp.asarray(start + 0.2 * rng.normal(size=like.shape), like.dtype)

    return config, jax.tree_util.tree_map_with_path(draw, shapes)


def random_ids(rows: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (rows, LENGTH), 0, VOCAB)


@functools.cache
def forward(kind: str):
    """(model, logits of the random ids)."""
    _, model = make(kind)
    return model, jax.jit(lambda model, ids: model(ids))(model, random_ids())


@pytest.mark.parametrize("kind", FEW)
def test_logits_are_finite_and_of_the_vocabulary(kind):
    config, _ = make(kind)
    _, logits = forward(kind)
    assert logits.shape == (2, LENGTH, VOCAB) and jnp.isfinite(logits).all()
    assert float(jnp.std(logits)) > 0.1
    if config.logit_softcap:
        assert float(jnp.abs(logits).max()) <= config.logit_softcap


OF_SOURCES = {
    Position.relative,
    Activation.relu,
    Activation.geglu_erf,
}  # tests/test_encoder_decoder.py, and transformers' T5 and ModernBERT
UNIFORM = ("vocab_size", "vocab_divisible_by", "num_layers", "hidden_size", "attention.num_heads")
# Tested by layouts, recomputation and dropout tests, and by those of configs and experts.
ELSEWHERE = (
    "dtype", "recompute", "init_std", "attention.backend", "attention.causal", "max_position",
    "first_layers_bf16", "last_layers_bf16",
    "norm_eps", "rotary.base", "dropout_hidden", "attention.dropout", "dropout_embedding",
    "scan_layers", "scan_unroll", "rotary.scaling", "rotary.factor", "rotary.original_length",
    "rotary.low", "rotary.high", "rotary.attention_factor", "rotary.truncate",
    "rotary.short_factors", "rotary.long_factors",
    "moe.bias_rate", "moe.aux_loss", "moe.sequence_aux_loss", "moe.z_loss",
    "moe.global_aux_loss", "moe.sinkhorn", "moe.jitter", "moe.force_balance",
    "moe.capacity_factor", "moe.drop_policy", "moe.pad_to_capacity", "moe.backend",
    "mtp.num_layers", "mtp.layers", "mtp.loss_weight", "conv.kernel_size", "conv.bias",
    "residual_scale", "logit_scale", "attention.output_scale", "attention.output_gate",
    "mlp.gate_scale", "mlp.output_scale", "norm_bias",
)  # fmt: skip


def test_the_kinds_use_every_option():
    configs = [make_config(kind) for kind in KINDS]
    for path, default, _ in walk(ModelConfig()):
        others = ("mamba.", "delta.", "bert.", "relative.", "head.", "retro.", "mup.")
        if path in UNIFORM + ELSEWHERE or path.startswith(others):
            continue
        values = {get(config, path) for config in configs}
        if isinstance(default, bool | enum.Enum):
            options = type(default) if isinstance(default, enum.Enum) else (True, False)
            assert values == set(options) - OF_SOURCES, path
        else:
            assert len(values) > 1, path


@pytest.mark.parametrize("kind", FEW)
def test_loss_is_that_of_the_logits_and_reaches_every_parameter(kind):
    model, logits = forward(kind)
    ids = random_ids()
    targets = jnp.roll(ids, -1, axis=1)
    weights = jnp.linspace(0.0, 1.0, ids.size).reshape(ids.shape)

    def loss_fn(model):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
        hidden = model.hidden(ids, Context(positions))[0]
        return model.token_losses(hidden, targets, weights, TrainConfig(loss_chunk=7))

    (loss, losses), gradients = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(model)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    expected = jax.nn.logsumexp(logits, axis=-1) - picked
    np.testing.assert_allclose(losses, expected, atol=SAME)
    np.testing.assert_allclose(loss, (weights * expected).sum(), rtol=SAME)
    for path, array in jax.tree_util.tree_leaves_with_path(trained(gradients)):
        assert jnp.isfinite(array).all() and array.any(), array_name(path)
    assert not gradients.embedding.table[VOCAB:].any()  # padding


def test_every_rotary_setting_reaches_the_layer():
    """Fields of the same name, less "rotary_", in the order in which a spec is built."""
    values = {
        "base": 7.0,
        "fraction": 0.5,
        "interleaved": True,
        "scaling": RotaryScaling.longrope,
        "factor": 3.0,
        "original_length": 5,
        "low": 0.5,
        "high": 9.0,
        "attention_factor": 1.5,
        "truncate": False,
        "short_factors": (1.0, 2.0),
        "long_factors": (3.0,),
    }
    config = with_fields(ModelConfig(), {f"rotary.{name}": value for name, value in values.items()})
    unit, _ = pattern(config)[0]
    spec = unit[0].mixers[0].rotary
    actual = dataclasses.asdict(spec) | dataclasses.asdict(spec.scaling)
    actual["scaling"] = actual.pop("kind")
    assert actual == values | {"scaling": "longrope"}


@pytest.mark.parametrize("join", [",", "+"])
def test_local_layers_have_a_window_and_a_base_of_their_own(join: str):
    fields = {
        "num_layers": 7,
        "layers": f"*(2(local{join}mlp) attention{join}mlp)",
        "attention.window": 6,
        "rotary.local_base": 20.0,
    }
    config = with_fields(ModelConfig(), fields)
    groups = pattern(config)
    for layer, place in enumerate(places(config.groups)):
        spec = groups[place.group][0][place.sublayer].mixers[0]
        wanted = (0, 10000.0) if layer % 3 == 2 else (6, 20.0)
        assert (spec.window, spec.rotary.base) == wanted


def test_label_smoothing_is_in_the_loss_and_not_in_what_is_reported():
    model, logits = forward("llama")
    ids = random_ids()
    weights = jnp.ones(ids.shape)

    def losses_with(smoothing: float):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
        hidden = model.hidden(ids, Context(positions))[0]
        return model.token_losses(hidden, ids, weights, TrainConfig(label_smoothing=smoothing))

    (plain, reported), (smoothed, same) = losses_with(0.0), losses_with(0.1)
    np.testing.assert_allclose(reported, same, atol=SAME)
    others = -(jax.nn.log_softmax(logits).sum(axis=-1) + reported) / (VOCAB - 1)
    np.testing.assert_allclose(plain, reported.sum(), rtol=SAME)
    np.testing.assert_allclose(smoothed, (0.9 * reported + 0.1 * others).sum(), rtol=SAME)


@pytest.mark.parametrize("kind", FEW)
def test_no_output_depends_on_a_later_input(kind):
    model, _ = forward(kind)
    ids = random_ids(1)
    positions = jnp.arange(LENGTH)[None]

    def outputs(table):  # as many distinct embeddings as tokens: one row a place
        rows = table[None]
        changed = jax.tree.map(lambda a: a, model)
        changed.embedding = lambda _: rows
        return jnp.sin(changed.hidden(ids, Context(positions))[0][0]).sum(-1)

    @jax.jit
    def jacobian_of(table):  # row by row: grouped products know no vmap
        pull = jax.vjp(outputs, table)[1]
        return jax.lax.map(lambda row: pull(row)[0], jnp.eye(LENGTH))

    jacobian = jacobian_of(jax.random.normal(jax.random.key(2), (LENGTH, 32)))
    seen = np.asarray(jnp.abs(jacobian).sum(-1))
    assert not np.triu(seen, 1).any()
    assert (np.tril(seen) + np.triu(np.ones_like(seen), 1) > 0).all()


@pytest.mark.parametrize("kind", FEW)
def test_prefill_and_decode_equal_forward(kind):
    model, logits = forward(kind)
    ids, first = random_ids(), LENGTH // 2
    size = cached.size_of(2, LENGTH)
    step = jax.jit(functools.partial(cached.forward_cached, size=size))
    last, cache = step(model, ids[:, :first], jnp.int32(0), model.stack.init_cache(size))
    for i in range(first, LENGTH + 1):
        assert float(jnp.abs(last - logits[:, i - 1]).max()) < SAME
        if i < LENGTH:
            last, cache = step(model, ids[:, i : i + 1], jnp.int32(i), cache)


@pytest.mark.parametrize("kind", FEW)
def test_packed_documents_equal_single_documents(kind):
    model, _ = forward(kind)
    ids, cut = random_ids(1), 5
    positions = jnp.concatenate([jnp.arange(cut), jnp.arange(LENGTH - cut)])[None]
    segments = jnp.where(jnp.arange(LENGTH) < cut, 1, 2)[None]

    def logits(model, ids):
        return model.logits(model.hidden(ids, Context(positions, segments))[0])

    packed = jax.jit(logits)(model, ids)
    both = jnp.concatenate([ids, jnp.roll(ids, -cut, axis=1)])  # each first in a row; causal
    alone = jax.jit(lambda model, ids: model(ids))(model, both)
    expected = jnp.concatenate([alone[0, :cut], alone[1, : LENGTH - cut]])
    np.testing.assert_allclose(packed[0], expected, atol=SAME)


def test_packed_documents_do_not_leak():
    _, model = make("llama")
    ids, cut = jnp.arange(LENGTH)[None], 5  # every token another row of the embedding
    segments = jnp.where(jnp.arange(LENGTH) < cut, 1, 2)[None]

    def second(model):
        ctx = Context(jnp.arange(LENGTH)[None], segments)
        return jnp.sum(jnp.sin(model.hidden(ids, ctx)[0][0, cut:]))

    gradient = jax.jit(jax.grad(second))(model).embedding.table[...]
    assert not gradient[:cut].any() and gradient[cut:LENGTH].any(axis=-1).all()


@pytest.mark.parametrize("place", ["dropout_hidden", "attention.dropout", "dropout_embedding"])
def test_dropout_is_on_only_in_training_and_differs_by_key(place):
    _, model = make("llama", **{place: 0.3})
    ids, rows = random_ids(), jnp.arange(2)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)

    @jax.jit
    def run(key):
        return model.hidden(ids, Context(positions, None, rows, key, training=True))[0]

    _, plain_model = make("llama")
    plain = plain_model.hidden(ids, Context(positions))[0]
    a, again, b = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    np.testing.assert_array_equal(a, again)
    assert float(jnp.abs(a - b).max()) > 0.01 and float(jnp.abs(a - plain).max()) > 0.01
    evaluated = model.hidden(ids, Context(positions, None, rows, jax.random.key(0)))[0]
    np.testing.assert_allclose(evaluated, plain, atol=SAME)


@pytest.mark.parametrize("scaled", [True, False])
def test_initial_weights_have_their_deviations(scaled):
    changes = {"num_layers": 8, "hidden_size": 64, "scaled_output_init": scaled}
    config = make_config("gpt2", **changes)
    model = jax.jit(lambda key: LM(key, config))(jax.random.key(0))
    for path, array in jax.tree_util.tree_leaves_with_path(model):
        name = array_name(path)
        if name.endswith(("norm.weight", "bias")):
            assert (array == name.endswith("weight")).all(), name
            continue
        wanted = 0.02 / (2 * config.num_layers) ** 0.5 if scaled and "out." in name else 0.02
        drawn = array[:VOCAB] if "embedding" in name else array
        off = abs(float(jnp.std(drawn)) / wanted - 1)
        assert off < 5 / (2 * drawn.size) ** 0.5, name
        if "stack" in name:
            assert not jnp.array_equal(array[0], array[1]), name  # each layer draws its own
    assert not model.embedding.table[VOCAB:].any()  # padding


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"attention.num_heads": 3, "hidden_size": 64}, ["hidden_size=64 is not divisible by"]),
        (
            {"attention.num_kv_heads": 3},
            ["num_heads=4 is not divisible by model.attention.num_kv_heads=3"],
        ),
        ({"vocab_size": 0}, ["model.vocab_size=0: set it to the tokenizer's size"]),
        ({"position": Position.learned, "max_position": 0}, ["model.max_position=0 with"]),
        ({"num_layers": 0, "vocab_size": -1}, ["num_layers=0 must", "vocab_size=-1 must"]),
        ({"dropout_hidden": 1.0, "norm_eps": -1.0}, ["dropout_hidden=1.0", "norm_eps=-1.0"]),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_python(settings, problems):
    config = with_fields(ModelConfig(), {"vocab_size": VOCAB, "max_position": 8} | settings)
    with pytest.raises(ValueError) as refused:
        jax.eval_shape(lambda key: LM(key, config), jax.random.key(0))
    for problem in problems:
        assert problem in str(refused.value)
