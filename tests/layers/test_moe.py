"""A mixture of experts is a loop over experts with balance losses, on one device and on meshes."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded_layers import check_equal, on_mesh
from tables import thinned

from maxmeg.layers.context import Context
from maxmeg.layers.moe import Moe, MoeSpec
from maxmeg.ops.activation import GATED, activate
from maxmeg.ops.experts.routing import RoutingSpec, Score
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import AXES, BATCH_AXES, make_mesh
from maxmeg.parallel.rules import storage_specs
from maxmeg.parallel.spmd import spmd

B, L, D, F, E = 8, 8, 16, 24, 8
PLAIN = MoeSpec(D, F, routing=RoutingSpec(E, 2), std=0.5, out_std=0.5)
SIGMOID = RoutingSpec(
    E, 3, Score.sigmoid, normalize_weights=True, scale=2.5, num_groups=4, topk_groups=2
)
SPECS = {
    "mixtral": PLAIN,
    "balanced": dataclasses.replace(
        PLAIN, aux_loss=0.5, sequence_aux_loss=0.3, global_aux_loss=0.4, z_loss=0.1
    ),
    "deepseek": dataclasses.replace(
        PLAIN, routing=SIGMOID, shared_ffn_size=20, bias_balancing=True, sequence_aux_loss=0.2
    ),
    "qwen2": dataclasses.replace(
        PLAIN,
        routing=RoutingSpec(E, 4, softmax_before_topk=True),
        shared_ffn_size=12,
        shared_gate=True,
    ),
    "biases": dataclasses.replace(
        PLAIN,
        bias=True,
        logit_bias=True,
        activation="gelu",
        aux_loss=0.1,
        latent_size=10,
    ),
    "one of many": dataclasses.replace(PLAIN, routing=RoutingSpec(E, 1, softmax_before_topk=True)),
}
MESHES = [
    {"expert": 4},
    {"expert": 2, "tensor": 2},
    {"data": 2, "expert": 2, "fsdp": 2},
    {"fsdp": 2, "tensor": 4},
    {"expert": 8},
]

# How, products, rows of a round over the mean load, sizes, what of tensor holds other experts.
EXCHANGES = [
    ("gather", "xla", 1.5, {"expert": 2, "tensor": 2}, 2),
    ("gather", "batched", 1.0, {"expert": 2, "tensor": 2}, 2),
    ("gather", "batched", 1.0, {"fsdp": 2, "tensor": 2}, 1),
    ("gather", "batched", 4.0, {}, 1),  # one round holds all
    ("all_to_all", "xla", 1.0, {"expert": 4}, 1),
    ("all_to_all", "xla", 1.0, {"tensor": 4, "expert": 2}, 2),
    ("all_to_all", "xla", 4.0, {"tensor": 4}, 4),
    ("all_to_all", "batched", 1.0, {"expert": 2, "fsdp": 2, "tensor": 2}, 1),
    ("all_to_all", "batched", 1.0, {"tensor": 4, "expert": 2}, 2),
    ("ragged", "xla", 1.0, {"expert": 4}, 1),
    ("ragged", "xla", 1.0, {"expert": 2, "tensor": 2}, 2),
]


CAPACITIES = [  # padded, how, what is dropped, and of which model and layout
    (False, "batched", "position", "biases", {"expert": 2, "tensor": 2}, 1),
    (True, "auto", "position", "biases", {}, 1),
    (True, "auto", "weight", "mixtral", {"expert": 4}, 1),
    (True, "auto", "position", "biases", {"expert": 2, "tensor": 4}, 2),
    (True, "gather", "weight", "mixtral", {"expert": 2, "tensor": 2}, 2),
    (False, "gather", "weight", "mixtral", {"expert": 4}, 1),
    (False, "ragged", "weight", "mixtral", {"expert": 4}, 1),
    (False, "all_to_all", "position", "mixtral", {"expert": 2, "tensor": 2}, 2),
]


def model(spec: MoeSpec) -> Moe:
    """Random weights, also of what starts as zeros."""
    moe, key = Moe(jax.random.key(0), spec), jax.random.key(1)
    leaves, tree = jax.tree.flatten(moe)
    keys = jax.random.split(key, len(leaves))
    noisy = [a + 0.1 * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=True)]
    moe = jax.tree.unflatten(tree, noisy)
    if moe.load is not None:
        moe.load[...] = 1.0 + jnp.arange(E)
    return moe


def inputs() -> tuple[jax.Array, jax.Array]:
    """Vectors, and what their outputs weigh in the loss."""
    keys = jax.random.split(jax.random.key(2), 2)
    return jax.random.normal(keys[0], (B, L, D)), jax.random.normal(keys[1], (B, L, D))


def expert(spec: MoeSpec, part, x, index=None):
    """Output of one expert, or of a shared one."""

    def linear(x, weight, bias):
        weight, bias = weight[...], None if bias is None else bias[...]
        if index is not None:
            weight, bias = weight[index], None if bias is None else bias[index]
        return x @ weight if bias is None else x @ weight + bias

    if index is None:
        pairs = [(n.weight, n.bias) for n in (part.up, part.gate, part.out) if n is not None]
    else:
        pairs = [(part.up, part.up_bias), (part.gate, part.gate_bias), (part.out, part.out_bias)]
        pairs = [pair for pair in pairs if pair[0] is not None]
    up = linear(x, *pairs[0])
    parts = (linear(x, *pairs[1]), up) if spec.activation in GATED else (up,)
    inner = activate(spec.activation, *parts, clamp=spec.clamp, offset=spec.offset)
    return linear(inner, *pairs[-1])


def dropped(spec: MoeSpec, is_chosen_TE, weights_TE, parts: tuple[int, int]):
    """Which copies are beyond the capacity of their expert, each device for itself."""
    rows, pieces = parts
    shape = (rows, B // rows, pieces, L // pieces, E)

    def cut(x):
        return x.reshape(shape).swapaxes(1, 2).reshape(rows * pieces, -1, E)

    chosen, weights = cut(is_chosen_TE), cut(weights_TE)
    limit = math.ceil(spec.capacity * spec.routing.top_k * chosen.shape[1] / E)
    keys = -weights if spec.drop_by_weight else jnp.arange(chosen.shape[1])[:, None]
    places = jnp.argsort(jnp.argsort(jnp.where(chosen, keys, jnp.inf), axis=1), axis=1)
    beyond = (chosen & (places >= limit)).reshape(rows, pieces, B // rows, -1, E)
    return beyond.swapaxes(1, 2).reshape(-1, E)


def looped(moe: Moe, x_BLD, parts: tuple[int, int] = (1, 1)):
    """(output, balance losses, tokens of each expert) by the definitions, every expert on every
    token.

    parts: rows and sequences are cut into for what an expert takes.
    """
    spec, rule = moe.spec, moe.spec.routing
    x = x_BLD.reshape(-1, D)
    logits = x @ moe.router[...]
    logits = logits if moe.logit_bias is None else logits + moe.logit_bias[...]
    by_itself = rule.score is Score.sigmoid
    scores = jax.nn.sigmoid(logits) if by_itself else jax.nn.softmax(logits)
    choice = scores + moe.bias[...] if spec.bias_balancing else scores
    if rule.num_groups > 1:
        each = jnp.sort(choice.reshape(len(x), rule.num_groups, -1), axis=-1)
        best = jnp.argsort(-each[..., -rule.scores_per_group :].sum(-1))[:, : rule.topk_groups]
        group = jnp.arange(E) // (E // rule.num_groups)
        choice = jnp.where((group[None, :, None] == best[:, None]).any(-1), choice, -1e9)
    rank = jnp.argsort(jnp.argsort(-choice))
    is_chosen = rank < rule.top_k
    if by_itself or rule.softmax_before_topk:
        weights = jnp.where(is_chosen, scores, 0)
        weights = weights / weights.sum(-1, keepdims=True) if rule.normalize_weights else weights
    else:
        weights = jax.nn.softmax(jnp.where(is_chosen, logits, -jnp.inf))
    if spec.capacity:
        weights = jnp.where(dropped(spec, is_chosen, weights, parts), 0, weights)
    inner = x if moe.latent_down is None else x @ moe.latent_down.weight[...]
    y = jnp.zeros_like(inner)
    for e in range(E):
        y += weights[:, e, None] * rule.scale * expert(spec, moe.experts, inner, e)
    y = y if moe.latent_up is None else y @ moe.latent_up.weight[...]
    if moe.shared is not None:
        shared = expert(spec, moe.shared, x)
        if moe.shared_gate is not None:
            shared *= jax.nn.sigmoid(x @ moe.shared_gate.weight[...])
        y += shared
    shares = scores / scores.sum(-1, keepdims=True)

    def uneven(shares, chosen):
        return E / (rule.top_k * len(shares) ** 2) * (shares.sum(0) * chosen.sum(0)).sum()

    rows = zip(jnp.split(shares, B), jnp.split(is_chosen, B), strict=True)
    loss = spec.aux_loss * uneven(shares, is_chosen)
    loss += spec.sequence_aux_loss * sum(uneven(*row) for row in rows) / B
    if moe.load is not None:
        share = moe.load[...] / moe.load[...].sum()
        loss += spec.global_aux_loss * E * (shares.mean(0) * jax.lax.stop_gradient(share)).sum()
    loss += spec.z_loss * jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return y.reshape(x_BLD.shape), loss, is_chosen.sum(0)


@functools.cache
def expected(spec: MoeSpec, parts: tuple[int, int] = (1, 1)):
    """Output, and gradients of (weighted output + balance losses) in weights and input."""
    x_BLD, slope_BLD = inputs()

    def loss(moe, x_BLD):
        y_BLD, balance, _ = looped(moe, x_BLD, parts)
        return jnp.sum(y_BLD * slope_BLD) + balance, y_BLD

    moe = model(spec)
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, y_BLD), (weights, into) = gradient(moe, x_BLD)
    return y_BLD, weights, into


def on_devices(
    spec: MoeSpec, sizes: dict, weight: float = 1.0, moe: Moe | None = None, fold: int = 1
):
    """(what makes the same of the layer on a mesh, of what)."""

    def output(moe, x_BLD):
        h_BLD = collectives.gather_sequence(x_BLD)
        return moe(h_BLD, Context(jnp.zeros(h_BLD.shape[:2], int), microbatch_weight=weight))[0]

    moe = moe or model(spec)
    return on_mesh(output, moe, sizes, fold), (moe, *inputs())


def found_on(*arguments, **options):
    run, operands = on_devices(*arguments, **options)
    return run(*operands)


@pytest.mark.parametrize("name", thinned(SPECS, 9))
def test_output_and_gradients_are_those_of_a_loop_over_experts(name):
    check_equal(found_on(SPECS[name], {}), expected(SPECS[name]))


def every_mesh() -> list:
    """Every mesh with one of three models, which take turns; the other pairs are slow."""
    names = ("balanced", "deepseek", "biases")
    return [
        pytest.param(name, sizes, marks=() if (i - j) % 3 == 0 else pytest.mark.slow)
        for i, sizes in enumerate(MESHES)
        for j, name in enumerate(names)
    ]


@pytest.mark.parametrize(("name", "sizes"), every_mesh(), ids=str)
def test_every_mesh_equals_one_device(name, sizes):
    check_equal(found_on(SPECS[name], sizes), expected(SPECS[name]))


@pytest.mark.parametrize(("kind", "backend", "buffer", "sizes", "fold"), thinned(EXCHANGES, 9))
def test_every_exchange_equals_one_device(kind, backend, buffer, sizes, fold):
    """Also where loads are so uneven that most of it goes in further rounds."""
    spec = dataclasses.replace(SPECS["biases"], exchange=kind, backend=backend, buffer=buffer)
    check_equal(found_on(spec, sizes, fold=fold), expected(spec))


@pytest.mark.parametrize(
    ("name", "fields", "sizes", "fold"),
    thinned(
        [
            ("biases", {"buffer": 1.0}, {"expert": 4}, 1),
            ("deepseek", {"backend": "batched"}, {"expert": 4, "tensor": 2}, 1),
            ("deepseek", {"buffer": 4.0, "backend": "batched"}, {"expert": 2, "tensor": 4}, 4),
        ],
        3,
    ),
    ids=str,
)
def test_tokens_that_cross_nodes_once_equal_one_device(name, fields, sizes, fold):
    spec = dataclasses.replace(SPECS[name], nodes=2, **fields)
    check_equal(found_on(spec, sizes, fold=fold), expected(spec))


@pytest.mark.parametrize(
    ("kind", "backend"), [("all_to_all", "xla"), ("all_to_all", "batched"), ("ragged", "xla")]
)
def test_all_tokens_to_one_device_are_exchanged(kind, backend):
    """Every router's weight is zero: the first two experts are chosen, both on the first device."""
    spec = dataclasses.replace(PLAIN, exchange=kind, backend=backend, buffer=1.0)
    moe = model(spec)
    moe.router[...] = jnp.zeros((D, E))
    y_BLD, gradients, into_BLD = found_on(spec, {"expert": 4}, moe=moe)
    x_BLD, slope_BLD = inputs()

    def both(moe, x_BLD):
        outputs = [expert(spec, moe.experts, x_BLD.reshape(-1, D), e) for e in (0, 1)]
        return (sum(outputs) / 2).reshape(x_BLD.shape)

    wanted_BLD, pull = jax.vjp(both, moe, x_BLD)
    wanted, wanted_into_BLD = pull(slope_BLD)
    check_equal((y_BLD, into_BLD), (wanted_BLD, wanted_into_BLD))
    check_equal(gradients.experts, wanted.experts)


