"""Published config.json files: those of tests/golden/configs, and in its folder `further` settings
in the same form."""

import json
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"


def published(name: str) -> dict:
    """A config.json, without the description of quantized weights."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    return {key: value for key, value in config.items() if key != "quantization_config"}


SMOLLM2, LLAMA31, MISTRAL = map(published, ("smollm2-135m", "llama3.1-8b", "mistral-7b-v0.1"))
QWEN25, QWEN3, GEMMA2 = map(published, ("qwen2.5-14b", "qwen3-8b", "gemma2-9b"))
OLMO2, PHI3, PYTHIA = map(published, ("olmo2-32b", "phi3-mini-128k", "pythia-12b"))
FALCON_40B, STARCODER2, NEMOTRON = map(published, ("falcon-40b", "starcoder2-3b", "minitron-8b"))
GPT2, GPT_OSS, GLM45 = map(published, ("gpt2-1.5b", "gpt-oss-120b", "glm4.5"))
MIXTRAL, QWEN2_MOE, QWEN3_MOE = map(published, ("mixtral-8x7b", "qwen2-57b-a14b", "qwen3-30b-a3b"))
DEEPSEEK_V2, DEEPSEEK_V3 = map(published, ("deepseek-v2", "deepseek-v3"))
GEMMA3_4B, LFM2, MAMBA2 = map(
    published, ("further/gemma3-4b", "further/lfm2-1.2b", "further/mamba2-2.7b")
)
NEMOTRON_H, BAMBA = map(published, ("further/nemotron-h-8b", "further/bamba-9b"))
GRANITE4, FALCON_H1 = map(published, ("further/granite-4.0-h-tiny", "further/falcon-h1-0.5b"))
QWEN3_CODER_NEXT, KIMI_LINEAR = map(
    published, ("further/qwen3-coder-next", "further/kimi-linear-48b")
)
# 27B with a vision tower; the language model alone of 35B-A3B.
QWEN35, QWEN35_MOE = map(published, ("further/qwen3.5-27b", "further/qwen3.5-35b-a3b"))
BERT, ROBERTA, MODERN_BERT = map(
    published, ("further/bert-base", "further/roberta-base", "further/modernbert-base")
)
T5, FLAN_T5 = map(published, ("further/t5-base", "further/flan-t5-base"))
FALCON_7B = {
    **{key: value for key, value in FALCON_40B.items() if key != "num_kv_heads"},
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "multi_query": True,
    "new_decoder_architecture": False,
}
GEMMA3 = {  # 1B
    **published("gemma3-12b"),
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 6912,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "rope_scaling": None,
    "sliding_window": 512,
}
BERT_PAIRS = {**BERT, "architectures": ["BertForPreTraining"]}
MINILM = {  # all-MiniLM-L6-v2
    **BERT,
    "architectures": ["BertModel"],
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
}
MEGATRON_BERT = {  # megatron-bert-cased-345m
    **BERT,
    "architectures": ["MegatronBertForPreTraining"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "model_type": "megatron-bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 29056,
}
LINEAR = {  # as in test_families.PUBLISHED; of Qwen 3.5 without the vision towers
    "qwen3-coder-next": (
        QWEN3_CODER_NEXT,
        79_674_391_296,
        "layers=*(3(gated_delta,moe) attention,moe); attention.output_gate=true; moe.top_k=10",
    ),
    "qwen3.5-27b": (
        QWEN35,
        27_781_427_952 - 460_730_096,
        "layers=*(3(gated_delta,mlp) attention,mlp); mtp.num_layers=1; mtp.layers=attention,mlp",
    ),
    "qwen3.5-35b-a3b": (
        QWEN35_MOE,
        35_951_822_704 - 446_571_248,
        "layers=*(3(gated_delta,moe) attention,moe); mtp.num_layers=1; rotary.base=10000000.0",
    ),
    "kimi-linear-48b": (
        KIMI_LINEAR,
        49_122_681_728,
        "layers=kda,mlp 6(2(kda,moe) mla,moe kda,moe) *(kda,moe mla,moe); position=none",
    ),
}

ENCODERS = {  # as in test_families.PUBLISHED
    "bert-base": (BERT, 109_514_298, "norm_place=post_residual; bert.token_types=2"),
    "bert-base, pairs": (BERT_PAIRS, 110_106_428, "bert.pair_head=true; norm_eps=1e-12"),
    "minilm": (MINILM, 22_713_216, "bert.pooler=true; bert.transform=none; num_layers=6"),
    "megatron bert": (MEGATRON_BERT, 334_723_458, "norm_place=pre; bert.embedding_norm=false"),
    "megatron bert, its layers": (
        {**MEGATRON_BERT, "architectures": ["MegatronBertModel"]},
        334_723_458 - 29056 - 1024 * 1027 - 2 * 1025,
        "norm_place=pre; bert.transform=none; bert.output_bias=false; bert.pooler=true",
    ),
    "roberta, its layers": (
        {**ROBERTA, "architectures": ["RobertaModel"]},
        124_645_632,
        "bert.position_offset=2; bert.transform=none; bert.pooler=true",
    ),
    "roberta-base": (ROBERTA, 124_697_433, "bert.position_offset=2; max_position=514"),
    "modernbert-base": (
        MODERN_BERT,
        149_655_232,
        "attention.window=65; rotary.base=160000.0; rotary.local_base=10000.0; norm_bias=false; "
        "mlp.activation=geglu_erf; bert.transform_bias=false",
    ),
    "modernbert, its layers": (
        {**MODERN_BERT, "architectures": ["ModernBertModel"]},
        149_655_232 - 50368 - 768 * 769,
        "bert.transform=none; bert.output_bias=false; norm_place=pre",
    ),
    "t5-base": (T5, 222_903_552, "tied=true; logit_scale=0.03608439182435161; num_layers=25"),
    "flan-t5-base": (FLAN_T5, 247_577_856, "tied=false; mlp.activation=geglu; logit_scale=1"),
}
