"""What encoder-decoders write: equal to forward passes over the whole target, and the same whatever
else is served."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state

import maxmeg
from maxmeg.config.data import Objective
from maxmeg.config.mixers import Activation
from maxmeg.config.model import DType, Norm, Position
from maxmeg.data.samples.aligned import start_token
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import Trained
from maxmeg.inference.prompts import prompt_tokens
from maxmeg.inference.requests import Reply, Request
from maxmeg.inference.sampling import Sampling
from maxmeg.layers.context import Source

TOLERANCE = 1e-5  # of log-probabilities
LENGTH, NEW, PAD = 24, 12, 259
SMALL = {"max_num_seqs": 3, "block_size": 4}  # fewer lanes than sources
TOKENIZER = "bytes?extra_ids=2&pad=<pad>"
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(top_k=20, top_p=0.9)
SOURCES = [np.random.default_rng(n).integers(0, 256, n) for n in (5, LENGTH, 1, 13, 22)]
LAYERS = "2(encoder_attention,encoder_mlp) encoder_norm *(attention,cross,mlp)"
RELATIVE = {"layers": LAYERS, "num_layers": 5, "position": Position.relative}
RELATIVE |= {"relative.buckets": 8, "relative.distance": 12, "attention.scale": 1.0}
MODELS = {
    "T5 v1.0": {**RELATIVE, "tied": True, "logit_scale": 0.2, "mlp.activation": Activation.relu},
    "T5 v1.1": {**RELATIVE, "mlp.activation": Activation.geglu},
    "Megatron": {"position": Position.learned, "norm": Norm.layernorm, "tied": True}
    | {"attention.bias_qkv": True, "mlp.bias": True, "layers": LAYERS, "num_layers": 6},
    "one layer": RELATIVE  # of each side, all in one unit
    | {"layers": "encoder_attention,encoder_mlp encoder_norm attention,cross,mlp", "num_layers": 3},
}
QUICK = "T5 v1.1"


@functools.cache
def trained(name: str, **parallel: int) -> Trained:
    model = {"init_std": 0.3, "max_position": LENGTH, "vocab_size": 260, **MODELS[name]}
    config = tiny(model, **parallel or {"fsdp": 1})
    config.data.objective, config.data.paths = Objective.seq2seq, ("source", "target")
    config.data.tokenizer = TOKENIZER
    mesh = mesh_of(config)
    return Trained(tiny_state(config, mesh)[2].model, config, load_tokenizer(TOKENIZER), 0, mesh)


@functools.cache
def engine(name: str, **parallel: int) -> Engine:
    return Engine(trained(name, **parallel), **SMALL)


@functools.cache
def logits(name: str):
    """The logits [L, V] after a source and a target of any length."""

    @jax.jit
    def whole(model, ids, target, length):
        segments = (jnp.arange(LENGTH) < length).astype(jnp.int32)
        return model(target[None], Source.of(ids[None], segments[None]))[0]

    def of(ids: np.ndarray, target: list[int]) -> np.ndarray:
        padded = [np.pad(row, (0, LENGTH - len(row))) for row in (ids, target)]
        return np.asarray(whole(trained(name).model, *padded, len(ids)))[: len(target)]

    return of


def result(reply: Reply) -> tuple:
    return reply.tokens, reply.logprobs, reply.reason


def check_greedy(name: str, source: np.ndarray, reply: Reply) -> None:
    """Each token is the likeliest of a forward pass over the whole target."""
    wanted_LV = jax.nn.log_softmax(logits(name)(source, [PAD, *reply.tokens[:-1]]))
    assert reply.tokens == wanted_LV.argmax(axis=-1).tolist() and len(reply.tokens) == NEW
    wanted_L = np.max(wanted_LV, axis=-1)
    np.testing.assert_allclose(reply.logprobs, wanted_L, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != QUICK)) for n in MODELS]
)
def test_replies_are_those_of_forward_and_of_each_source_alone(name):
    """Of a batch: bit for bit those of single requests, and one token at a time those of forward
    passes over source and target. The encoder's layers run in prefill alone."""
    assert start_token(load_tokenizer(TOKENIZER)) == PAD
    served = engine(name)
    replies = served.generate(SOURCES, Request(NEW, GREEDY))
    for source, reply in zip(SOURCES, replies, strict=True):
        check_greedy(name, source, reply)
        assert result(served.generate([source], Request(NEW, GREEDY))[0]) == result(reply)
    assert len({tuple(reply.tokens) for reply in replies}) > 2
    assert served.programs.compiled() == 2


@pytest.mark.slow
def test_few_pages_and_proposals_change_no_reply():
    model = trained(QUICK)
    wanted = {s: engine(QUICK).generate(SOURCES, Request(NEW, s), 3) for s in (GREEDY, SAMPLED)}
    few = Engine(model, **SMALL, pages=4)
    for sampling, replies in wanted.items():
        found = few.generate(SOURCES, Request(NEW, sampling), 3)
        assert [*map(result, found)] == [*map(result, replies)]
    assert few.scheduler.preemptions and not few.scheduler.shared_tokens
    proposing = Engine(model, **SMALL, num_speculative_tokens=2)
    found = proposing.generate(SOURCES, Request(NEW, GREEDY))
    assert [reply.tokens for reply in found] == [reply.tokens for reply in wanted[GREEDY]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel"),
    [("T5 v1.0", {"data": 2, "fsdp": 2, "tensor": 2}), ("Megatron", {"fsdp": 4})],
)
def test_layouts_give_the_same_replies(name, parallel):
    found, wanted = (
        served.generate(SOURCES, Request(NEW, SAMPLED), 3)
        for served in (engine(name, **parallel), engine(name))
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE)


@pytest.mark.slow
def test_sources_are_texts(tmp_path):
    """Sentinels and the end of a source are tokens; a saved run, here rounded, writes text too."""
    model = maxmeg.LanguageModel.of(trained(QUICK))
    tokens = [97, 257, 98, model.tokenizer.eod]
    assert model.encode("a<extra_id_0>b").tolist() == tokens
    model.config.data.objective = Objective.span_corruption
    assert model.encode("a<extra_id_0>b").tolist() == tokens[:-1]
    model.config.data.objective = Objective.seq2seq
    settings = {"max_new_tokens": NEW, "temperature": 0}
    text = model.generate("abc", **settings)
    assert text and "".join(model.stream("abc", **settings)) == text
    model.save(tmp_path / "run")
    rounded = maxmeg.load(tmp_path / "run", dtype=DType.bfloat16.value)
    assert rounded.generate("abc", **settings)


def test_what_is_refused():
    served, tokenizer = engine(QUICK), load_tokenizer(TOKENIZER)
    cases = [
        (np.arange(LENGTH + 1), Request(1, GREEDY), "has 25 tokens, and the encoder takes 1 to 24"),
        (np.arange(0), Request(1, GREEDY), "the source has 0 tokens"),
        (np.arange(3), Request(LENGTH, GREEDY), "at most 23 tokens"),
        (np.arange(3), Request(1, GREEDY, prompt_logprobs=True), "no log-probabilities of its so"),
    ]
    for source, request, message in cases:
        with pytest.raises(ValueError, match=message):
            served.submit(source, request)
    model = maxmeg.LanguageModel.of(trained(QUICK))
    with pytest.raises(ValueError, match="this takes one text"):
        model.logits("abc")
    assert prompt_tokens(tokenizer, trained(QUICK).config, "a", special=False).tolist() == [97]
