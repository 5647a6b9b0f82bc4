"""Greedy text is that of Hugging Face's generate, of every family and for prompts of different
lengths at once.

Where a rotation depends on the length of the text (`dynamic`, `longrope`), theirs takes that of the
longest row for all of a batch, ours that of each row: there each prompt is continued alone. Texts
of Phi-3 grow past the original length of `longrope`, where both read them again.
"""

import dataclasses
import re

import numpy as np
import pytest
import torch
import transformers
from chats import CHATS, TEMPLATES, TOKENS
from hf_cases import VOCAB, gated, longrope
from safetensors.numpy import load_file
from test_families_oracle import CASES, imported, saved

import maxmeg
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.options import LongRope
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.schema import Config
from maxmeg.data.chat.template import ChatTemplate
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.hf.families.read import model_config
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import with_longrope
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling

COUNT = 32
LENGTHS = (8, 3, 5)
SETTLED = {**longrope(8), "original_max_position_embeddings": 64}  # longer than every text
# What is decoded does not set them apart.
ELSEWHERE = ("gpt j", "yarn", "qwen 2 moe", "glm 4 moe", "deepseek v2")
MORE = {"longrope": ("LlamaForCausalLM", {**gated(), "rope_parameters": SETTLED})}


def enlivened(model, folder):
    """The model saved anew, its layers stronger than its embeddings: its text is no echo."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"embed_tokens|embed_in|word_emb|wte", name):
                parameter.mul_(0.2)
            elif parameter.ndim == 2 and re.search(r"layers\.|h\.", name):
                parameter.add_(0.4 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.mul_(0.1)
    model.save_pretrained(folder)


def theirs_greedy(model, prompts) -> np.ndarray:
    """Tokens after prompts that are padded on the left."""
    longest = max(map(len, prompts))
    ids, mask = np.zeros((2, len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    model.generation_config.eos_token_id = None  # no row ends early
    actual = model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        max_new_tokens=COUNT,
        do_sample=False,
        pad_token_id=0,
    )
    return actual[:, longest:].numpy()


def ours_greedy(model, config: ModelConfig, prompts) -> list[list[int]]:
    room = max(config.max_position, max(map(len, prompts)) + COUNT)  # theirs goes beyond it
    model_config = dataclasses.replace(config, dtype=DType.float32, max_position=room)
    tokenizer = load_tokenizer(f"null:{config.vocab_size}")
    loaded = maxmeg.LanguageModel(model, Config(model=model_config), tokenizer).trained
    is_longrope = config.rotary.scaling is RotaryScaling.longrope
    served = Engine(with_longrope(loaded, LongRope["current" if is_longrope else "longest"]))
    replies = served.generate(prompts, Request(COUNT, Sampling(temperature=0)))
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize("name", [name for name in CASES | MORE if name not in ELSEWHERE])
def test_greedy_text_equals_transformers(name, tmp_path, monkeypatch):
    if name in MORE:
        monkeypatch.setitem(CASES, name, MORE[name])
    theirs, config = saved(name, tmp_path)
    enlivened(theirs, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    settings = model_config(config)
    ours = imported(tensors, settings, CASES[name][0])
    rng = np.random.default_rng(0)
    kind = config.get("rope_parameters", {}).get("rope_type")
    prompts = [rng.integers(0, VOCAB, length) for length in LENGTHS]
    actual = ours_greedy(ours, settings, prompts)
    if kind in ("dynamic", "longrope") or settings.attention.chunk:  # they chunk padding too
        wanted = np.concatenate([theirs_greedy(theirs, [prompt]) for prompt in prompts])
    else:
        wanted = theirs_greedy(theirs, prompts)
    np.testing.assert_array_equal(actual, wanted)
    assert len(np.unique(actual)) > 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_the_text_of_transformers(name):
    wanted, _ = transformers.utils.chat_template_utils.render_jinja_template(
        list(CHATS.values()), chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS
    )
    assert ChatTemplate(TEMPLATES[name], name, TOKENS).render(list(CHATS.values())) == wanted
