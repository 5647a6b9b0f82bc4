"""muP: at every width a step changes activations by as much as at the base width."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import LENGTH, VOCAB, tiny
from test_build import RATES, TREE

from maxmeg.checkpoint.names import to_arrays
from maxmeg.config.optimizers import MuonScale
from maxmeg.config.schema import Config, OptimConfig, Optimizer, TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.optim.build import make_optimizer, mup_factors
from maxmeg.program import Program

BASE, STEPS, NO_DECAY = 32, 4, {"weight_decay": 0.0}
# Factor between changes of hidden states at the base width and at 8 times it. Widths are finite:
# over 7 draws of tokens it is 0.83 to 1.25. Without muP it is over 8.
SAME = 1.3
LEARNING_RATES = {
    Optimizer.adamw: 1e-2,
    Optimizer.lion: 1e-3,
    Optimizer.sgd: 0.3,
    Optimizer.muon: 5e-3,
    Optimizer.adafactor: 1e-2,
}


def config_of(width: int, mup: bool, **fields) -> Config:
    """A model of 4 heads, whose sizes are all proportional to the width."""
    sizes = {
        "hidden_size": width,
        "attention.num_heads": 4,
        "attention.head_dim": width // 8,
        "mlp.ffn_size": 2 * width,
        "num_layers": 1,
        "init_std": 0.1,
    }
    mup_fields = {"mup.base_hidden_size": BASE, "mup.base_head_dim": BASE // 8} if mup else {}
    return tiny(sizes | mup_fields | fields)


@functools.cache
def trained(width: int, mup: bool, kind: Optimizer = Optimizer.adamw) -> tuple:
    """(model, change of its stack's output, change of its logits) after STEPS steps on the CPU."""
    config = config_of(width, mup)
    config.optim = OptimConfig(kind, lr=LEARNING_RATES[kind])
    optimizer = make_optimizer(config.optim, width=config.model.width_multiplier)
    ids_BL = jnp.asarray(np.random.default_rng(0).integers(VOCAB, size=(8, LENGTH)))
    ctx = Context(jnp.broadcast_to(jnp.arange(LENGTH), ids_BL.shape))
    rates = {"learning_rate": config.optim.lr, "weight_decay": 0.0}

    def loss_fn(model):
        x = model.stack(model.embed_tokens(ids_BL, ctx), ctx)[0]
        h_BLD, targets_BL = model.outputs(x, ctx), jnp.roll(ids_BL, -1, axis=1)
        weights_BL = jnp.full(ids_BL.shape, 1 / ids_BL.size)
        outputs = x["target"], model.logits(h_BLD)
        return model.token_losses(h_BLD, targets_BL, weights_BL, TrainConfig())[0], outputs

    @jax.jit
    def start(key):
        model = LM(key, config.model)
        return model, optimizer.init(model)

    @jax.jit
    def step(model, state):
        gradients, outputs = jax.grad(loss_fn, has_aux=True)(model)
        updates, state = optimizer.update(gradients, state, model, **rates)
        return jax.tree.map(jnp.add, model, updates), state, outputs

    (model, state), seen = start(jax.random.key(0)), []
    for _ in range(STEPS + 1):
        model, state, outputs = step(model, state)
        seen.append(jax.device_get(outputs))
    changes = (np.sqrt(np.mean((b - a) ** 2)) for a, b in zip(seen[0], seen[-1], strict=True))
    return model, *changes


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        (Optimizer.adamw, 4 * BASE),
        *(pytest.param(kind, 8 * BASE, marks=pytest.mark.slow) for kind in LEARNING_RATES),
    ],
)
def test_steps_change_activations_equally_at_all_widths(kind, width):
    _, hidden, logits = trained(BASE, True, kind)
    _, wide_hidden, wide_logits = trained(width, True, kind)
    assert hidden / SAME < wide_hidden < hidden * SAME
    assert logits / 3 < wide_logits < logits * SAME  # those of random weights shrink


