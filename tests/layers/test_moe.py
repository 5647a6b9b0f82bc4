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
from sharded_layers import TOLERANCE, check_equal, drawn, on_mesh

from maxmeg.layers.context import Context
from maxmeg.layers.mlp import Mlp
from maxmeg.layers.moe import Moe, MoeSpec
from maxmeg.ops.activation import GATED, activate
from maxmeg.ops.experts.routing import RoutingSpec, Score
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import AXES, BATCH_AXES, MESH_AXES, TENSOR_AXES, make_mesh
from maxmeg.parallel.rules import storage_specs
from maxmeg.parallel.spmd import spmd
from maxmeg.parallel.trainable import trained

B, L, D, F, E = 8, 8, 16, 24, 8
PLAIN = MoeSpec(D, F, routing=RoutingSpec(E, 2))
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
    "crowded": dataclasses.replace(PLAIN, logit_bias=True),
    "one of many": dataclasses.replace(PLAIN, routing=RoutingSpec(E, 1, softmax_before_topk=True)),
}
WEIGHT = 0.25  # of a microbatch: so much do the balance losses count
NODES = {"nodes": 2}
HALF = {"capacity": 0.5}
LIGHT = HALF | {"drop_by_weight": True}


def sent(kind: str, backend: str = "xla", buffer: float = 1.0) -> dict:
    """How tokens travel, products, rows of a round over the mean load."""
    return {"exchange": kind, "backend": backend, "buffer": buffer}


# Model, its changes, sizes of the mesh, what of tensor holds other experts. "crowded": all tokens
# choose the first two experts, which are both on the first device.
QUICK = [
    ("mixtral", {}, {}, 1),
    ("balanced", {}, {"expert": 4}, 1),
    ("deepseek", {}, {"expert": 2, "tensor": 2}, 1),
    ("biases", {}, {"data": 2, "expert": 2, "fsdp": 2}, 1),
    ("balanced", {}, {"fsdp": 2, "tensor": 4}, 1),
    ("deepseek", {}, {"expert": 8}, 1),
    ("biases", sent("gather", buffer=1.5), {"expert": 2, "tensor": 2}, 2),
    ("biases", NODES | {"buffer": 1.0}, {"expert": 4}, 1),
    ("crowded", {}, {}, 1),
    ("crowded", sent("all_to_all"), {"expert": 4}, 1),
    ("crowded", sent("all_to_all", "batched"), {"expert": 4}, 1),
    ("crowded", HALF, {}, 1),
    ("biases", HALF | {"backend": "batched"}, {"expert": 2, "tensor": 2}, 1),
    ("mixtral", LIGHT | {"pad": True, "exchange": "gather"}, {"expert": 2, "tensor": 2}, 2),
]
SLOW = [
    ("qwen2", {}, {"fsdp": 2, "tensor": 4}, 1),
    ("one of many", {}, {}, 1),
    ("deepseek", {}, {"data": 2, "expert": 2, "fsdp": 2}, 1),
    ("balanced", {}, {"expert": 2, "tensor": 2}, 1),
    ("biases", {}, {"expert": 8}, 1),
    ("biases", sent("gather", "batched"), {"fsdp": 2, "tensor": 2}, 1),
    ("biases", sent("gather", "batched", 4.0), {}, 1),  # one round holds all
    ("biases", sent("all_to_all"), {"tensor": 4, "expert": 2}, 2),
    ("biases", sent("all_to_all", buffer=4.0), {"tensor": 4}, 4),
    ("biases", sent("all_to_all", "batched"), {"expert": 2, "fsdp": 2, "tensor": 2}, 1),
    ("deepseek", NODES | {"backend": "batched"}, {"expert": 4, "tensor": 2}, 1),
    ("deepseek", NODES | sent("auto", "batched", 4.0), {"expert": 2, "tensor": 4}, 4),
    ("biases", HALF | {"pad": True}, {}, 1),
    ("biases", HALF | {"pad": True}, {"expert": 2, "tensor": 4}, 2),
    ("mixtral", LIGHT | {"pad": True}, {"expert": 4}, 1),
    ("mixtral", HALF | {"exchange": "all_to_all"}, {"expert": 2, "tensor": 2}, 2),
]


def model(spec: MoeSpec, is_crowded: bool = False) -> Moe:
    """Random weights, also of what starts as zeros."""
    moe = drawn(spec.make, 0.5)
    if moe.load is not None:
        moe.load[...] = 1.0 + jnp.arange(E)
    if is_crowded:
        moe.logit_bias[...] = jnp.where(jnp.arange(E) < 2, 30.0, 0.0)
    return moe


def inputs() -> tuple[jax.Array, jax.Array]:
    """Vectors, and what their outputs weigh in the loss."""
    rng = np.random.default_rng(2)
    x_BLD, slope_BLD = (jnp.float32(rng.normal(size=(B, L, D))) for _ in range(2))
    return x_BLD, slope_BLD


