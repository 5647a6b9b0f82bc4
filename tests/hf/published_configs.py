"""Published config.json files: those of tests/golden/configs, and settings in the same form."""

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
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
LFM2 = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "vocab_size": 65536,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_heads": 32,
    "rope_theta": 1000000.0,
    "theta": 1000000.0,
    "tie_embedding": True,
    "use_pos_enc": True,
}