@pytest.mark.parametrize(("pads", "how", "drop", "name", "sizes", "fold"), thinned(CAPACITIES, 4))
def test_capacity_drops_the_same_copies_however_they_travel(pads, how, drop, name, sizes, fold):
    options = {"capacity": 0.5, "drop_by_weight": drop == "weight", "pad": pads}
    options |= {"backend": how} if how == "batched" else {"exchange": how}
    spec = dataclasses.replace(SPECS[name], **options)
    parts = sizes.get("expert", 1), 1 if how == "gather" else fold
    check_equal(found_on(spec, sizes, fold=fold), expected(spec, parts))


@pytest.mark.parametrize("fields", [{"pad": True}, {"backend": "batched"}], ids=str)
def test_blocks_of_the_capacity_take_one_exchange_each_way(fields):
    """Of blocks as large as capacities, and of weights; no loop, no grouped product."""
    spec = dataclasses.replace(PLAIN, capacity=0.5, **fields)
    run, operands = on_devices(spec, {"expert": 4})
    text = run.lower(*operands).as_text()
    sent = re.findall(r"all_to_all.*\(tensor<([0-9x]+)xf32>\)", text)
    room = B * L * 2 // 4 // E // 2
    rows = (f"{E}x{room}", f"{E // 4}x{4 * room}")
    wanted = [f"{row}{width}" for row in rows for width in (f"x{D}", f"x{D}", "")]
    assert sorted(sent) == sorted(wanted)
    assert "while" not in text and "ragged_dot" not in text


