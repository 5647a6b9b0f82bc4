"""transformers' own model of every named architecture has as many parameters as ours."""

import jax
import pytest
import torch
import transformers

from maxmeg.hf.families.read import BIAS, hf_config
from maxmeg.models.lm import LM
from maxmeg.models.registry import ARCHITECTURES, architecture
from maxmeg.state import array_name

FAMILIES = {  # by how names begin
    "gpt2-": "GPT2LMHeadModel",
    "gpt3-": "GPT2LMHeadModel",
    "22b": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "smollm2": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2.5": "Qwen2ForCausalLM",
    "qwen3-": "Qwen3ForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
    "qwen3.5": "Qwen3_5ForCausalLM",
    "kimi-linear": "KimiLinearForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "pythia": "GPTNeoXForCausalLM",
    "gpt-neox": "GPTNeoXForCausalLM",
    "falcon-7b": "FalconForCausalLM",
    "falcon-40b": "FalconForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "nemotron-": "NemotronHForCausalLM",
    "bamba": "BambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "granite-4.0-h": "GraniteMoeHybridForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "minitron": "NemotronForCausalLM",
    "nemotron4": "NemotronForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen1.5-moe": "Qwen2MoeForCausalLM",
    "qwen2-57b": "Qwen2MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "glm4.5": "Glm4MoeForCausalLM",
    "deepseek-v2": "DeepseekV2ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "moonlight": "DeepseekV3ForCausalLM",
    "bert-": "BertForPreTraining",
    "roberta-": "RobertaForMaskedLM",
    "megatron-bert": "MegatronBertForPreTraining",
    "modernbert": "ModernBertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_as_many_as_those_of_transformers(name: str):
    config = architecture(name)
    family = FAMILIES[max((start for start in FAMILIES if name.startswith(start)), key=len)]
    is_moe = config.has("moe") and family in ("Qwen3ForCausalLM", "Qwen3_5ForCausalLM")
    family = family.replace("For", "MoeFor") if is_moe else family
    written = hf_config(config, family)
    with torch.device("meta"):
        kind = getattr(transformers, family)
        theirs = kind(kind.config_class(**written))
    config.vocab_divisible_by = 1
    ours = jax.eval_shape(lambda key: LM(key, config), jax.random.key(0))
    expected = sum(parameter.numel() for parameter in theirs.parameters())  # tied ones once
    if name.startswith("t5-v1.1"):  # the class ties what the files have apart
        expected += theirs.lm_head.weight.numel()
    leaves = jax.tree_util.tree_leaves_with_path(ours)  # there counts are no parameters
    sizes = [array.size for path, array in leaves if not array_name(path).endswith(BIAS)]
    assert sum(sizes) == expected
