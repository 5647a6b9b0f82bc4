"""Lion, Adafactor and SOAP against NumPy, and on meshes against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from layouts import controls, in_model_order, mesh_of, tiny, tiny_batch, tiny_state

from maxmeg.config.optimizers import AdafactorConfig, SoapConfig
from maxmeg.config.schema import OptimConfig, Optimizer
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.trainable import trained
from maxmeg.step import make_train_step

RATE, DECAY = 0.1, 0.5
STEPS = 4
SAME_UPDATE = 2e-3  # root mean square error of an update, of its own
# Of SOAP's parameters, of order 1. Rounding of 1e-6 in eigenvectors is divided by eps = 0.1 and
# multiplied by RATE in each of four steps; 5e-6 is the most that seven kinds of LAPACK show.
SAME_FORMULA = 5e-5
DISTINCT = 0.9999  # ratio of neighbouring eigenvalues, so that rounding cannot change their order
SAME_GRADIENT = 1e-6  # of SOAP's updates, of the largest, where all devices have equal gradients
MODEL = {"num_layers": 3, "layers": "*(attention,moe)", "moe.num_experts": 4, "moe.top_k": 2}
SHARDED = {"data": 2, "fsdp": 2, "tensor": 2}
STACKED = {"pipe": 2, "pad_layers": True, "fsdp": 1, "expert": 2, "data": 2, "zero1": False}
ON_MESHES = [
    (Optimizer.lion, SHARDED),
    (Optimizer.adafactor, SHARDED),
    (Optimizer.adafactor, STACKED),
]


def tree_of(**shapes: tuple[int, ...]) -> dict:
    rng = np.random.default_rng(0)
    axes = {1: ("norm",), 2: ("embed", "mlp"), 3: ("embed", "mlp"), 4: ("expert", "embed", "mlp")}
    return {
        name: nnx.Param(jnp.asarray(rng.normal(size=s), jnp.float32), axes=axes[len(s)])
        for name, s in shapes.items()
    }


def well_conditioned(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices with singular values of ratio 1.15: close ones' vectors would amplify rounding."""
    if len(shape) < 3:
        return rng.normal(size=shape)
    rows, columns = shape[-2:]
    rank = min(rows, columns)
    left, right = (np.linalg.qr(rng.normal(size=(*shape[:-2], n, rank)))[0] for n in shape[-2:])
    return left * (rank * 1.15 ** -np.arange(rank)) @ right.swapaxes(-1, -2)


def run(config: OptimConfig, tree: dict, steps: int = STEPS) -> tuple[dict, list[dict]]:
    """(parameters after so many updates, the gradients)."""
    optimizer, rng = make_optimizer(config), np.random.default_rng(1)
    state, gradients = optimizer.init(tree), []

    @jax.jit
    def step(tree, state, gradient):
        rates = {"learning_rate": RATE, "weight_decay": DECAY}
        updates, state = optimizer.update(gradient, state, tree, **rates)
        return jax.tree.map(jnp.add, tree, updates), state

    for _ in range(steps):
        gradient = jax.tree.map(lambda a: jnp.float32(well_conditioned(rng, a.shape)), tree)
        gradients.append(jax.tree.map(np.float64, gradient))
        tree, state = step(tree, state, gradient)
    return tree, gradients


def test_lion_is_the_formula():
    tree = tree_of(up=(3, 4), norm=(4,))
    found, gradients = run(OptimConfig(Optimizer.lion, beta1=0.9, beta2=0.8), tree)
    for name, decay in (("up", DECAY), ("norm", 0.0)):
        p, m = np.float64(tree[name][...]), 0.0
        for gradient in gradients:
            g = gradient[name][...]
            p = p * (1 - RATE * decay) - RATE * np.sign(0.9 * m + 0.1 * g)
            m = 0.8 * m + 0.2 * g
        np.testing.assert_allclose(found[name][...], p, rtol=1e-5)


