"""One table of linear + cross entropy calls that every backend runs, and what they should give.

Imports neither pytest nor kernels: a machine with a GPU runs it too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from maxmeg.ops.cross_entropy.call import CrossEntropySpec, linear_cross_entropy

NAMES = ("loss", "losses", "dh", "dw")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of the norm
SCALE = -2.5  # cotangent of the loss
BAD_TARGETS = (-100, -1, 10**9)


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of a call. vocab_size 0: all words are real. bad_targets: some targets are
    no words. large: inputs times this. tiles: of backend tiled, tokens and words in forward, then
    in backward."""

    tokens: int = 37
    width: int = 16
    words: int = 29
    vocab_size: int = 0
    z_loss: float = 0.0
    softcap: float = 0.0
    label_smoothing: float = 0.0
    chunk: int = 64
    bad_targets: bool = False
    large: float = 1.0
    tiles: tuple[int, int, int, int] = (16, 8, 64, 10)

    @property
    def spec(self) -> CrossEntropySpec:
        return CrossEntropySpec(
            self.vocab_size or self.words,
            self.z_loss,
            self.softcap,
            self.chunk,
            self.label_smoothing,
        )


ALL = Case(
    vocab_size=21,
    z_loss=0.1,
    softcap=3.0,
    label_smoothing=0.1,
    chunk=10,
    bad_targets=True,
    tiles=(10, 8, 13, 8),
)
CASES = {
    "plain": Case(),
    "one chunk exactly": Case(chunk=37, tiles=(37, 29, 37, 29)),
    "chunks that do not divide": Case(chunk=8, tiles=(8, 8, 16, 8)),
    "a chunk a token": Case(chunk=1, tiles=(1, 1, 1, 1)),
    "z-loss": Case(z_loss=0.1),
    "soft cap": Case(softcap=3.0),
    "label smoothing": Case(label_smoothing=0.1),
    "padded": Case(vocab_size=21),
    "a padded chunk": Case(words=48, vocab_size=21, tiles=(16, 16, 64, 16)),
    "bad targets": Case(vocab_size=21, bad_targets=True, label_smoothing=0.2),
    "smoothing and soft cap": Case(vocab_size=21, softcap=3.0, label_smoothing=0.1),
    "smoothing and z-loss": Case(vocab_size=21, z_loss=0.1, label_smoothing=0.1),
    "sure of itself": Case(large=4.0),
    "one word": Case(words=1, label_smoothing=0.1),
    "one token": Case(tokens=1),
    "all": ALL,
    "wide, all": dataclasses.replace(ALL, width=40),  # xla multiplies once for dw
    "kernels": Case(tokens=300, width=128, words=1280, large=0.3, tiles=(128, 256, 256, 256)),
    "kernels, all": Case(
        tokens=260,
        width=192,
        words=1024,
        vocab_size=901,
        z_loss=0.01,
        softcap=5.0,
        label_smoothing=0.1,
        bad_targets=True,
        large=0.3,
    ),
}


def arrays_of(case: Case, dtype: str) -> list[np.ndarray]:
    """[h, w, targets, weights]; some weights are 0."""
    rng = np.random.default_rng(case.tokens + 100 * case.words)
    shapes = ((case.tokens, case.width), (case.words, case.width))
    h, w = (np.asarray(jnp.asarray(case.large * rng.normal(size=s), dtype)) for s in shapes)
    targets = rng.integers(0, case.spec.vocab_size, case.tokens)
    if case.bad_targets:
        targets[::7] = np.resize([*BAD_TARGETS, case.spec.vocab_size], targets[::7].shape)
    weights = rng.random(case.tokens) * (rng.random(case.tokens) < 0.7)
    weights[0] = 0.5
    return [h, w, targets.astype(np.int32), weights.astype(np.float32)]


def expected(case: Case, arrays: list, scale: float = SCALE) -> dict[str, np.ndarray]:
    """Sum of the weighted losses, token losses and gradients, in float64."""
    h, w, targets, weights = (np.asarray(x) for x in arrays)
    h, w, weights = (x.astype(np.float64) for x in (h, w, weights))
    spec, K = case.spec, case.spec.vocab_size
    raw = h @ w[:K].T
    z = spec.softcap * np.tanh(raw / spec.softcap) if spec.softcap else raw
    largest = z.max(axis=1, keepdims=True)
    logsumexp = np.log(np.exp(z - largest).sum(axis=1)) + largest[:, 0]
    hit = np.arange(K) == targets[:, None]
    share = np.where(hit, 1 - spec.label_smoothing, spec.label_smoothing / max(K - 1, 1))
    share[~hit.any(axis=1)] = spec.uniform  # no word has what the target would have
    if K == 1:
        share = np.where(hit, 1.0, 0.0)
    each = logsumexp - (share * z).sum(axis=1) + spec.z_loss * logsumexp**2
    softmax = np.exp(z - logsumexp[:, None])
    d = softmax * (1 + 2 * spec.z_loss * logsumexp[:, None]) - share
    d *= (scale * weights)[:, None]
    if spec.softcap:
        d *= 1 - (z / spec.softcap) ** 2
    dw = np.zeros_like(w)
    dw[:K] = d.T @ h
    return {
        "loss": (weights * each).sum(),
        "losses": logsumexp - (hit * z).sum(axis=1),
        "dh": d @ w[:K],
        "dw": dw,
    }


def run(case: Case, arrays: list, backend: str, jit=jax.jit, scale: float = SCALE) -> dict:
    """What a backend gives for `expected`; a call that it refuses raises ValueError."""

    def both(h, w, targets, weights):
        def call(h, w):
            return linear_cross_entropy(h, w, targets, weights, case.spec, backend=backend)

        loss, pull, losses = jax.vjp(call, h, w, has_aux=True)
        return loss, losses, *pull(jnp.float32(scale))

    actual = jit(both)(*arrays)
    return {name: np.asarray(array) for name, array in zip(NAMES, actual, strict=True)}


def error(actual, wanted) -> float:
    """Of the norm; of a norm of nothing, the size."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(actual - wanted) / (np.linalg.norm(wanted) or 1.0))
