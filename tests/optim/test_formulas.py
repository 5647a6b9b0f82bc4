"""Every optimizer against its published formula in float64 NumPy, or against optax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_cases import well_conditioned

from maxmeg.config.model import DType
from maxmeg.config.optimizers import (
    AdafactorConfig,
    MuonConfig,
    MuonScale,
    NewtonSchulz,
    SoapConfig,
)
from maxmeg.config.schema import OptimConfig, Optimizer
from maxmeg.ops.newton_schulz import COEFFICIENTS
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.parameter import annotate, parameter

RATE, DECAY = 0.1, 0.5
STEPS = 4
EPS = 0.1  # well above the rounding of numbers that are 0 in SOAP's eigenbases
FORMULA = 1e-5  # relative, and of numbers near 0, float32: some ten roundings in each step
# Of SOAP's parameters, of order 1. Rounding of 1e-6 in eigenvectors is divided by EPS and
# multiplied by RATE in each of four steps; 5e-6 is the most that seven kinds of LAPACK show.
SAME_FORMULA = 5e-5
ADAFACTOR = 2e-4  # relative: square roots of factored means, beside optax in float32 too
DISTINCT = 0.9999  # ratio of neighbouring eigenvalues, so that rounding cannot change their order
ITERATED = 1e-4  # of the largest: five steps of Newton-Schulz multiply rounding by up to 3.4^5
MUON = {"scale": MuonScale.unit_rms_norm, "dtype": DType.float32}


def tree_of(**shapes: tuple[int, ...]) -> dict:
    rng = np.random.default_rng(0)
    axes = {1: ("norm",), 2: ("embed", "mlp"), 3: ("embed", "mlp"), 4: ("expert", "embed", "mlp")}
    return {
        name: parameter(jnp.asarray(rng.normal(size=s), jnp.float32), *axes[len(s)])
        for name, s in shapes.items()
    }


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


def iterated(x: np.ndarray, sets: list, steps: int) -> np.ndarray:
    """Newton-Schulz on the singular values of each matrix, which leaves the singular vectors."""
    u, s, vt = np.linalg.svd(np.float64(x), full_matrices=False)
    s = s / np.sqrt((s**2).sum(-1, keepdims=True))
    for a, b, c in itertools.islice(itertools.cycle(sets), steps):
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ vt


def adam(g, m, v, step):
    m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
    return m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.9**step)) + EPS), m, v


def sgd(g, m, v, step):
    m = 0.7 * m + g
    return m, m, v


def lion(g, m, v, step):
    return np.sign(0.8 * m + 0.2 * g), 0.9 * m + 0.1 * g, v


def muon(g, m, v, step, nesterov=False):
    m = 0.6 * m + 0.4 * g
    ahead = 0.6 * m + 0.4 * g if nesterov else m
    sets = COEFFICIENTS[NewtonSchulz.quintic]
    return 0.3 * np.sqrt(4 / 3) * iterated(ahead, sets, 5), m, v


def nesterov_muon(*operands):
    return muon(*operands, nesterov=True)


@pytest.mark.parametrize(
    ("optimizer", "of_matrices", "of_others"),
    [
        (Optimizer.adamw, adam, adam),
        (Optimizer.sgd, sgd, sgd),
        (Optimizer.lion, lion, lion),
        (Optimizer.muon, muon, adam),
        (Optimizer.muon, nesterov_muon, adam),
    ],
)
def test_updates_are_the_formula(optimizer, of_matrices, of_others):
    """Vectors are not decayed; Muon's others have a rate of their own."""
    settings = MuonConfig(0.6, of_matrices is nesterov_muon, extra_scale=0.3, **MUON)
    others_rate = settings.adamw_lr = 0.02 if optimizer is Optimizer.muon else 0.0
    betas = {"beta1": 0.8, "beta2": 0.9}
    config = OptimConfig(optimizer, lr=RATE, momentum=0.7, eps=EPS, muon=settings, **betas)
    shapes = {"stack": (2, 3, 4), "embedding": (4, 5), "norm": (4,)}
    tree = tree_of(**shapes)
    annotate(tree["embedding"], axes=("vocab", "embed"))
    found, gradients = run(config, tree)
    for name in shapes:
        p, m, v = np.float64(tree[name][...]), 0.0, 0.0
        update = of_matrices if name == "stack" else of_others
        rate = RATE if name == "stack" else others_rate or RATE
        for step, gradient in enumerate(gradients, start=1):
            u, m, v = update(gradient[name][...], m, v, step)
            p = p - rate * (u + (0 if name == "norm" else DECAY) * p)
        np.testing.assert_allclose(found[name][...], p, rtol=FORMULA, atol=FORMULA)


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
    step = jax.jit(chain.update)
    matrices = np.float32(tree["up"][...]).reshape(6, 8, 6)
    cases = [(n, "up", matrices[n]) for n in range(6)] + [
        (0, "norm", np.asarray(tree["norm"][...]))
    ]
    for n, name, p in cases:
        state = chain.init(p)
        for gradient in gradients:
            g = np.float32(gradient[name][...]).reshape(-1, *p.shape)[n]
            u, state = step(jnp.asarray(g), state, p)
            p = p - RATE * (np.asarray(u) + (DECAY if name == "up" else 0) * p)
        actual = np.asarray(found[name][...]).reshape(-1, *p.shape)[n]
        np.testing.assert_allclose(actual, p, rtol=ADAFACTOR, atol=1e-6)


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "steps", "frequency", "largest"),
    [
        (5, 5, STEPS, 1, 9),
        (6, 4, 1, 1, 9),
        (5, 5, STEPS, 2, 9),
        (6, 4, STEPS, 1, 5),
        (4, 6, STEPS, 3, 5),
        (5, 5, 2, 1, 4),
    ],
)
def test_soap_is_the_formula(rows, columns, steps, frequency, largest, kl):
    """A factor larger than the rank of its matrix has a null space, whose basis is arbitrary and
    steers later steps: there only the first update is compared, on the space that its gradient
    spans."""
    config = OptimConfig(Optimizer.soap, beta1=0.8, beta2=0.9, eps=EPS)
    config.soap = SoapConfig(0.7, kl, frequency, largest)
    shape = (rows, columns)
    tree = {"stack": tree_of(up=(2, 2, *shape))["up"], "embedding": tree_of(t=(4, 5))["t"]}
    found, gradients = run(config, tree, steps)

    for n in range(4):
        p = np.float64(tree["stack"][...]).reshape(4, *shape)[n]
        m, v = 0.0, 0.0
        factors, bases = [np.zeros((size, size)) for size in shape], [*map(np.eye, shape)]
        for step, gradient in enumerate(gradients, start=1):
            g = gradient["stack"][...].reshape(4, *shape)[n]
            m = bases[0] @ np.broadcast_to(m, shape) @ bases[1].T
            beta = 1 - (1 - 0.7) / (1 - 0.7**step)
            middles = [*map(np.eye, shape)]
            if kl and max(shape) <= largest:
                for side in (0, 1):
                    values = np.diag(bases[side].T @ factors[side] @ bases[side])
                    inverse = np.diag(1 / np.maximum(values, EPS)) / len(values)
                    middles[side] = bases[side] @ inverse @ bases[side].T
            for side, product in enumerate((g @ middles[1] @ g.T, g.T @ middles[0] @ g)):
                if shape[side] > largest:
                    continue
                factors[side] = factor = beta * factors[side] + (1 - beta) * product
                if (step - 1) % frequency:
                    continue
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
        has_left_null_space = rows > columns and rows <= largest
        compared = g @ np.linalg.pinv(g) if has_left_null_space else np.eye(rows)
        actual = np.asarray(found["stack"][...]).reshape(4, *shape)[n]
        np.testing.assert_allclose(compared @ actual, compared @ p, atol=SAME_FORMULA)
    p, m, v = np.float64(tree["embedding"][...]), 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        u, m, v = adam(gradient["embedding"][...], m, v, step)
        p = p - RATE * (u + DECAY * p)
    np.testing.assert_allclose(found["embedding"][...], p, rtol=FORMULA, atol=1e-6)
