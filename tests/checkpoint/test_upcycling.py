"""A model with experts that begins with a dense one's weights computes what that does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state
from tables import thinned

from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.names import array_name, nested, to_arrays
from maxmeg.config import files
from maxmeg.config.files import CHECKPOINTS
from maxmeg.config.initial import changes
from maxmeg.config.mixers import Activation, RouterScore
from maxmeg.config.setting import with_fields
from maxmeg.models.lm import LM

SAME = 1e-5  # absolute, of logits about 1: the order of sums differs
WIDTH = 48
DENSE = {"num_layers": 3, "mlp.ffn_size": WIDTH, "attention.num_heads": 4, "init_std": 0.3}
CASES = {  # fields, those of the parallel layout
    "copies": ({"layers": "*(attention,moe)", "moe.num_experts": 4}, {}),
    "slices": (
        {
            "layers": "*(attention,moe)",
            "moe.num_experts": 12,
            "moe.top_k": 6,
            "moe.ffn_size": 16,
            "moe.scale": 2.0,
            "moe.score": RouterScore.sigmoid,
            "moe.normalize_weights": True,
            "moe.bias_balancing": True,
        },
        {"pipe": 3, "expert": 2, "fsdp": 1, "pad_layers": True},
    ),
    "placed": (
        {
            "layers": "*(attention,moe attention,mlp)",
            "moe.num_experts": 4,
            "moe.ffn_size": 24,
            "moe.softmax_before_topk": True,
            "moe.normalize_weights": True,
            "moe.global_aux_loss": 0.1,
            "moe.top_k": 4,
        },
        {"expert": 2, "tensor": 2, "fsdp": 2},
    ),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return made(tmp_path_factory, {"mlp.activation": Activation.swiglu})


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    return made(tmp_path_factory, {"mlp.activation": Activation.gelu, "mlp.bias": True})


@pytest.fixture(scope="module")
def copied(dense):
    """The model with experts that are copies of the dense model's MLPs."""
    return begun(dense, *CASES["copies"])


def made(tmp_path_factory, fields: dict):
    """(folder, config, model)."""
    folder = str(tmp_path_factory.mktemp("dense"))
    fields = {**DENSE, **fields}
    config = tiny(fields, fsdp=1)
    shapes = jax.eval_shape(lambda key: LM(key, config.model), jax.random.key(0))
    rng = np.random.default_rng(0)

    def draw(path, like):
        start = array_name(path).endswith("norm.weight")
        return jnp.asarray(start + 0.2 * rng.normal(size=like.shape), like.dtype)

    model = jax.tree_util.tree_map_with_path(draw, shapes)
    tree = nested(to_arrays({"model": model}))
    checkpointer = Checkpointer(f"{folder}/{CHECKPOINTS}", asynchronous=False)
    assert checkpointer.save(0, tree, {"config": files.to_dict(config), "tokenizer": "words"})
    return folder, config, model


def begun(dense, fields: dict, parallel: dict | None = None, noise: float = 0.0):
    """The model in model order, on one device."""
    folder, config, _ = dense
    own = {**vars(config.model), **fields}
    made = tiny(own, {"micro_batch_size": 1}, **({"fsdp": 1} | (parallel or {})))
    made.checkpoint.init_from, made.checkpoint.upcycle_noise = folder, noise
    _, abstract, state = tiny_state(made, mesh_of(made))
    layout = abstract.model.stack.layout
    plain = jax.eval_shape(lambda key: LM(key, made.model), jax.random.key(0))
    arrays = {n: np.asarray(a) for n, a in to_arrays(state.model).items()}

    def take(path, like):
        array = arrays[array_name(path)]
        if array_name(path).startswith("stack."):
            array = array[layout.places(int(array_name(path).split(".")[2]))]
        return jnp.asarray(array[tuple(slice(size) for size in like.shape)])

    return jax.tree_util.tree_map_with_path(take, plain)


@pytest.mark.parametrize(
    ("name", "source"), thinned(zip(CASES, ("dense", "biased", "dense"), strict=True), 3)
)
def test_an_upcycled_model_computes_what_the_dense_model_does(request, name, source):
    ids = jax.random.randint(jax.random.key(1), (2, 12), 0, 61)
    dense = request.getfixturevalue(source)
    is_shared = name == "copies"
    model = request.getfixturevalue("copied") if is_shared else begun(dense, *CASES[name])
    actual, wanted = (jax.jit(each)(ids) for each in (model, dense[2]))
    assert float(jnp.std(wanted)) > 0.1
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=SAME * float(jnp.abs(wanted).max()))


