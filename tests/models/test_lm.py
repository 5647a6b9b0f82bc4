"""Properties of every kind of language model."""

import dataclasses
import functools

import cached
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.checkpoint.names import array_name
from maxmeg.config.layers import places
from maxmeg.config.mixers import Activation, QkNorm, RouterScore
from maxmeg.config.model import ModelConfig, Norm, NormPlace, Position
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.schema import TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.models.mixers import pattern
from maxmeg.parallel.trainable import trained

SAME = 1e-5  # absolute, of logits about 1: the order of sums differs
VOCAB, LENGTH, SMOOTHING = 37, 12, 0.1
KINDS = {
    "llama": {
        "attention.num_kv_heads": 2,
        "attention.qk_norm": QkNorm.l2,
        "rotary.scaling": RotaryScaling.longrope,
        "rotary.original_length": 5,  # every row is longer
        "rotary.short_factors": (1.0, 1.1, 1.2, 1.3),
        "rotary.long_factors": (1.0, 1.5, 2.0, 4.0),
    },
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
        "layers": "*(local,mlp attention,mlp)",
        "attention.window": 8,
        "attention.local_head_dim": 6,
        "attention.local_kv_heads": 2,
        "attention.keys_as_values": True,
        "attention.value_norm": True,
        "layer_scale": True,
        "rotary.scaling": RotaryScaling.proportional,
        "rotary.factor": 2.0,
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
        "layers": "*(local,mlp nope_attention,mlp)",
        "attention.chunk": 7,
        "attention.qk_norm": QkNorm.l2,
        "attention.temperature_length": 5,
        "attention.temperature_offset": 1,
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
        "mlp.ffn_size": 20,
        "norm_place": NormPlace.post_residual,
    },
    "mixtral": {
        "position": Position.none,
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
        "moe.scale_inputs": True,
        "moe.shared_ffn_size": 16,
        "moe.shared_gate": True,
        "mlp.bias": True,
        "mlp.activation": Activation.quick_geglu,
        "mlp.activation_clamp": 1.0,
        "mlp.glu_offset": 1.0,
        "moe.logit_bias": True,
        "moe.score": RouterScore.sqrt_softplus,
    },
}
QUICK = ("llama", "gemma", "alternating", "mixtral")
EVERY_KIND = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]


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
    ids = np.random.default_rng(1).integers(VOCAB, size=(rows, LENGTH))
    return jnp.asarray(ids, jnp.int32)


@functools.cache
def forward(kind: str):
    """(model, logits of the random ids)."""
    _, model = make(kind)
    return model, np.asarray(jax.jit(lambda model, ids: model(ids))(model, random_ids()))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_loss_is_that_of_the_logits_and_reaches_every_parameter(kind):
    model, logits = forward(kind)
    assert logits.shape == (2, LENGTH, VOCAB) and logits.std() > 0.1
    limit = make_config(kind).logit_softcap or np.inf
    assert np.isfinite(logits).all() and np.abs(logits).max() <= limit
    ids = random_ids()
    targets = np.roll(ids, -1, axis=1)
    weights = np.linspace(0.0, 1.0, ids.size, dtype=np.float32).reshape(ids.shape)

    def loss_fn(model):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
        hidden = model.hidden(ids, Context(positions))[0]
        settings = TrainConfig(loss_chunk=7, label_smoothing=SMOOTHING)
        return model.token_losses(hidden, jnp.asarray(targets), jnp.asarray(weights), settings)

    results = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(model)
    (loss, losses), gradients = jax.device_get(results)
    picked = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    logsumexp = np.log(np.exp(np.float64(logits)).sum(axis=-1))
    expected = logsumexp - picked
    np.testing.assert_allclose(losses, expected, atol=SAME)  # without smoothing
    others = (VOCAB * logsumexp - logits.sum(axis=-1) - expected) / (VOCAB - 1)
    smoothed = (1 - SMOOTHING) * expected + SMOOTHING * others
    np.testing.assert_allclose(loss, (weights * smoothed).sum(), rtol=SAME)
    for path, array in jax.tree_util.tree_leaves_with_path(trained(gradients)):
        assert np.isfinite(array).all() and array.any(), array_name(path)
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