def test_at_the_base_width_nothing_changes():
    """Weights after some steps have the bits of those without muP."""
    plain, found = (to_arrays(trained(BASE, mup)[0]) for mup in (False, True))
    for name, array in plain.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_initial_values_and_factors_are_the_formulas():
    """Of 4 times the base width: matrices of layers are half as large as without muP."""
    fields = {"mtp.num_layers": 1, "logit_scale": 0.5}
    configs = [config_of(4 * BASE, mup, **fields).model for mup in (False, True)]
    models = jax.jit(lambda key: [LM(key, config) for config in configs])(jax.random.key(0))
    plain, found = map(to_arrays, models)
    for name, array in plain.items():
        is_hidden = "table" not in name and array.ndim > 1 + name.startswith("stack")
        np.testing.assert_allclose(found[name], array / (2 if is_hidden else 1), rtol=1e-6)
    assert models[1].logit_scale == 0.5 / 4
    attention = models[1].stack.groups[0].sublayers[0].mixers["attention"].spec
    assert attention.scale == 4**0.5 / 16  # instead of 1 / sqrt(16)


RANKS = {
    "layers": "*(mla,mlp kda,moe)",
    "mla.query_rank": 8,
    "mla.kv_rank": 8,
    "mla.rotary_size": 2,
    "delta.num_heads": 4,
    "delta.kernel_size": 2,
    "delta.rank": 8,
    "moe.num_experts": 2,
    "moe.latent_size": 8,
    "num_layers": 2,
}
READ_RANKS = re.compile(
    r".*(mla\.(query|key|value)_up|kda\.(gate|step)|latent_up|experts\.(up|gate))\b.*"
)


def test_matrices_that_read_a_rank_are_those_of_the_base_width():
    """Their inputs do not grow with the width: neither initial values nor rates shrink."""
    configs = [config_of(4 * BASE, mup, **RANKS).model for mup in (False, True)]
    models = jax.jit(lambda key: [LM(key, config) for config in configs])(jax.random.key(0))
    plain, ours = [{"stack": model.stack} for model in models]
    optimizer, rates = make_optimizer(OptimConfig(Optimizer.sgd), width=4.0), RATES | NO_DECAY
    ones = jax.tree.map(jnp.ones_like, ours)
    steps, _ = optimizer.update(ones, optimizer.init(ours), ours, **rates)
    plain, ours, steps = map(to_arrays, (plain, ours, steps))
    matrices = {name: a for name, a in plain.items() if a.ndim > 2 and "conv" not in name}
    assert sum(READ_RANKS.fullmatch(name) is not None for name in matrices) == 8
    for name, array in matrices.items():
        factor = 4 if READ_RANKS.fullmatch(name) else 1
        np.testing.assert_allclose(ours[name], array * factor**0.5 / 2, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(steps[name], -0.1 * factor, rtol=1e-6, err_msg=name)


FACTORS = [
    (OptimConfig(), (1 / 4, 1.0)),
    (OptimConfig(Optimizer.lion), (1 / 4, 1.0)),
    (OptimConfig(Optimizer.adafactor), (1 / 4, 1.0)),
    (OptimConfig(Optimizer.sgd), (1.0, 4.0)),
    (OptimConfig(Optimizer.muon), (1 / 2, 1.0)),
    (with_fields(OptimConfig(Optimizer.muon), {"muon.scale": MuonScale.unit_rms_norm}), (1.0, 1.0)),
]


@pytest.mark.parametrize(("config", "factors"), FACTORS)
def test_factors_of_rates(config, factors):
    assert mup_factors(config, 4.0) == factors


def test_rates_and_epsilon_follow_the_factors():
    """In a run: Adam's first step is g / (|g| + eps / m), times lr / m for a matrix of a layer."""
    config = config_of(4 * BASE, True)
    config.optim = OptimConfig(eps=1.0)
    optimizer = Program(config, None).optimizer
    tree = {"stack": {"weight": TREE["weight"]}, "embedding": {"weight": TREE["weight"]}}
    updates, _ = optimizer.update(
        jax.tree.map(jnp.ones_like, tree), optimizer.init(tree), tree, **RATES
    )
    direction = 1 / (1 + 1 / 4) + 0.5 * TREE["weight"][...]
    for name, factor in (("stack", 1 / 4), ("embedding", 1.0)):
        found = updates[name]["weight"][...]
        np.testing.assert_allclose(found, -0.1 * factor * direction, rtol=1e-6)
