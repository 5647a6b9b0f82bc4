"""The chunked output projection and cross entropy against plain log_softmax."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.ops.cross_entropy import CrossEntropySpec, linear_cross_entropy
from maxmeg.parallel.mesh import AXES, local_mesh
from maxmeg.parallel.spmd import spmd

TOLERANCE = 2e-6  # of the largest value, float32
BFLOAT16 = 2e-2  # gradients of logits are rounded before their product
T, D, V = 37, 16, 29
# Half the time to compile; rounding may differ, no more than the tolerances allow.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

# name: (vocabulary without padding, z_loss, softcap, chunk)
CASES = {
    "plain": (29, 0.0, 0.0, 64),
    "one chunk exactly": (29, 0.0, 0.0, 37),
    "chunks that do not divide": (29, 0.0, 0.0, 8),
    "a chunk a token": (29, 0.0, 0.0, 1),
    "z-loss": (29, 0.1, 0.0, 64),
    "softcap": (29, 0.0, 3.0, 64),
    "padded": (21, 0.0, 0.0, 64),
    "all": (21, 0.1, 3.0, 10),
}
TABLE = pytest.mark.parametrize("name", CASES)


def spec_of(name: str) -> CrossEntropySpec:
    return CrossEntropySpec(*CASES[name])


def inputs(name: str, dtype=np.float32):
    rng = np.random.default_rng(0)
    h, w = rng.normal(size=(T, D)), rng.normal(size=(V, D))
    targets = rng.integers(0, CASES[name][0], T)
    weights = (rng.random(T) * (rng.random(T) < 0.7)).astype(np.float32)
    return jnp.asarray(h, dtype), jnp.asarray(w, dtype), targets, weights


def reference(h, w, targets, weights, name):
    """(loss, losses of the tokens) from whole logits."""
    vocab_size, z_loss, softcap, _ = CASES[name]
    logits = jnp.einsum("TD,VD->TV", h, w[:vocab_size], precision="highest")
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.sum(weights * (losses + z_loss * z)), losses


@functools.cache
def both(name: str, dtype=jnp.float32, scale: float = 1.0):
    """((loss, token losses), (dh, dw)) of ours and of the reference in float32."""
    h, w, targets, weights = inputs(name, dtype)

    def ours(h, w):
        loss, losses = linear_cross_entropy(h, w, targets, weights, spec_of(name))
        return scale * loss, losses

    def theirs(h, w):
        loss, losses = reference(h, w, targets, weights, name)
        return scale * loss, losses

    def run(function, *given):
        return quick_jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(*given)

    return run(ours, h, w), run(theirs, h.astype(jnp.float32), w.astype(jnp.float32))


def close(found, expected, tolerance) -> bool:
    difference = np.abs(np.float32(found) - expected).max()
    return bool(difference <= tolerance * np.abs(expected).max())


@TABLE
def test_loss_and_gradients_equal_the_reference(name):
    found, expected = (jax.tree.leaves(result) for result in both(name))
    for got, want in zip(found, expected, strict=True):
        assert close(got, want, TOLERANCE)


@TABLE
def test_without_gradients_the_loss_is_the_same(name):
    h, w, targets, weights = inputs(name)
    loss, losses = quick_jit(linear_cross_entropy, static_argnums=4)(
        h, w, targets, weights, spec_of(name)
    )
    (expected, expected_losses), _ = both(name)[0]
    assert close(loss, expected, TOLERANCE) and close(losses, expected_losses, TOLERANCE)


@TABLE
def test_tokens_of_weight_zero_and_padded_words_have_no_gradient(name):
    _, (dh, dw) = both(name)[0]
    weights = inputs(name)[3]
    assert not dh[weights == 0].any() and dh[weights > 0].any(axis=1).all()
    assert not dw[CASES[name][0] :].any()


def test_the_cotangent_scales_the_gradients():
    for got, want in zip(both("all", scale=-2.5)[0][1], both("all")[0][1], strict=True):
        assert close(got, -2.5 * want, TOLERANCE)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_bfloat16_computes_in_float32(name):
    ((loss, losses), gradients), ((expected, expected_losses), wanted) = both(name, jnp.bfloat16)
    assert loss.dtype == losses.dtype == jnp.float32
    assert close(loss, expected, TOLERANCE) and close(losses, expected_losses, TOLERANCE)
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype == jnp.bfloat16 and close(got, want, BFLOAT16)


def test_huge_logits_stay_finite():
    h, w, targets, weights = inputs("plain")
    run = jax.value_and_grad(linear_cross_entropy, argnums=(0, 1), has_aux=True)
    (loss, _), gradients = quick_jit(run, static_argnums=4)(
        1e4 * h, 1e4 * w, targets, weights, spec_of("plain")
    )
    assert all(np.isfinite(array).all() for array in (loss, *gradients))


@pytest.mark.parametrize("name", ["padded", "all"])
def test_a_vocabulary_over_devices_is_the_whole_one(name):
    h, w, targets, weights = inputs(name)
    mesh = local_mesh(4)
    P = jax.sharding.PartitionSpec

    def local(h, w, targets, weights):
        run = jax.value_and_grad(linear_cross_entropy, argnums=(0, 1), has_aux=True)
        (loss, losses), (dh, dw) = run(h, w, targets, weights, spec_of(name))
        return loss, losses, jax.lax.psum(dh, AXES), dw

    w = jnp.pad(w, ((0, 32 - V), (0, 0)))
    specs = (P(), P("tensor"), P(), P())
    run = quick_jit(spmd(local, mesh, specs, (P(), P(), P(), P("tensor"))))
    *found, dw = run(h, w, targets, weights)
    assert not dw[V:].any()
    for got, want in zip((*found, dw[:V]), jax.tree.leaves(both(name)[1]), strict=True):
        assert close(got, want, TOLERANCE)


def largest_array(chunk: int) -> int:
    """Elements of the largest array in the compiled gradient of 1,000 tokens x 800 words."""
    h, w = (jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (1000, 800))
    targets, weights = (jax.ShapeDtypeStruct((1000,), d) for d in (jnp.int32, jnp.float32))
    gradient = jax.grad(linear_cross_entropy, argnums=(0, 1), has_aux=True)
    lowered = quick_jit(gradient, static_argnums=4).lower(
        h, w, targets, weights, CrossEntropySpec(800, 1e-3, 5.0, chunk)
    )
    shapes = re.findall(r"\w+\[([\d,]+)\]", lowered.compile().as_text())
    return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)


def test_the_logits_of_all_tokens_never_exist():
    assert largest_array(chunk=1000) == 1000 * 800  # what the next line would find
    assert largest_array(chunk=100) == 100 * 800