@pytest.mark.parametrize("kind", EVERY_KIND)
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

    table = np.float32(np.random.default_rng(2).normal(size=(LENGTH, 32)))
    seen = np.abs(np.asarray(jacobian_of(table))).sum(-1)
    assert not np.triu(seen, 1).any()
    assert (np.tril(seen) + np.triu(np.ones_like(seen), 1) > 0).all()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_prefill_and_decode_equal_forward(kind):
    model, logits = forward(kind)
    ids, first = np.asarray(random_ids()), LENGTH // 2
    size = cached.size_of(2, LENGTH)
    step = jax.jit(functools.partial(cached.forward_cached, size=size))
    last, cache = step(model, ids[:, :first], jnp.int32(0), model.stack.init_cache(size))
    for i in range(first, LENGTH + 1):
        assert np.abs(np.asarray(last) - logits[:, i - 1]).max() < SAME
        if i < LENGTH:
            last, cache = step(model, ids[:, i : i + 1], jnp.int32(i), cache)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_packed_documents_equal_single_documents(kind):
    model, _ = forward(kind)
    ids, cut = random_ids(1), 5
    segments = np.where(np.arange(LENGTH) < cut, 1, 2)[None]
    positions = (np.arange(LENGTH) - cut * (segments - 1)).astype(np.int32)

    def logits(model, ids):
        ctx = Context(jnp.asarray(positions), jnp.asarray(segments))
        return model.logits(model.hidden(ids, ctx)[0])

    packed = jax.jit(logits)(model, ids)
    both = np.concatenate([ids, np.roll(ids, -cut, axis=1)])  # each first in a row; causal
    alone = np.asarray(jax.jit(lambda model, ids: model(ids))(model, both))
    expected = np.concatenate([alone[0, :cut], alone[1, : LENGTH - cut]])
    np.testing.assert_allclose(packed[0], expected, atol=SAME)


@pytest.mark.parametrize("place", ["dropout_hidden", "attention.dropout", "dropout_embedding"])
def test_dropout_is_on_only_in_training_and_differs_by_key(place):
    _, model = make("llama", **{place: 0.3})
    ids, rows = random_ids(), jnp.arange(2)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)

    @functools.partial(jax.jit, static_argnums=1)
    def run(key, training):
        ctx = Context(positions, None, rows, key, training=training)
        return model.logits(model.hidden(ids, ctx)[0])

    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    a, again, b = (np.asarray(run(key, True)) for key in keys)
    plain = np.asarray(forward("llama")[1])
    np.testing.assert_array_equal(a, again)
    assert np.abs(a - b).max() > 0.01 and np.abs(a - plain).max() > 0.01
    np.testing.assert_allclose(run(keys[0], False), plain, atol=SAME)


@pytest.mark.parametrize("scaled", [True, False])
def test_initial_weights_have_their_deviations(scaled):
    changes = {"num_layers": 8, "hidden_size": 64, "scaled_output_init": scaled}
    config = make_config("gpt2", **changes)
    model = jax.device_get(jax.jit(lambda key: LM(key, config))(jax.random.key(0)))
    for path, array in jax.tree_util.tree_leaves_with_path(model):
        name = array_name(path)
        if name.endswith(("norm.weight", "bias")):
            assert (array == name.endswith("weight")).all(), name
            continue
        wanted = 0.02 / (2 * config.num_layers) ** 0.5 if scaled and "out." in name else 0.02
        drawn = array[:VOCAB] if "embedding" in name else array
        off = abs(drawn.std() / wanted - 1)
        assert off < 5 / (2 * drawn.size) ** 0.5, name
        if "stack" in name:
            assert not np.array_equal(array[0], array[1]), name  # each layer draws its own
    assert not model.embedding.table[VOCAB:].any()  # padding


def test_a_model_that_cannot_be_is_refused_in_python():
    """With all problems. (More of them: config/test_validate.py.)"""
    fields = {"position": Position.learned, "max_position": 0, "vocab_size": 0}
    fields["parallel_norms"] = True
    config = with_fields(ModelConfig(), fields)
    with pytest.raises(ValueError) as refused:
        jax.eval_shape(lambda key: LM(key, config), jax.random.key(0))
    for problem in ("max_position=0 with", "parallel_norms=true needs", "vocab_size=0: set"):
        assert problem in str(refused.value)
