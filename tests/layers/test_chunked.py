"""RETRO's chunked cross attention beside NumPy, and what each token depends on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_layers import drawn

from maxmeg.config.model import DType, ModelConfig, Position
from maxmeg.config.retro import retro_layers
from maxmeg.config.setting import with_fields
from maxmeg.layers.chunked import ChunkedCrossSpec
from maxmeg.layers.context import Context, Source
from maxmeg.models.lm import LM

CHUNKS, M, K, R, D, H = 3, 4, 2, 6, 16, 2  # K neighbours of R tokens
L, S, VOCAB = CHUNKS * M, CHUNKS * K * R, 50
TOLERANCE = 1e-5


def segments(rng):
    """Of the tokens, two documents with padding; of the neighbours, of their chunk's document."""
    target = np.array([[1] * 8 + [3] * 3 + [4], [1] * 7 + [2] + [3] * 4])
    source = np.repeat(target[:, ::M], K * R, axis=1)
    source[rng.random(source.shape) < 0.3] = 0
    return target, source


def attended(q_LHK, k_MHK, v_MHK, visible_LM):
    scores = np.einsum("LHK,MHK->HLM", q_LHK, k_MHK) / q_LHK.shape[-1] ** 0.5
    weights = np.exp(scores - scores.max()) * visible_LM
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return np.einsum("HLM,MHK->LHK", weights, v_MHK)


@pytest.mark.parametrize("of_neighbours", [False, True])
def test_equals_numpy(of_neighbours):
    spec = ChunkedCrossSpec(
        D, H, H, D // H, rotary=None, causal=False, chunk_length=M, of_neighbours=of_neighbours
    )
    mixer, rng = drawn(spec.make, 0.3), np.random.default_rng(0)
    h_BLD, memory_BMD = (rng.normal(size=(2, n, D)).astype(np.float32) for n in (L, S))
    segments_BL, segments_BM = segments(rng)
    visible_BLM = np.zeros((2, L, S), bool)
    for token in range(M - 1, L):  # token 3 reads the neighbours of chunk 0, as do 4, 5 and 6
        chunk = (token - (M - 1)) // M
        visible_BLM[:, token, chunk * K * R : (chunk + 1) * K * R] = True
    if of_neighbours:
        chunk_S = np.arange(S) // (K * R)
        visible_BLM = np.tile(chunk_S[:, None] == np.arange(L) // M, (2, 1, 1))
        h_BLD, memory_BMD = memory_BMD, h_BLD
        segments_BL, segments_BM = segments_BM, segments_BL
    visible_BLM &= segments_BL[:, :, None] == segments_BM[:, None]
    contexts = [
        Context(jnp.zeros(ids.shape, int), jnp.array(ids)) for ids in (segments_BL, segments_BM)
    ]
    ctx = dataclasses.replace(contexts[0], memory=(jnp.array(memory_BMD), contexts[1]))
    found = jax.jit(lambda h_BLD: mixer(h_BLD, ctx)[0])(jnp.array(h_BLD))
    weights = [
        np.asarray(getattr(mixer, name).weight[...]) for name in ("query", "key", "value", "out")
    ]
    for row in range(2):
        inputs = h_BLD[row], memory_BMD[row], memory_BMD[row]
        heads = [(x @ w).reshape(len(x), H, -1) for x, w in zip(inputs, weights, strict=False)]
        wanted = attended(*heads, visible_BLM[row]).reshape(-1, D) @ weights[3]
        assert np.abs(found[row] - wanted).max() < TOLERANCE * np.abs(wanted).max()


@pytest.fixture(scope="module")
def logits():
    fields = {"layers": retro_layers((1, 2), 2), "num_layers": 6, "hidden_size": D}
    fields |= {"attention.num_heads": H, "position": Position.learned, "max_position": L}
    fields |= {"retro.chunk_length": M, "retro.neighbour_length": R}
    config = with_fields(ModelConfig(), fields | {"dtype": DType.float32, "vocab_size": VOCAB})
    model = drawn(lambda key: LM(key, config), 0.5)

    @jax.jit
    def run(ids, near, near_segments):
        source, ones = Source.of(near, near_segments), jnp.ones(ids.shape, int)
        ctx = Context(jnp.broadcast_to(jnp.arange(L), ids.shape), ones, source=source)
        return model.logits(model.hidden(ids, ctx)[0])

    return run


def inputs(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Equal rows of tokens, of neighbours and of ones."""
    rng = np.random.default_rng(1)
    ids, near = (rng.integers(VOCAB, size=size) for size in (L, S))
    return np.tile(ids, (rows, 1)), np.tile(near, (rows, 1)), np.ones((rows, S), np.int32)


def test_a_token_does_not_see_later_tokens_or_its_own_chunks_neighbours(logits):
    ids, near, ones = inputs(1 + L + S)
    for place in range(L):
        ids[1 + place, place] = (ids[0, place] + 1) % VOCAB
    for place in range(S):
        near[1 + L + place, place] = (near[0, place] + 1) % VOCAB
    found = logits(ids, near, ones)
    changed = np.abs(found[1:] - found[:1]).max(axis=-1) > 1e-6
    chunks = np.arange(S) // (K * R)
    first = [*range(L), *((chunks + 1) * M - 1)]  # the last token of the neighbour's chunk
    assert np.argmax(changed, axis=1).tolist() == first and changed.any(axis=1).all()


def test_padding_and_absent_neighbours_change_nothing(logits):
    ids, near, segments = inputs(1 + L + S)
    keep = np.arange(S) % R < R - 2
    near[1:3, ~keep], segments[1:3] = [[1], [2]], keep
    near[3:5], segments[3:5] = [[3], [4]], 0
    _, *padded, none, other = np.asarray(logits(ids, near, segments)[:5])
    assert (padded[0] == padded[1]).all() and (none == other).all() and np.isfinite(none).all()