def outputs(spec: MoeSpec, part, x_TD):
    """Of every expert [E, T, D], or of the shared one [T, D]."""

    def linear(x, weight, bias):
        y = x @ weight[...]
        return y if bias is None else y + bias[...][..., None, :]

    if isinstance(part, Mlp):
        pairs = [(n.weight, n.bias) for n in (part.up, part.gate, part.out) if n is not None]
    else:
        pairs = [(part.up, part.up_bias), (part.gate, part.gate_bias), (part.out, part.out_bias)]
        pairs = [pair for pair in pairs if pair[0] is not None]
    up = linear(x_TD, *pairs[0])
    parts = (linear(x_TD, *pairs[1]), up) if spec.activation in GATED else (up,)
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
    """(output, auxiliary values) by the definitions, every expert on every token.

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
    beyond = dropped(spec, is_chosen, weights, parts) if spec.capacity else jnp.zeros(1, bool)
    weights = jnp.where(beyond, 0, weights)
    inner = x if moe.latent_down is None else x @ moe.latent_down.weight[...]
    y = rule.scale * jnp.einsum("te,etd->td", weights, outputs(spec, moe.experts, inner))
    y = y if moe.latent_up is None else y @ moe.latent_up.weight[...]
    if moe.shared is not None:
        shared = outputs(spec, moe.shared, x)
        if moe.shared_gate is not None:
            shared *= jax.nn.sigmoid(x @ moe.shared_gate.weight[...])
        y += shared
    shares = scores / scores.sum(-1, keepdims=True)

    def uneven(shares, chosen):
        return E / (rule.top_k * len(shares) ** 2) * (shares.sum(0) * chosen.sum(0)).sum()

    rows = zip(jnp.split(shares, B), jnp.split(is_chosen, B), strict=True)
    losses = {
        "load_balancing_loss": uneven(shares, is_chosen),
        "seq_load_balancing_loss": sum(uneven(*row) for row in rows) / B,
        "z_loss": jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2),
    }
    if moe.load is not None:
        share = moe.load[...] / moe.load[...].sum()
        evenness = E * (shares.mean(0) * jax.lax.stop_gradient(share)).sum()
        losses["global_load_balancing_loss"] = evenness
    aux = {name: len(x) * rule.top_k * loss for name, loss in losses.items()}
    aux |= {"expert_tokens": is_chosen.sum(0), "expert_dropped": beyond.sum()}
    return y.reshape(x_BLD.shape), aux


@functools.cache
def expected(spec: MoeSpec, parts: tuple[int, int] = (1, 1), is_crowded: bool = False):
    """Output, and gradients of (weighted output + balance losses) in weights and input."""
    x_BLD, slope_BLD = inputs()
    coefficients = {
        "load_balancing_loss": spec.aux_loss,
        "seq_load_balancing_loss": spec.sequence_aux_loss,
        "global_load_balancing_loss": spec.global_aux_loss,
        "z_loss": spec.z_loss,
    }

    def loss(moe, x_BLD):
        y_BLD, aux = looped(moe, x_BLD, parts)
        losses = [factor * aux[name] for name, factor in coefficients.items() if factor]
        total = sum(losses) / (B * L * spec.routing.top_k)
        return jnp.sum(y_BLD * slope_BLD) + WEIGHT * total, y_BLD

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, y_BLD), slopes = gradient(model(spec, is_crowded), x_BLD)
    return y_BLD, *slopes


def context(x_BLD: jax.Array) -> Context:
    """The context of a sequence shard."""
    length = x_BLD.shape[1] * collectives.axis_size(TENSOR_AXES)
    return Context(jnp.zeros((len(x_BLD), length), int), microbatch_weight=WEIGHT)


def on_devices(spec: MoeSpec, sizes: dict, fold: int, is_crowded: bool = False):
    """(what makes the same of the layer on a mesh, of what)."""

    def output(moe, x_BLD):
        return moe(x_BLD, context(x_BLD))[0]

    moe = model(spec, is_crowded)
    return on_mesh(output, moe, sizes, fold), (moe, *inputs())


@pytest.mark.parametrize(
    ("name", "fields", "sizes", "fold"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_output_and_gradients_are_those_of_a_loop_over_experts(name, fields, sizes, fold):
    """Also where most tokens go in further rounds; dropped copies are those that each device,
    or each piece of a sequence that travels, has too many."""
    spec = dataclasses.replace(SPECS[name], **fields)
    cut = spec.exchange != "gather" and sizes.get("expert", 1) * fold > 1
    parts = sizes.get("expert", 1), sizes.get("tensor", 1) if cut else 1
    run, operands = on_devices(spec, sizes, fold, name == "crowded")
    wanted = expected(spec, parts if spec.capacity else (1, 1), name == "crowded")
    check_equal(run(*operands), wanted)


@pytest.mark.parametrize(
    ("sizes", "kind", "parts"),
    [
        ({}, "auto", (1, 1)),
        ({"expert": 2, "tensor": 2}, "auto", (2, 2)),
        ({"expert": 2, "tensor": 2}, "gather", (2, 1)),
    ],
)
def test_auxiliary_values_are_the_losses_without_coefficients(sizes, kind, parts):
    """Summed over copies of tokens, whatever the weight of the microbatch; they set the state."""
    how = {"bias_balancing": True, "bias_rate": 0.5, "capacity": 0.5, "exchange": kind}
    moe, (x_BLD, _) = model(dataclasses.replace(SPECS["balanced"], **how)), inputs()
    moe.bias[...] = jnp.zeros(E)
    mesh = make_mesh(dict.fromkeys(AXES, 1) | sizes, jax.devices()[: math.prod(sizes.values())])

    def local(moe, x_BLD):
        return collectives.sum_over(moe(x_BLD, context(x_BLD))[2], MESH_AXES)

    specs = storage_specs(moe, mesh, zero1=False), P(BATCH_AXES, TENSOR_AXES)
    aux = jax.jit(spmd(local, mesh, specs, P()))(moe, x_BLD)
    wanted = jax.jit(lambda moe: looped(moe, x_BLD, parts)[1])(moe)
    assert aux.keys() == wanted.keys() and wanted["expert_dropped"] > 0
    for name, value in wanted.items():
        np.testing.assert_allclose(aux[name], value, rtol=TOLERANCE)
    moe.update(aux)
    counts = np.asarray(wanted["expert_tokens"])
    np.testing.assert_array_equal(moe.load[...], counts)
    np.testing.assert_array_equal(moe.bias[...], 0.5 * np.sign(counts.mean() - counts))
    assert not jax.tree.leaves(trained([moe.bias, moe.load]))


@pytest.mark.parametrize("fold", [1, 2])
def test_devices_along_tensor_route_and_send_their_own_tokens(fold):
    """The all-to-all moves the rows of a sequence shard; one product gives the logits of its
    tokens. Devices that share experts gather what arrives."""
    spec = dataclasses.replace(PLAIN, **sent("all_to_all", buffer=100.0))
    run, operands = on_devices(spec, {"expert": 2, "tensor": 2}, fold)
    text, tokens = run.lower(*operands).as_text(), B * L // 4
    room = 2 * fold * tokens * min(2, E // (2 * fold))  # of all devices of experts
    moved = re.findall(r"\"stablehlo.all_to_all.*\(tensor<([0-9x]+)xf32>\)", text)
    assert sorted(moved) == sorted([f"{room}x{D}"] * 4 + [f"{room}x2"] * 2)
    gathered = re.findall(r"\"stablehlo.all_gather.*-> tensor<([0-9x]+)xf32>", text)
    arrived = [f"{2 * room}x{D}"] * 2 + [f"{2 * room}x2"]
    assert sorted(gathered) == (sorted(arrived) if fold == 1 else [])
    products = re.findall(rf"dot_general.* -> tensor<([0-9]+)x{E}xf32>", text)
    assert set(products) == {str(tokens), str(D)}  # logits, and the router's gradient


@pytest.mark.parametrize("fields", [{"pad": True}, {"backend": "batched"}], ids=str)
def test_blocks_of_the_capacity_take_one_exchange_each_way(fields):
    """Of blocks as large as capacities, and of weights; no loop, no grouped product."""
    spec = dataclasses.replace(PLAIN, capacity=0.5, **fields)
    run, operands = on_devices(spec, {"expert": 4}, 1)
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
    run, operands = on_devices(spec, {"expert": 2, "tensor": 2}, 2)
    text = run.lower(*operands).as_text()
    added = re.findall(r"stablehlo.scatter.*?\n.*\n(.*)\n", text)
    assert added and not any("add" in line for line in added)


def test_experts_that_are_whole_decode_tokens_that_are_not_cut():
    """In decoding every device along tensor has all tokens."""
    spec, sizes = SPECS["deepseek"], dict.fromkeys(AXES, 1) | {"expert": 2, "tensor": 2}
    mesh, moe = make_mesh(sizes, jax.devices()[:4], fold=2), model(spec)
    specs, rows = storage_specs(moe, mesh, zero1=False), P(BATCH_AXES)

    def local(moe, h_BLD):
        ctx = Context(jnp.zeros(h_BLD.shape[:2], int), sequence_sharded=False)
        return moe(h_BLD, ctx)[0]

    found = jax.jit(spmd(local, mesh, (specs, rows), rows))(moe, inputs()[0])
    check_equal(found, expected(spec)[0])
