"""Settings in the form that published config.json files have."""

import json
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"
NAMES = dict.fromkeys(("torch_dtype", "transformers_version", "use_cache", "_name_or_path"), "x")


def sized(hidden: int, layers: int, heads: int, ffn: int, vocab: int, kv: int = 0) -> dict:
    groups = {"num_key_value_heads": kv} if kv else {}
    return NAMES | groups | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
    }  # fmt: skip


SMOLLM2 = {
    **sized(576, 30, 9, 1536, 49152, 3),
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "is_llama_config": True,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "unk_token_id": 0,
}
LLAMA32 = {
    **SMOLLM2,
    **sized(2048, 16, 32, 8192, 128256, 8),
    "head_dim": 64,
    "mlp_bias": False,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
MISTRAL = {
    **sized(4096, 32, 32, 14336, 32000, 8),
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
QWEN25 = {
    **sized(896, 24, 14, 4864, 151936, 2),
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_window_layers": 24,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
}
QWEN3 = {
    **sized(1024, 28, 16, 3072, 151936, 8),
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "max_window_layers": 28,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
GEMMA2 = {
    **sized(2304, 26, 8, 9216, 256000, 4),
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA3 = {
    **sized(1152, 26, 4, 6912, 262144, 1),
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
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
OLMO2 = {
    **sized(2048, 16, 16, 8192, 100352, 16),
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000,
}
PHI3 = {
    **sized(3072, 32, 32, 8192, 32064, 32),
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
    },
    "sliding_window": 262144,
}
PYTHIA = {
    **sized(768, 12, 12, 3072, 50304),
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "use_parallel_residual": True,
}
FALCON_7B = {
    **{key: value for key, value in sized(4544, 32, 71, 1, 65024).items() if "inter" not in key},
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"},
    "bias": False,
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
}
FALCON_40B = {
    **FALCON_7B,
    "hidden_size": 8192,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
}
STARCODER2 = {
    **sized(3072, 30, 24, 12288, 49152, 2),
    "architectures": ["Starcoder2ForCausalLM"],
    "model_type": "starcoder2",
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "norm_type": "layer_norm",
    "rope_theta": 999999.4420358813,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "use_bias": True,
}
NEMOTRON = {
    **sized(6144, 32, 48, 24576, 256000, 8),
    "architectures": ["NemotronForCausalLM"],
    "model_type": "nemotron",
    "hidden_act": "relu2",
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "pretraining_tp": 1,
    "rope_scaling": None,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}


def published(name: str) -> dict:
    """The config.json of a model with experts, without what says how it is quantized."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    return {key: value for key, value in config.items() if key != "quantization_config"}


MIXTRAL, QWEN2_MOE, QWEN3_MOE, GPT_OSS, GLM45, DEEPSEEK_V2, DEEPSEEK_V3 = (
    published(name)
    for name in ("mixtral-8x7b", "qwen2-57b-a14b", "qwen3-30b-a3b", "gpt-oss-120b", "glm4.5",
                 "deepseek-v2", "deepseek-v3")
)  # fmt: skip
LFM2 = {
    **sized(2048, 16, 32, 12288, 65536, 8),
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
