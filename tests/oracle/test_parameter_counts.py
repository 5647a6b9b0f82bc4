"""transformers' own model of every named architecture has as many parameters as ours."""

import jax
import pytest
import torch
import transformers

from maxmeg.hf.families import hf_config
from maxmeg.models.lm import LM
from maxmeg.models.registry import ARCHITECTURES, architecture

FAMILIES = {  # by how names begin
    "gpt2-": "GPT2LMHeadModel",
    "gpt3-": "GPT2LMHeadModel",
    "22b": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "smollm2": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2.5": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "pythia": "GPTNeoXForCausalLM",
    "gpt-neox": "GPTNeoXForCausalLM",
    "falcon": "FalconForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "minitron": "NemotronForCausalLM",
    "nemotron4": "NemotronForCausalLM",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_as_many_as_those_of_transformers(name: str):
    config = architecture(name)
    (family,) = {FAMILIES[start] for start in FAMILIES if name.startswith(start)}
    written = hf_config(config, family)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.CONFIG_MAPPING[written["model_type"]](**written)
        )
    config.vocab_divisible_by = 1
    ours = jax.eval_shape(lambda key: LM(key, config), jax.random.key(0))
    expected = sum(parameter.numel() for parameter in theirs.parameters())  # tied ones once
    assert sum(array.size for array in jax.tree.leaves(ours)) == expected