@pytest.mark.parametrize("scale", [False, True])
def test_adafactor_is_optax(scale):
    """Whose second moments are factored where both dimensions are large."""
    config = AdafactorConfig(decay=0.7, clip=0.8, momentum=0.6, scale_by_parameter=scale)
    tree = tree_of(up=(2, 3, 8, 6), norm=(4,))
    found, gradients = run(OptimConfig(Optimizer.adafactor, adafactor=config), tree)
    steps = [
        optax.scale_by_factored_rms(decay_rate=0.7, min_dim_size_to_factor=2),
        optax.clip_by_block_rms(0.8),
        optax.ema(0.6, debias=False),
        *([optax.scale_by_param_block_rms()] if scale else []),
    ]
    chain = optax.chain(*steps)
    matrices = np.float32(tree["up"][...]).reshape(6, 8, 6)
    cases = [(n, "up", matrices[n]) for n in range(6)] + [(0, "norm", tree["norm"][...])]
    for n, name, p in cases:
        state = chain.init(p)
        for gradient in gradients:
            g = np.float32(gradient[name][...]).reshape(-1, *p.shape)[n]
            u, state = chain.update(jnp.asarray(g), state, p)
            p = p - RATE * (u + (DECAY if name == "up" else 0) * p)
        actual = np.asarray(found[name][...]).reshape(-1, *p.shape)[n]
        np.testing.assert_allclose(actual, p, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize(("rows", "columns", "steps"), [(5, 5, STEPS), (6, 4, 1)])
def test_soap_is_the_formula(rows, columns, steps, kl):
    """A matrix that is not square has a null space, whose basis is arbitrary and steers later
    steps: of such a matrix only the first update is compared, on the space that its gradient spans.
    """
    eps = 0.1  # well above the rounding of numbers that are 0 in the eigenbases
    config = OptimConfig(Optimizer.soap, beta1=0.8, beta2=0.9, eps=eps)
    config.soap = SoapConfig(factor_beta=0.7, kl=kl)
    shape = (rows, columns)
    tree = {"stack": tree_of(up=(2, 2, *shape))["up"], "embedding": tree_of(t=(4, 5))["t"]}
    found, gradients = run(config, tree, steps)

    def adam(g, m, v, step):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        return m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.9**step)) + eps), m, v

    for n in range(4):
        p = np.float64(tree["stack"][...]).reshape(4, *shape)[n]
        m, v = 0.0, 0.0
        factors, bases = [np.zeros((size, size)) for size in shape], [*map(np.eye, shape)]
        for step, gradient in enumerate(gradients, start=1):
            g = gradient["stack"][...].reshape(4, *shape)[n]
            m = bases[0] @ np.broadcast_to(m, shape) @ bases[1].T
            beta = 1 - (1 - 0.7) / (1 - 0.7**step)
            middles = [*map(np.eye, shape)]
            if kl:
                for side in (0, 1):
                    values = np.diag(bases[side].T @ factors[side] @ bases[side])
                    inverse = np.diag(1 / np.maximum(values, eps)) / len(values)
                    middles[side] = bases[side] @ inverse @ bases[side].T
            for side, product in enumerate((g @ middles[1] @ g.T, g.T @ middles[0] @ g)):
                factors[side] = factor = beta * factors[side] + (1 - beta) * product
                first = step == 1
                q = np.linalg.eigh(factor)[1] if first else np.linalg.qr(factor @ bases[side])[0]
                values = np.diag(q.T @ factor @ q)
                order = np.argsort(-values, kind="stable")
                bases[side] = q[:, order]
                ratios = values[order][1 : min(shape)] / values[order][: min(shape) - 1]
                assert ratios.max() < DISTINCT
            m = bases[0].T @ m @ bases[1]
            u, m, v = adam(bases[0].T @ g @ bases[1], m, v, step)
            p = p - RATE * (bases[0] @ u @ bases[1].T + DECAY * p)
        compared = np.eye(rows) if rows == columns else g @ np.linalg.pinv(g)
        actual = np.asarray(found["stack"][...]).reshape(4, *shape)[n]
        np.testing.assert_allclose(compared @ actual, compared @ p, atol=SAME_FORMULA)
    p, m, v = np.float64(tree["embedding"][...]), 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        u, m, v = adam(gradient["embedding"][...], m, v, step)
        p = p - RATE * (u + DECAY * p)
    np.testing.assert_allclose(found["embedding"][...], p, rtol=1e-5, atol=1e-6)


def updates_of(optimizer: Optimizer, parallel: dict) -> dict[str, np.ndarray]:
    """The changes of all parameters in two steps, layers in model order."""
    config = tiny(MODEL, {"micro_batch_size": 2}, **parallel)
    config.optim = OptimConfig(optimizer)
    config.optim.adafactor.momentum = 0.5 if optimizer is Optimizer.adafactor else 0.0
    mesh = mesh_of(config)
    transformation, abstract, state = tiny_state(config, mesh)
    before = jax.device_get(in_model_order({"model": state.model}))
    step = make_train_step(config, mesh, transformation, abstract)
    for seed in range(2):
        state, metrics = step(state, tiny_batch(config, mesh, seed), controls(mesh))
        assert not metrics["skipped"]
    after = jax.device_get(in_model_order({"model": state.model}))
    changes = jax.tree.map(np.subtract, after, before)
    leaves = jax.tree_util.tree_leaves_with_path(changes)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "parallel"), ON_MESHES)
def test_updates_on_a_mesh_are_those_of_one_device(optimizer, parallel):
    """Apart from signs of Lion where gradients are only rounding."""
    whole = updates_of(optimizer, {"fsdp": 1})
    found = updates_of(optimizer, parallel)
    assert found.keys() == whole.keys()
    for name, update in whole.items():
        off = found[name][tuple(map(slice, update.shape))] - update
        assert np.sqrt((off**2).mean()) <= SAME_UPDATE * np.sqrt((update**2).mean()), name


def soap_updates(parallel: dict) -> dict[str, np.ndarray]:
    """SOAP's second updates of a model with square matrices, whose gradients have full rank."""
    model = {**MODEL, "num_layers": 16, "moe.ffn_size": 32}
    config = tiny(model, {"micro_batch_size": 2}, **parallel)
    config.optim = OptimConfig(Optimizer.soap, eps=1.0)
    mesh = mesh_of(config)
    optimizer, _, state = tiny_state(config, mesh)
    masters, moments = trained(state.model), state.optimizer
    update, updates, rng = jax.jit(optimizer.update), None, np.random.default_rng(0)
    for _ in range(2):
        gradients = jax.tree.map(
            lambda a: jax.device_put(np.float32(well_conditioned(rng, a.shape)), a.sharding),
            masters,
        )
        rates = {"learning_rate": 1.0, "weight_decay": 0.0}
        updates, moments = update(gradients, moments, masters, **rates)
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.slow
def test_soap_is_the_same_on_every_mesh():
    """Of 16 layers each device has at least 4: XLA's products of fewer matrices round differently
    on CPUs."""
    expected = soap_updates({"fsdp": 1})
    for parallel in (
        {"tensor": 2, "expert_tensor": 1, "expert": 2, "fsdp": 2},
        {"fsdp": 4},
        {"data": 2, "context": 2, "fsdp": 1},
        {"pipe": 2, "expert": 2, "fsdp": 1, "zero1": False},
    ):
        for name, update in soap_updates(parallel).items():
            off = np.abs(update - expected[name]).max()
            assert off <= SAME_GRADIENT * np.abs(expected[name]).max(), (parallel, name)
