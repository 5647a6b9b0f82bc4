"""Replies: equal to forward passes without a cache, and the same whatever else is served."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import merged
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layouts import mesh_of, tiny, tiny_state

from maxmeg.config.model import DType
from maxmeg.config.options import LongRope, Serve
from maxmeg.config.positions import RotaryScaling
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.adapters import Adapter, attached
from maxmeg.inference.engine import Engine, Reply
from maxmeg.inference.load import Trained
from maxmeg.inference.requests import Request, check_length
from maxmeg.inference.samples import continue_text
from maxmeg.inference.sampling import Sampling
from maxmeg.inference.scheduler import Scheduler
from maxmeg.layers.context import Context
from maxmeg.layers.lora import linears
from maxmeg.server import start

GREEDY = Sampling(temperature=0, top_logprobs=3)
SAMPLED = Sampling(top_k=20, top_p=0.9, min_p=0.01)
CHANGED = {  # logits that are changed before the likeliest token is taken
    "repetition": Sampling(temperature=0, repetition_penalty=1.5),
    "occurrences": Sampling(temperature=0, frequency_penalty=0.7, presence_penalty=0.3),
    "rare": Sampling(temperature=0, repetition_penalty=0.8, frequency_penalty=-0.2),
    "biases": Sampling(temperature=0, logit_bias=((3, 2.5), (7, -100.0), (40, 0.5))),
}
PROPOSED = {
    "sampled": SAMPLED,
    "grammar": SAMPLED,
    "penalties": CHANGED["rare"],
    "repeating": Sampling(temperature=0, frequency_penalty=-2.0),
}
PROMPTS = [np.arange(5), np.arange(30, 41), np.array([7]), np.arange(20, 37)]
LENGTH, NEW = 64, 8
NEAR = 1e-5  # of log-probabilities: float32 sums in another order, over at most 64 numbers
MERGED = 1e-4  # of log-probabilities: rounding of W + A B, where an engine adds the products
ADAPTERS = {"whole": (3, ""), "narrow": (1, "out"), "inner": (2, "value")}  # rank, part of a path
SMALL = {"max_num_seqs": 3, "block_size": 4, "chunk": 8}  # chunks of two pages
DELTA_SIZES = {"delta.num_heads": 8, "delta.num_key_heads": 4, "delta.key_size": 6}
DELTA_SIZES |= {"delta.chunk": 4, "attention.output_gate": True}

MODELS = {
    "grouped": {"attention.num_kv_heads": 4},
    "latent": {
        "layers": "*(local_mla,mlp)",
        "mla.kv_rank": 16,
        "mla.query_rank": 12,
        "mla.rotary_size": 4,
    },
    "convolution": {"layers": "*(conv,mlp local,mlp)", "conv.kernel_size": 4, "conv.bias": True},
    "delta": {"layers": "*(gated_delta,mlp local,mlp)"} | DELTA_SIZES,
    "mamba": {  # and attention to a window
        "layers": "*(mamba local,mlp)",
        "mamba.num_heads": 8,
        "mamba.head_dim": 8,
        "mamba.num_groups": 2,
        "mamba.state_size": 8,
        "mamba.chunk": 4,
    },
    "experts": {"layers": "*(local,moe)", "moe.num_experts": 4, "moe.ffn_size": 24},
    "longrope": {
        "rotary.scaling": RotaryScaling.longrope,
        "rotary.factor": 8.0,
        "rotary.original_length": 11,  # of PROMPTS and NEW tokens: two are longer
        "rotary.short_factors": (1.0, 1.0),
        "rotary.long_factors": (3.0, 9.0),
        "rotary.base": 50.0,
    },
}
MODELS["current longrope"] = MODELS["longrope"]
MODELS["dropping experts"] = MODELS["experts"] | {"moe.capacity_factor": 0.5}


@functools.cache
def trained(kind: str, **parallel: int) -> Trained:
    """A tiny model on a layout, one device by default, whose text is not the same all over."""
    model = {"layers": "*(local,mlp)", "attention.window": 7, **MODELS[kind]}
    model |= {"init_std": 0.3, "max_position": LENGTH, "vocab_size": 257}
    config = tiny(model, **parallel or {"fsdp": 1})
    mesh = mesh_of(config)
    _, _, state = tiny_state(config, mesh)
    longrope = LongRope.current if kind.startswith("current") else LongRope.longest
    return Trained(state.model, config, load_tokenizer("bytes"), 0, mesh, longrope=longrope)


def adapter(model, rank: int, part: str) -> Adapter:
    """Random matrices; each layer has a rank of its own."""
    rng = np.random.default_rng(rank)

    def pair(layer: int, width_in: int, width_out: int):
        shapes = (width_in, rank + layer), (rank + layer, width_out)
        return tuple(0.2 * rng.standard_normal(shape, np.float32) for shape in shapes)

    shapes = {p: linear.weight.shape for p, linear in linears(model).items() if part in p}
    return {p: {i: pair(i, *shape[1:]) for i in range(shape[0])} for p, shape in shapes.items()}


@functools.cache
def adapted(kind: str, *names: str, **parallel: int) -> Trained:
    """The model of `trained` with some of ADAPTERS."""
    base = trained(kind, **parallel)
    return attached(base, {name: adapter(base.model, *ADAPTERS[name]) for name in names})


@functools.cache
def engine(kind: str, **parallel: int) -> Engine:
    return Engine(adapted(kind, *ADAPTERS, **parallel), **SMALL)


@functools.cache
def forward(kind: str):
    """The logits [L, V] of a padded row with a number of new tokens, without a cache, of the model
    that an adapter is merged into."""
    kind = "experts" if kind == "dropping experts" else kind
    models = {name: merged(adapted(kind, name).model) for name in ADAPTERS}
    models[""] = trained(kind).model

    def logits_LV(model, ids_BL, row_length):
        ctx = Context(jnp.arange(LENGTH)[None], row_lengths_B=row_length[None])
        return model.logits(model.hidden(ids_BL, ctx)[0])[0]

    def padded(ids, prompt, name=""):
        row = np.pad(ids, (0, LENGTH - len(ids)))[None]
        length = len(ids) if kind.startswith("current") else len(prompt) + NEW
        return np.asarray(jitted(models[name], row, np.int32(length)))[: len(ids)]

    jitted = jax.jit(logits_LV)
    return padded


def log_softmax(logits_V):
    return logits_V - np.logaddexp.reduce(logits_V, axis=-1, keepdims=True)


def check_greedy(kind: str, prompt, reply: Reply) -> None:
    """The tokens are those of whole forward passes, and so are the log-probabilities."""
    ids, name = prompt, reply.request.adapter
    near = {"atol": MERGED if name else NEAR, "rtol": NEAR}
    for token, logprob, top in zip(reply.tokens, reply.logprobs, reply.top, strict=True):
        wanted_V = log_softmax(forward(kind)(ids, prompt, name)[-1])
        assert token == top[0][0] == np.argmax(wanted_V)
        np.testing.assert_allclose(logprob, wanted_V[token], **near)
        likeliest = np.argsort(-wanted_V)[:3]
        np.testing.assert_allclose([x for _, x in top], wanted_V[likeliest], **near)
        ids = np.append(ids, token)
    assert len(ids) == len(prompt) + NEW and reply.reason == "length"


QUICK = ("grouped", "current longrope")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in MODELS]
)
def test_greedy_replies_are_those_of_repeated_forward(kind):
    """Of the base model and of adapters, all at once."""
    served, names = engine(kind), ["", *ADAPTERS]
    pairs = [(p, Request(NEW, GREEDY, adapter=name)) for p in PROMPTS for name in names]
    replies = [served.submit(*pair) for pair in pairs]
    while served.step():
        pass
    for (prompt, _), reply in zip(pairs, replies, strict=True):
        check_greedy(kind, prompt, reply)
    assert len({tuple(reply.tokens) for reply in replies}) > 2 * len(PROMPTS)
    assert served.programs.compiled() == 2


@pytest.mark.slow
def test_replies_of_the_base_model_have_the_same_bits_without_adapters():
    without = Engine(trained("grouped"), **SMALL)
    for sampling in (GREEDY, SAMPLED):
        request = Request(NEW, sampling)
        one, other = (each.generate(PROMPTS, request) for each in (without, engine("grouped")))
        assert [*map(result, one)] == [*map(result, other)]


def test_log_probabilities_of_prompts_are_those_of_forward():
    """Of every token after the first, also in shared pages, and without a new token."""
    for new in (NEW, 0):
        request = Request(new, GREEDY, prompt_logprobs=True)
        replies = engine("grouped").generate(PROMPTS, request)
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            wanted_LV = log_softmax(forward("grouped")(prompt, prompt)[:-1])
            wanted_L = wanted_LV[np.arange(len(prompt) - 1), prompt[1:]]
            np.testing.assert_allclose(reply.prompt_logprobs, wanted_L, atol=NEAR)
            assert [top[0][0] for top in reply.prompt_top] == wanted_LV.argmax(-1).tolist()
            assert len(reply.tokens) == new and reply.reason == "length"


@pytest.mark.parametrize("name", CHANGED)
def test_penalties_and_biases_change_what_is_taken(name):
    """By the formulas of vLLM (repetition: Keskar et al., 2019), over the prompt and the reply."""
    sampling = CHANGED[name]
    plain = engine("grouped").generate(PROMPTS, Request(NEW, GREEDY))
    replies = engine("grouped").generate(PROMPTS, Request(NEW, sampling))
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        ids = prompt.tolist()
        for token, logprob in zip(reply.tokens, reply.logprobs, strict=True):
            logits_V = forward("grouped")(np.array(ids), prompt)[-1]
            changed_V = logits_V.copy()
            for seen in set(ids):
                rate = sampling.repetition_penalty
                changed_V[seen] *= 1 / rate if changed_V[seen] > 0 else rate
            for seen in ids[len(prompt) :]:
                changed_V[seen] -= sampling.frequency_penalty
            changed_V[[*{*ids[len(prompt) :]}]] -= sampling.presence_penalty
            for biased, value in sampling.logit_bias:
                changed_V[biased] += value
            assert token == np.argmax(changed_V)
            np.testing.assert_allclose(logprob, log_softmax(logits_V)[token], atol=NEAR)
            ids.append(token)
    assert [r.tokens for r in replies] != [r.tokens for r in plain]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("grouped", {"fsdp": 1, "tensor": 8}),  # more devices than key/value heads
        ("grouped", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("latent", {"fsdp": 2, "tensor": 2}),
        ("experts", {"data": 2, "fsdp": 1, "expert": 2, "tensor": 2}),
    ],
)
def test_layouts_give_the_same_replies(kind, parallel):
    for name in ("", *ADAPTERS):
        request = Request(NEW, SAMPLED, adapter=name)
        expected = engine(kind).generate(PROMPTS, request, 3)
        found = engine(kind, **parallel).generate(PROMPTS, request, 3)
        assert [r.tokens for r in found] == [r.tokens for r in expected]
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=NEAR)


BEGINNINGS = [np.random.default_rng(n).integers(0, 61, 24) for n in range(2)]
REQUESTS = st.tuples(
    st.integers(0, 1),  # how the prompt begins
    st.integers(1, 24),  # its length
    st.integers(1, 12),  # new tokens
    st.sampled_from([GREEDY, SAMPLED, *CHANGED.values(), "scored", "regex"]),
    st.integers(0, 2),  # number
    st.sampled_from(["", *ADAPTERS]),
)
ARRIVALS = st.tuples(REQUESTS, st.integers(0, 4), st.sampled_from([None, None, None, 1, 6]))


def submit(engine: Engine, request) -> Reply:
    beginning, length, count, kind, number, name = request
    if kind == "scored":
        wanted = Request(count, GREEDY, prompt_logprobs=True, adapter=name)
    elif kind == "regex":
        wanted = Request(count, SAMPLED, engine.ends, ("9",), words(), adapter=name)
    else:
        wanted = Request(count, kind, adapter=name)
    return engine.submit(BEGINNINGS[beginning][:length], wanted, 5, number)


@functools.cache
def words():
    return engine("grouped").grammars.compile("regex", "([a-z]{2,3}[0-9])+")


def result(reply: Reply) -> tuple:
    return reply.tokens, reply.logprobs, reply.top, reply.prompt_logprobs, reply.prompt_top


def reset(engine: Engine, **changes) -> Scheduler:
    """Give an idle engine a scheduler with changed limits, which knows no pages."""
    engine.scheduler = Scheduler(dataclasses.replace(engine.scheduler.limits, **changes))
    return engine.scheduler


@functools.cache
def alone(kind: str, request) -> tuple:
    reset(engine(kind), shares=False)
    reply = submit(engine(kind), request)
    while engine(kind).step():
        pass
    return reply, result(reply)


def check_load(kind: str, arrivals, pages: int, shares: bool, chunks: int) -> int:
    """Requests that arrive so many steps after another, and some that are cancelled so many steps
    after their arrival, in a cache of few pages. Returns the number of preemptions."""
    expected = [alone(kind, request) for request, _, _ in arrivals]
    served, before = engine(kind), engine(kind).scheduler.limits
    scheduler = reset(served, pages=pages, shares=shares, chunks=chunks)
    times = np.cumsum([gap for _, gap, _ in arrivals]).tolist()
    ends = [time + c if c else None for time, (_, _, c) in zip(times, arrivals, strict=True)]
    replies: list[Reply] = []
    try:
        for step in itertools.count():
            while len(replies) < len(arrivals) and times[len(replies)] <= step:
                replies.append(submit(served, arrivals[len(replies)][0]))
            for reply, end in zip(replies, ends, strict=False):
                if end == step:
                    served.cancel(reply)
            if not served.step() and len(replies) == len(arrivals):
                break
    finally:
        reset(served, **vars(before))
    for (request, _, cancel), reply, (wanted, lists) in zip(
        arrivals, replies, expected, strict=True
    ):
        if reply.reason == "cancelled" and cancel:
            for found, whole in zip(result(reply), lists, strict=True):
                assert found == whole[: len(found)], request
            assert wanted.text.startswith(reply.text.rstrip("\ufffd"))
        else:
            assert (reply.reason, reply.text) == (wanted.reason, wanted.text), request
            assert result(reply) == lists, request
    assert not any(scheduler.lanes) and not scheduler.waiting
    assert scheduler.pages[0].available == pages
    assert served.programs.compiled() <= 2
    return scheduler.preemptions


@pytest.mark.parametrize(
    "kind",
    ["grouped", *(pytest.param(k, marks=pytest.mark.slow) for k in MODELS if k != "grouped")],
)
def test_a_reply_does_not_depend_on_what_else_is_served(kind):
    """Bit for bit: tokens and log-probabilities, with shared pages and with too few of them."""
    shareable = kind not in ("convolution", "delta", "mamba")
    preemptions = 0

    rows = [(0, 12, SAMPLED, 0, ""), (1, 14, GREEDY, 1, "whole"), (0, 16, SAMPLED, 2, "inner")]
    rows = [(beginning, length, 12, *rest) for beginning, length, *rest in rows]

    @example([(row, 0, None) for row in rows], 10, True, 1)  # the last one gives up its pages
    @settings(max_examples=15 if kind == "grouped" else 40, deadline=None, database=None)
    @given(
        st.lists(ARRIVALS, min_size=1, max_size=6),
        st.integers(9, 20),  # pages: the longest request needs 9
        st.booleans(),
        st.integers(1, 3),
    )
    def check(arrivals, pages, shares, chunks):
        nonlocal preemptions
        preemptions += check_load(kind, arrivals, pages, shares and shareable, chunks)

    check()
    assert preemptions


@functools.cache
def proposing(kind: str) -> Engine:
    return Engine(adapted(kind, *ADAPTERS), **SMALL, num_speculative_tokens=3)


@pytest.mark.parametrize("kind", ["grouped", pytest.param("latent", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROPOSED)
def test_proposals_change_no_reply(kind, name):
    """Greedy or sampled, with penalties, a grammar, and when pages run out, but in fewer steps."""
    plain, ahead = engine(kind), proposing(kind)
    repeated = [np.tile(prompt[:4], 4) for prompt in PROMPTS]
    request = Request(24, PROPOSED[name], grammar=words() if name == "grammar" else None)
    before = plain.decode_steps
    expected = plain.generate(repeated, request, 3)
    plain_steps, pages = plain.decode_steps - before, ahead.scheduler.limits.pages
    for few in (False, True):
        scheduler, before = reset(ahead, pages=14 if few else pages), ahead.decode_steps
        found = ahead.generate(repeated, request, 3)
        for a, b in zip(found, expected, strict=True):
            assert (a.tokens, a.text, a.reason) == (b.tokens, b.text, b.reason)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=NEAR)
        if name == "repeating" and not few:
            assert ahead.decode_steps - before < 0.7 * plain_steps
        assert bool(scheduler.preemptions) == few
        assert scheduler.pages[0].available == scheduler.limits.pages
    reset(ahead, pages=pages)
    assert ahead.programs.compiled() == 2


@pytest.mark.parametrize("kind", ["convolution", "delta", "mamba"])
def test_states_are_neither_taken_back_nor_shared(kind, capsys):
    with pytest.raises(ValueError, match="3 draft tokens: this model has layers with states"):
        Engine(trained(kind), **SMALL, num_speculative_tokens=3)
    start.load(Serve(max_num_seqs=2, chunk=8, block_size=4, run_dir="runs/gpt"), trained(kind))
    assert "no prefix cache" in capsys.readouterr().out


def test_a_shared_beginning_is_read_once():
    served = engine("grouped")
    reset(served, shares=True)
    for count, name in enumerate(("", "whole"), 1):  # they share no page with each other
        request = Request(2, GREEDY, adapter=name)
        first, second = (served.generate([BEGINNINGS[0]], request)[0] for _ in range(2))
        assert (first.tokens, first.logprobs) == (second.tokens, second.logprobs)
        assert served.scheduler.shared_tokens == 16 * count  # chunks of 8; the last token is read


def test_replies_end_at_their_own_ends_and_not_in_them():
    free = engine("grouped").generate(PROMPTS, Request(NEW, GREEDY))
    ends = (free[0].tokens[2], free[1].tokens[4])
    found = engine("grouped").generate(PROMPTS, Request(NEW, GREEDY, ends))
    for reply, whole in zip(found, free, strict=True):
        places = [i for i, token in enumerate(whole.tokens) if token in ends]
        assert reply.tokens == (whole.tokens[: places[0]] if places else whole.tokens)
        assert reply.reason == ("stop" if places else "length")
    assert len(found[0].tokens) <= 2 and len(found[1].tokens) <= 4


def test_numbers_and_seeds_make_other_texts():
    one, two = engine("grouped").generate([PROMPTS[1]] * 2, Request(NEW, SAMPLED), 3)
    other = engine("grouped").generate([PROMPTS[1]], Request(NEW, SAMPLED), 4)[0]
    assert one.tokens != two.tokens and one.tokens != other.tokens


def test_a_stream_is_the_text_in_pieces():
    served, request = engine("grouped"), Request(NEW, SAMPLED)
    for prompt in PROMPTS[:2]:
        pieces = [*served.stream(prompt, request, 3)]
        assert "".join(pieces) == served.generate([prompt], request, 3)[0].text
        assert len(pieces) > NEW // 3 and all(pieces)
    stream = served.stream(prompt, request, 3)
    assert next(stream)
    stream.close()  # a reader who leaves
    assert not served.scheduler.lanes.count(None) < 3 and not served._active


@pytest.mark.slow
def test_a_bfloat16_cache_is_not_converted_on_a_cpu():
    """XLA would make a float32 copy of the whole pool in every step."""
    config = tiny({"max_position": LENGTH, "dtype": DType.bfloat16}, fsdp=1)
    mesh = mesh_of(config)
    model = tiny_state(config, mesh)[2].model
    served = Engine(Trained(model, config, load_tokenizer("null:61"), 0, mesh), pages=24, **SMALL)
    programs = served.programs
    sent = programs.packed({}), programs.changes({})
    given = programs.model, programs.cache, programs.tokens, *sent
    text = programs.decode_program.lower(*given).compile().as_text()
    layers, _, slots, heads, size = jax.tree.leaves(programs.cache)[0].shape[1:]
    pool = rf"\[(1,)?({layers},24|{layers * 24}),{slots},{heads},{size}\]"
    assert re.search("u16" + pool, text) and not re.search("f32" + pool, text)
    assert len(served.generate([PROMPTS[0]], Request(3, GREEDY))[0].tokens) == 3


@pytest.mark.slow
def test_text_ends_with_its_document():
    model = dataclasses.replace(trained("grouped"), tokenizer=load_tokenizer("bytes"))
    (whole,) = engine("grouped").generate([model.tokenizer.encode("abc")], Request(4, GREEDY))
    end = model.tokenizer.eod = whole.tokens[-1]
    text = model.tokenizer.decode(whole.tokens[: whole.tokens.index(end)])
    assert continue_text(model, "abc", 4, GREEDY, 0) == text != whole.text


def test_bad_prompts_are_named():
    served, request = engine("grouped"), Request(8, GREEDY)
    long, unknown = np.zeros(57, np.int32), dataclasses.replace(request, adapter="x")
    few = Engine(trained("grouped"), pages=10, **SMALL)
    cases = [
        (served, [PROMPTS[0], long[:0]], request, "prompt 2 of 2: the prompt is empty"),
        (served, [long, PROMPTS[0]], request, "prompt 1 of 2: a prompt of 57 tokens and 8 new"),
        (served, [np.array([3, 257])], request, "token 257 is not in the model's vocabulary"),
        (served, [PROMPTS[0]], unknown, "'x' is not one of '', 'whole', 'narrow', 'inner"),
        (few, [long[:40]], request, "40 tokens and 8 new ones exceed the cache, 10 pages"),
    ]
    for asked, prompts, wanted, message in cases:
        with pytest.raises(ValueError, match=message):
            asked.generate(prompts, wanted)
    with pytest.raises(ValueError, match="57 tokens and 8 new ones exceed the context of 64"):
        served.stream(long, request)
    with pytest.raises(ValueError, match="num_tokens=0 must be at least 1"):
        Request(0, GREEDY)
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="max_num_seqs=0 must be"):
        Engine(trained("grouped"), lanes=0)  # pyright: ignore
    check_length(1, 15, 16)
    with pytest.raises(ValueError, match="at most 0 tokens"):
        check_length(17, 1, 16)