@pytest.mark.parametrize("capacity", [0.0, 0.5])
def test_routing_and_dispatch_add_nothing_at_colliding_places(capacity):
    """Forward and backward; scatter-adds are slow and in no fixed order on a GPU."""
    spec = dataclasses.replace(SPECS["deepseek"], aux_loss=0.1, capacity=capacity)
    run, operands = on_devices(spec, {"expert": 2, "tensor": 2}, fold=2)
    text = run.lower(*operands).as_text()
    added = re.findall(r"stablehlo.scatter.*?\n.*\n(.*)\n", text)
    assert added and not any("add" in line for line in added)


def test_balance_counts_as_the_microbatch_does():
    """Gradients of the balance losses alone, of one microbatch of four."""
    spec = SPECS["balanced"]
    none = dict.fromkeys(("aux_loss", "sequence_aux_loss", "z_loss"), 0.0)
    plain = dataclasses.replace(spec, **none, global_aux_loss=1e-12)  # the same parameters
    runs = found_on(spec, {}), found_on(spec, {}, 0.25), found_on(plain, {})
    router = [gradients.router[...] for _, gradients, _ in runs]
    np.testing.assert_allclose(router[1] - router[2], (router[0] - router[2]) / 4, atol=1e-4)


def test_experts_that_are_whole_decode_tokens_that_are_not_cut():
    """In decoding every device along tensor has all tokens."""
    spec = SPECS["deepseek"]
    mesh, moe = (
        make_mesh(dict.fromkeys(AXES, 1) | {"expert": 2, "tensor": 2}, jax.devices()[:4], fold=2),
        model(spec),
    )
    specs, rows = storage_specs(moe, mesh, zero1=False), P(BATCH_AXES)

    def local(moe, h_BLD):
        ctx = Context(jnp.zeros(h_BLD.shape[:2], int), sequence_sharded=False)
        return moe(h_BLD, ctx)[0]

    x_BLD, _ = inputs()
    found = jax.jit(spmd(local, mesh, (specs, rows), rows))(moe, x_BLD)
    check_equal(found, looped(moe, x_BLD)[0])


def test_all_tokens_to_one_expert_drop_nothing():
    moe = model(PLAIN)
    moe.router[...] = jnp.zeros((D, E))  # every expert scores the same: the first two are chosen
    x_BLD, _ = inputs()
    found = moe(x_BLD, Context(jnp.zeros((B, L), int)))[0]
    both = [expert(PLAIN, moe.experts, x_BLD.reshape(-1, D), e) for e in (0, 1)]
    np.testing.assert_allclose(found.reshape(-1, D), (both[0] + both[1]) / 2, atol=1e-4)
    half = dataclasses.replace(PLAIN, capacity=0.5)
    moe.spec = half
    found = moe(x_BLD, Context(jnp.zeros((B, L), int)))[0].reshape(-1, D)
    kept = B * L * 2 // E // 2  # of each of the two, those that come first
    np.testing.assert_allclose(found[:kept], ((both[0] + both[1]) / 2)[:kept], atol=1e-4)
    assert not np.any(found[kept:])
