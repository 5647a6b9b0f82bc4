"""Choosing tokens, and continuing text on one device and on several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state

from maxmeg.config.mixers import RotaryScaling
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.decode import (
    Request,
    Writer,
    check_length,
    continue_text,
    make_generate,
    pad,
    text_after,
)
from maxmeg.inference.load import Trained
from maxmeg.inference.sampling import Sampling, sample
from maxmeg.inference.stream import SHORTEST_CACHE, Stream
from maxmeg.layers.context import Context

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
def test_samples_have_the_expected_frequencies(sampling, expected):
    found = drawn(np.log([0.1, 0.2, 0.4, 0.3]), sampling)
    assert not found[np.asarray(expected) == 0].any()
    np.testing.assert_allclose(found, expected, atol=0.04)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}])
def test_bad_sampling_says_what_is_allowed(bad):
    with pytest.raises(ValueError, match=r"top_p in \(0, 1\]"):
        Sampling(**bad)


PROMPTS = [np.arange(5), np.arange(30, 41), np.array([7]), np.arange(20, 37)]


MODELS = {
    "grouped": {"attention.num_kv_heads": 4},
    "latent": {
        "layers": "*(local_mla,mlp)",
        "mla.kv_rank": 16,
        "mla.query_rank": 12,
        "mla.rotary_size": 4,
    },
    "convolution": {
        "layers": "*(conv,mlp local,mlp)",
        "attention.window": 7,
        "conv.kernel_size": 4,
        "conv.bias": True,
    },
    "longrope": {
        "rotary.scaling": RotaryScaling.longrope,
        "rotary.factor": 8.0,
        "rotary.original_length": 11,  # of PROMPTS and 8 tokens: two grow past it, one is longer
        "rotary.short_factors": (1.0, 1.0),
        "rotary.long_factors": (3.0, 9.0),
        "rotary.base": 50.0,
    },
}


@functools.cache
def trained(kind: str = "grouped", **parallel: int) -> Trained:
    """A tiny model on a layout, one device by default, whose text is not the same all over."""
    model = {"layers": "*(local,mlp)", "attention.window": 7, **MODELS[kind]}
    model |= {"init_std": 0.3, "max_position": 64}
    config = tiny(model, **parallel or {"fsdp": 1})
    mesh = mesh_of(config)
    _, _, state = tiny_state(config, mesh)
    return Trained(state.model, config, load_tokenizer(f"null:{config.model.vocab_size}"), 0, mesh)


@functools.cache
def writer(request: Request, batch: int = 4, **parallel: int) -> Writer:
    return Writer(trained(**parallel), request, batch)


@functools.cache
def forward(kind: str):
    """Logits after position `last` of one row, padded; without a cache."""

    model = trained(kind).model

    def logits_V(ids_BL, last):
        positions_L = jnp.arange(ids_BL.shape[1])
        positions_BL = jnp.minimum(positions_L, last)[None]  # a row's length decides LongRoPE
        return model.logits(model.hidden(ids_BL, Context(positions_BL))[0])[0, last]

    return jax.jit(logits_V)


def forward_greedy(prompt: np.ndarray, count: int, kind: str = "grouped") -> np.ndarray:
    """Tokens by whole forward passes, without a cache."""
    ids = prompt
    for _ in range(count):
        padded = np.pad(ids, (0, 32 - len(ids)))[None]  # one compilation; causal
        ids = np.append(ids, np.argmax(forward(kind)(padded, len(ids) - 1)))
    return ids[len(prompt) :]


def test_greedy_tokens_are_those_of_repeated_forward():
    found = writer(Request(8, GREEDY))(PROMPTS, 0)
    for prompt, ids in zip(PROMPTS, found, strict=True):
        np.testing.assert_array_equal(ids, forward_greedy(prompt, 8))
    assert len(np.unique(np.concatenate(found))) > 5


@pytest.mark.parametrize("kind", ["longrope", pytest.param("convolution", marks=pytest.mark.slow)])
def test_a_cache_changes_no_token(kind):
    """LongRoPE past its original length; the state of convolutions after prompts of any length."""
    found = Writer(trained(kind), Request(8, GREEDY), 4)(PROMPTS, 0)
    for prompt, ids in zip(PROMPTS, found, strict=True):
        np.testing.assert_array_equal(ids, forward_greedy(prompt, 8, kind))


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(GREEDY, marks=pytest.mark.slow), Sampling(top_k=20, top_p=0.9)],
)
def test_a_row_depends_on_its_own_prompt_and_number_alone(sampling):
    write = writer(Request(8, sampling))
    together = write(PROMPTS, 3)
    others = [PROMPTS[0], PROMPTS[2], np.arange(9), np.arange(50, 60)]
    np.testing.assert_array_equal(write(others, 3)[0], together[0])
    fewer = writer(Request(8, sampling), batch=2)(PROMPTS, 3)
    for a, b in zip(together, fewer, strict=True):
        np.testing.assert_array_equal(a, b)
    if sampling is GREEDY:
        np.testing.assert_array_equal(write([PROMPTS[1]] * 2 + others[:2], 3)[1], together[1])
    else:
        assert not np.array_equal(*write([PROMPTS[1]] * 2 + others[:2], 3)[:2])
        assert not np.array_equal(write(PROMPTS, 4)[0], together[0])


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [("grouped", {}), pytest.param("longrope", {"tensor": 2}, marks=pytest.mark.slow)],
)
def test_a_stream_yields_what_a_writer_generates(kind, parallel):
    """A sharded cache, a cache that is recomputed, and no compilation after the first prompt."""
    model = trained(kind, **parallel)
    sampled = Request(8, Sampling(top_k=20, top_p=0.9))
    stream, write = Stream(model, sampled), Writer(model, sampled, 1)
    for prompt in (PROMPTS[0], PROMPTS[1]):
        pieces = [*stream(prompt, 3)]
        assert "".join(pieces) == text_after(model, prompt, write([prompt], 3)[0])
        assert len(pieces) == 8 and all(pieces)
    assert stream._advance._cache_size() == 1 and [*stream._starts] == [SHORTEST_CACHE]
    assert len([*stream(prompt, 3, num_tokens=2)]) == 2
    with pytest.raises(ValueError, match="57 tokens and 8 new ones exceed the context of 64"):
        next(stream(np.zeros(57, np.int32), 0))


def test_each_row_ends_at_its_own_end():
    free = writer(Request(8, GREEDY))(PROMPTS, 0)
    ends = (int(free[0][2]), int(free[1][4]))
    found = Writer(trained(), Request(8, GREEDY, ends), 4)(PROMPTS, 0)
    for ids, whole in zip(found, free, strict=True):
        places = np.flatnonzero(np.isin(whole, ends))
        np.testing.assert_array_equal(ids, whole[: places[0]] if len(places) else whole)
    assert len(found[0]) <= 2 and len(found[1]) <= 4


def test_the_loop_stops_when_all_rows_have_ended():
    config, model = trained().config, trained().model
    prompts = pad(PROMPTS[:2], [0, 1], 3)
    first = writer(Request(8, GREEDY))(PROMPTS, 0)
    ends = tuple({int(ids[0]) for ids in first[:2]})
    run = make_generate(config, trained().mesh, model, Request(8, GREEDY, ends))
    ids_BN, counts_B = run(model, prompts, jax.random.key_data(jax.random.key(0)))
    assert not np.asarray(counts_B).any()
    assert not np.asarray(ids_BN)[:, 1:].any()  # never written


def test_one_program_is_compiled_per_padded_length():
    write = Writer(trained(), Request(2, GREEDY), 2)
    rng = np.random.default_rng(0)
    for lengths in ((1, 16), (3,), (16, 2, 9), (17, 31), (32, 2), (5, 1)):
        prompts = [rng.integers(0, 61, length) for length in lengths]
        assert [len(ids) for ids in write([*prompts, *prompts][:4], 0)] == [2] * min(
            2 * len(lengths), 4
        )
    assert write.run._cache_size() == 2
    assert write([], 0) == []


@pytest.mark.slow
def test_all_layouts_generate_the_same_tokens():
    request = Request(8, Sampling(top_k=20, top_p=0.9))
    expected = writer(request)(PROMPTS, 3)
    for parallel in ({"fsdp": 1, "tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}):
        for a, b in zip(writer(request, **parallel)(PROMPTS, 3), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_heads_on_a_mesh_share_the_latents():
    found = Writer(trained("latent", fsdp=2, tensor=2), Request(8, GREEDY), 4)(PROMPTS, 0)
    for prompt, ids in zip(PROMPTS, found, strict=True):
        np.testing.assert_array_equal(ids, forward_greedy(prompt, 8, "latent"))
    assert len(np.unique(np.concatenate(found))) > 5


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


def test_bad_prompts_are_named():
    write = writer(Request(8, GREEDY))
    with pytest.raises(ValueError, match="prompt 2 of 2: the prompt is empty"):
        write([PROMPTS[0], np.empty(0, np.int32)], 0)
    with pytest.raises(ValueError, match="prompt 1 of 2: a prompt of 57 tokens and 8 new ones"):
        write([np.zeros(57, np.int32), PROMPTS[0]], 0)
    with pytest.raises(ValueError, match="token 61 is not in the model's vocabulary of 61"):
        write([np.array([3, 61])], 0)
    with pytest.raises(ValueError, match="num_tokens=0 must be at least 1"):
        Request(0, GREEDY)
    with pytest.raises(ValueError, match="batch=0 must be at least 1"):
        Writer(trained(), Request(1, GREEDY), 0)


def test_too_long_prompts_are_refused():
    check_length(1, 15, 16)
    with pytest.raises(ValueError, match="empty"):
        check_length(0, 1, 16)
    with pytest.raises(ValueError, match="at most 0 tokens"):
        check_length(17, 1, 16)
