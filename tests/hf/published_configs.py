"""Published config.json files: those of tests/golden/configs, and in its folder `further` settings
in the same form. Gemma 4's are of copies by others (MLX, Unsloth), without their quantization."""

import json
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"


def published(name: str) -> dict:
    """A config.json, without the description of quantized weights."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    return {key: value for key, value in config.items() if key != "quantization_config"}


# Number of parameters, of Qwen 3.5 and Gemma 4 without the vision towers.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama3.1-8b": 8_030_261_248,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen2.5-14b": 14_770_033_664,
    "qwen3-8b": 8_190_735_360,
    "gemma2-9b": 9_241_705_984,
    "olmo2-32b": 32_234_279_936,
    "phi3-mini-128k": 3_821_079_552,
    "pythia-12b": 11_846_072_320,
    "falcon-40b": 41_303_293_952,
    "starcoder2-3b": 3_030_371_328,
    "minitron-8b": 8_271_699_968,
    "gpt2-1.5b": 1_557_611_200,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-120b": 116_829_156_672,
    "glm4.5": 356_785_898_816,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 682_636_487_424,
    "gemma4-e2b": 4_628_569_379,
    "gemma4-e4b": 7_463_013_418,
    "gemma4-26b-a4b": 25_233_141_790,
    "further/gemma3-4b": 3_880_263_168,
    "further/nemotron-h-8b": 8_100_852_736,
    "further/bamba-9b": 9_780_235_392,
    "further/granite-4.0-h-tiny": 6_939_037_248,
    "further/falcon-h1-0.5b": 521_411_104,
    "further/mamba2-2.7b": 2_702_599_680,
    "further/lfm2-1.2b": 1_170_340_608,
    "further/qwen3-coder-next": 79_674_391_296,
    "further/qwen3.5-27b": 27_781_427_952 - 460_730_096,
    "further/qwen3.5-35b-a3b": 35_951_822_704 - 446_571_248,
    "further/kimi-linear-48b": 49_122_681_728,
    "further/bert-base": 109_514_298,
    "further/roberta-base": 124_697_433,
    "further/modernbert-base": 149_655_232,
    "further/t5-base": 222_903_552,
    "further/flan-t5-base": 247_577_856,
}
FIELDS = {  # of models that no named architecture is
    "further/lfm2-1.2b": "mlp.ffn_size=8192; conv.kernel_size=3; rotary.base=1000000.0",
    "further/qwen3-coder-next": "layers=*(3(gated_delta,moe) attention,moe); moe.top_k=10",
    "further/kimi-linear-48b": "layers=kda,mlp 6(2(kda,moe) mla,moe kda,moe) *(kda,moe mla,moe)",
    "further/bert-base": "norm_place=post_residual; bert.token_types=2",
}
MEGATRON_BERT = {  # megatron-bert-cased-345m
    "architectures": ["MegatronBertForPreTraining"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "model_type": "megatron-bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 29056,
}
# The same of other classes: what they change in a file of `further`.
CLASSES = {
    "bert-base, pairs": (
        *("bert-base", {"architectures": ["BertForPreTraining"]}, 110_106_428),
        "bert.pair_head=true; norm_eps=1e-12",
    ),
    "bert-base, its layers": (
        *("bert-base", {"architectures": ["BertModel"]}, 109_482_240),
        "bert.pooler=true; bert.transform=none",
    ),
    "megatron bert": (
        *("bert-base", MEGATRON_BERT, 334_723_458),
        "norm_place=pre; bert.embedding_norm=false",
    ),
}
PUBLISHED = {
    name: (published(name), parameters, FIELDS.get(name, ""))
    for name, parameters in PARAMETERS.items()
}
PUBLISHED |= {
    name: ({**published(f"further/{file}"), **changes}, *row)
    for name, (file, changes, *row) in CLASSES.items()
}
