"""Proposals of MTP layers: those of forward passes without a cache; they change no reply."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state

from maxmeg.config.schema import Config
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import Trained
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Rows, Sampling, sample
from maxmeg.layers.context import Context

PROMPTS = [np.arange(5), np.arange(30, 41), np.array([7]), np.arange(20, 38)]
LENGTH, NEW, DEPTHS, SEED = 64, 20, 2, 3
SMALL = {"max_num_seqs": 3, "block_size": 4, "chunk": 8}
WARM = Sampling(temperature=4.0)  # so warm that the layers of a random model often agree
KINDS = {
    "grouped": {
        "layers": "*(local,mlp)",
        "attention.window": 7,
        "attention.num_kv_heads": 4,
        "mtp.layers": "mlp,attention",
    },
    "experts": {
        "layers": "*(mla,moe)",
        "mla.kv_rank": 16,
        "mla.rotary_size": 4,
        "moe.num_experts": 4,
        "moe.ffn_size": 24,
        "moe.capacity_factor": 0.5,
    },
}


def config_of(kind: str, **parallel: int) -> Config:
    size = {"init_std": 0.3, "max_position": LENGTH, "vocab_size": 257, "mtp.num_layers": DEPTHS}
    return tiny({**KINDS[kind], **size}, **parallel or {"fsdp": 1})


@functools.cache
def trained(kind: str = "grouped", **parallel: int) -> Trained:
    config = config_of(kind, **parallel)
    _, _, state = tiny_state(config, mesh_of(config))
    return Trained(state.model, config, load_tokenizer("bytes"), 0, mesh_of(config))


@functools.cache
def engine(proposals: int, kind: str = "grouped", **parallel: int) -> Engine:
    return Engine(trained(kind, **parallel), **SMALL, num_speculative_tokens=proposals)


@jax.jit
def drafts_after(ids_L, later_DL, place, temperature, known):
    """What each MTP layer proposes at a place, without a cache. later_DL: the tokens it reads."""
    model, ctx = trained().model, Context(jnp.arange(LENGTH)[None])
    x_BLD, drafts = model.hidden(ids_L[None], ctx)[0], []
    for d, (depth, later_L) in enumerate(zip(model.mtp.depths, later_DL, strict=True)):
        x_BLD = depth.joined(x_BLD, model.embed_side(later_L[None], ctx))
        x_BLD = depth.final_norm(depth.layer({"target": x_BLD}, ctx)[0]["target"])
        settings = temperature, 0, 1.0, 0.0, SEED, 0, known + d
        rows = Rows(*(jnp.array([value]) for value in settings))
        drafts.append(sample(model.logits(x_BLD)[0, place][None], rows)[0])
    return jnp.stack(drafts)


def steps_alone(prompt, tokens: list[int], sampling: Sampling) -> int:
    """Decode steps that a request takes. The second layer has cached what it computed from the
    token that was proposed after the newest one."""
    ids = np.append(prompt, tokens)
    row = np.pad(ids, (0, LENGTH - len(ids)))
    later_DL, known, steps = np.stack([np.roll(row, -d - 1) for d in range(DEPTHS)]), 1, 0
    while known < len(tokens):
        place = len(prompt) + known - 2
        for _ in range(DEPTHS):
            drafts = drafts_after(row, later_DL, place, sampling.temperature, known).tolist()
            later_DL[1:, place] = drafts[0]
        ahead = drafts[: len(tokens) - known - 1]
        taken = 0
        while taken < len(ahead) and ahead[taken] == tokens[known + taken]:
            taken += 1
        known, steps = known + taken + 1, steps + 1
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [WARM, replace(WARM, temperature=0.0)])
def test_proposals_are_those_of_forward_passes(sampling):
    """So a request takes exactly as many steps as they say."""
    served, found = engine(DEPTHS), []
    for prompt in PROMPTS:
        before = served.decode_steps
        reply = served.generate([prompt], Request(NEW, sampling), SEED)[0]
        found.append(served.decode_steps - before)
        assert found[-1] == steps_alone(prompt, reply.tokens, sampling)
    assert max(found) < 15 if sampling is WARM else max(found) == NEW - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("grouped", {}),
        ("grouped", {"fsdp": 2, "tensor": 2}),
        ("experts", {"fsdp": 1, "expert": 2, "tensor": 2}),
    ],
)
def test_proposals_change_no_reply(kind, parallel):
    """Greedy or sampled, with fewer proposals than layers, and when pages run out."""
    plain = engine(0, kind, **parallel)
    for proposals in range(1, DEPTHS + 1):
        ahead = engine(proposals, kind, **parallel)
        for sampling in (WARM, Sampling(temperature=0), Sampling(top_k=20, frequency_penalty=0.5)):
            request = Request(NEW, sampling)
            steps = plain.decode_steps, ahead.decode_steps
            expected = plain.generate(PROMPTS, request, SEED)
            found = ahead.generate(PROMPTS, request, SEED)
            assert [r.tokens for r in found] == [r.tokens for r in expected]
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
            if sampling is WARM:
                assert ahead.decode_steps - steps[1] < 0.8 * (plain.decode_steps - steps[0])
        assert ahead.programs.compiled() == 2


def test_more_proposals_than_layers_are_refused():
    config = config_of("grouped")
    unread = Trained(None, config, load_tokenizer("bytes"), 0, mesh_of(config))  # pyright: ignore
    with pytest.raises(ValueError, match="3 draft tokens exceed the 2 MTP layers"):
        Engine(unread, **SMALL, num_speculative_tokens=3)