def test_a_model_begins_with_other_numbers_of_16_bit_layers(tmp_path_factory):
    fields = {"num_layers": 4, "layers": "*(attention,mlp attention,moe)"}
    fields |= {"moe.num_experts": 4, "moe.ffn_size": 24, "moe.top_k": 2}
    source = made(tmp_path_factory, fields | {"first_layers_bf16": 1, "last_layers_bf16": 2})
    after = {"first_layers_bf16": 0, "last_layers_bf16": 1}
    model = begun(source, after, {"expert": 2, "fsdp": 2})
    assert jax.tree.structure(model) != jax.tree.structure(source[2])  # other groups of layers
    ids = jax.random.randint(jax.random.key(1), (2, 12), 0, 61)
    actual, wanted = (jax.jit(each)(ids) for each in (model, source[2]))
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=SAME * float(jnp.abs(wanted).max()))


def test_noise_makes_copies_differ(dense, copied):
    noisy = begun(dense, CASES["copies"][0], noise=0.1)
    models = (copied, noisy)
    experts = [model.stack.groups[0].sublayers[1].mixers["moe"].experts for model in models]
    for name in ("up", "out"):
        own, other = (np.asarray(getattr(part, name)[...]) for part in experts)
        assert (own == own[:, :1]).all()
        spread = np.sqrt(np.mean((other - own) ** 2) / np.mean(own**2))
        assert spread == pytest.approx(0.1, rel=0.1)
        assert np.abs(other - other[:, :1])[:, 1:].min(axis=(0, 2, 3)).max() > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe.ffn_size": 20}, "MLP of width 48 cannot become moe.num_experts=4 of width 20"),
        ({"moe.ffn_size": 24, "moe.top_k": 1}, "top_k=1"),
        ({"moe.ffn_size": 24, "moe.num_groups": 4}, "num_groups=4"),
        ({"moe.shared_ffn_size": 16}, "no weights for model.moe.shared_ffn_size=16"),
        ({"num_layers": 4}, "another model: num_layers 3 -> 4"),
    ],
)
def test_sizes_that_upcycling_cannot_produce_are_refused(fields, message):
    saved = tiny(DENSE).model
    wanted = with_fields(saved, {"layers": "*(attention,moe)", "moe.num_experts": 4, **fields})
    with pytest.raises(ValueError, match=message):
        changes(saved, wanted, "runs/dense")
    assert changes(
        saved, with_fields(saved, {"layers": "*(attention,moe)", "moe.num_experts": 4}), ""
    ) == ["moe in model.layers: 4 copies of each MLP, one per expert"]


def test_a_model_with_experts_goes_on_with_other_losses_and_as_many_experts(tmp_path_factory):
    source = made(
        tmp_path_factory, {"layers": "*(attention,moe)", "moe.num_experts": 4, "moe.z_loss": 0.1}
    )
    actual = begun(source, {"moe.z_loss": 0.0, "moe.global_aux_loss": 0.1})
    moe, before = (m.stack.groups[0].sublayers[1].mixers["moe"] for m in (actual, source[2]))
    np.testing.assert_array_equal(moe.router[...], before.router[...])
    np.testing.assert_array_equal(moe.experts.up[...], before.experts.up[...])
    assert moe.load.shape == (3, 4) and not moe.load[...].any()
    with pytest.raises(ValueError, match=r"is another model: moe.num_experts 4 -> 8"):
        begun(source, {"layers": "*(attention,moe)", "moe.num_experts": 8})
    with pytest.raises(ValueError, match=r"upcycle_noise=0\.1 is for a dense model"):
        begun(source, {}, noise=0.1)


def test_adapters_beside_copies_are_refused(dense):
    config = tiny(
        {**vars(dense[1].model), "layers": "*(attention,moe)", "moe.num_experts": 4}, fsdp=1
    )
    config.checkpoint.init_from, config.lora.rank = dense[0], 2
    with pytest.raises(ValueError, match=r"lora\.rank=2 would freeze experts"):
        tiny_state(config, mesh_of(config))


def test_noise_without_a_dense_model_is_refused(dense):
    config = tiny({"layers": "*(attention,moe)", "moe.num_experts": 4})
    config.checkpoint.upcycle_noise = 0.1
    with pytest.raises(ValueError, match=r"upcycle_noise=0\.1 has no effect without"):
        mesh_of(config)
