"""Choosing tokens, and continuing text on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state

from maxmeg.data.tokenizers import load_tokenizer
from maxmeg.inference.decode import check_length, continue_text, make_generate
from maxmeg.inference.load import Trained
from maxmeg.inference.sampling import Sampling, sample

GREEDY = Sampling(temperature=0)
DRAWS = 2000


def drawn(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Frequencies of the tokens over many draws."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, len(logits)))
    ids = np.asarray(sample(rows, jax.random.key(0), sampling))
    return np.bincount(ids, minlength=len(logits)) / DRAWS


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (GREEDY, [0, 0, 1, 0]),
        (Sampling(), [0.1, 0.2, 0.4, 0.3]),
        (Sampling(temperature=0.5), np.array([1, 4, 16, 9]) / 30),
        (Sampling(top_k=1), [0, 0, 1, 0]),
        (Sampling(top_k=2), [0, 0, 4 / 7, 3 / 7]),
        (Sampling(top_k=9), [0.1, 0.2, 0.4, 0.3]),
        (Sampling(top_p=0.39), [0, 0, 1, 0]),
        (Sampling(top_p=0.41), [0, 0, 4 / 7, 3 / 7]),
        (Sampling(top_p=0.85), [0, 2 / 9, 4 / 9, 3 / 9]),
        (Sampling(top_k=3, top_p=0.5), [0, 0, 4 / 7, 3 / 7]),
    ],
)
def test_frequencies(sampling, expected):
    found = drawn(np.log([0.1, 0.2, 0.4, 0.3]), sampling)
    assert not found[np.asarray(expected) == 0].any()
    np.testing.assert_allclose(found, expected, atol=0.04)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}])
def test_bad_sampling_says_what_is_allowed(bad):
    with pytest.raises(ValueError, match=r"top_p in \(0, 1\]"):
        Sampling(**bad)


def generated(sampling: Sampling, **parallel: int) -> tuple[np.ndarray, object]:
    """(eight tokens after each of two prompts, the model) on a layout."""
    config = tiny({"num_kv_heads": 4, "init_std": 0.3}, **parallel)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    run = make_generate(config, mesh, abstract.model, 8, sampling)
    prompt = jnp.arange(10).reshape(2, 5)
    return np.asarray(run(state.model, prompt, jax.random.key_data(jax.random.key(3)))), state.model


def test_greedy_tokens_are_those_of_repeated_forward():
    found, model = generated(GREEDY, fsdp=1)
    ids = jnp.arange(10).reshape(2, 5)
    forward = jax.jit(lambda model, ids: model(ids))
    for _ in range(8):
        padded = jnp.pad(ids, ((0, 0), (0, 13 - ids.shape[1])))  # one compilation; causal
        following = jnp.argmax(forward(model, padded)[:, ids.shape[1] - 1], axis=-1)
        ids = jnp.concatenate((ids, following[:, None]), axis=1)
    np.testing.assert_array_equal(found, ids[:, 5:])
    assert len(np.unique(found)) > 3


@pytest.mark.slow
def test_layouts_write_the_same():
    sampling = Sampling(top_k=20, top_p=0.9)
    expected, _ = generated(sampling, fsdp=1)
    for parallel in ({"fsdp": 1, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}):
        np.testing.assert_array_equal(generated(sampling, **parallel)[0], expected)


def test_text_ends_with_its_document():
    config = tiny({"vocab_size": 257})
    config.parallel.fsdp, config.model.max_position = 1, 16
    mesh = mesh_of(config)
    _, _, state = tiny_state(config, mesh)
    model = state.model
    # Nothing leaves the last norm: every logit is zero, and the first id is taken.
    model.final_norm.weight[...] = jnp.zeros_like(model.final_norm.weight[...])
    tokenizer = load_tokenizer("bytes")
    trained = Trained(model, config, tokenizer, 0, mesh)
    assert continue_text(trained, "abc", 4, GREEDY, 0) == "\0" * 4
    trained.tokenizer.eod = 0
    assert continue_text(trained, "abc", 4, GREEDY, 0) == ""
    with pytest.raises(ValueError, match="13 tokens and 4 new ones exceed the context of 16"):
        continue_text(trained, "a" * 13, 4, GREEDY, 0)


def test_lengths():
    check_length(1, 15, 16)
    with pytest.raises(ValueError, match="empty"):
        check_length(0, 1, 16)
    with pytest.raises(ValueError, match="at most 0 tokens"):
        check_length(17, 1, 16)
