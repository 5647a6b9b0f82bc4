"""Tiny models of every family of Hugging Face, as settings of config.json: each has what sets its
family apart, at sizes at which fused and transposed tensors have shapes of their own."""

VOCAB, LAYERS = 61, 2
WINDOW = 9  # shorter than the rows
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
}


def longrope(head_dim: int) -> dict:
    factors = [1.0 + 4 * i / head_dim for i in range(head_dim // 2)]
    return {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": factors[::-1],
        "long_factor": factors,
        "factor": 4.0,
    }


def usual(hidden: int = 32, heads: int = 4) -> dict:
    """Keys that most families share."""
    return TOKENS | {
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "max_position_embeddings": 64,
        "pad_token_id": None,
    }


def gated(hidden: int = 32, heads: int = 4) -> dict:
    """The keys of Llama and those after it."""
    sizes = {"intermediate_size": 3 * hidden // 2, "num_key_value_heads": heads // 2}
    return usual(hidden, heads) | sizes


def old(hidden: int = 32, heads: int = 4) -> dict:
    """The keys of GPT-2."""
    sizes = {"n_embd": hidden, "n_layer": LAYERS, "n_head": heads, "n_positions": 40}
    return TOKENS | sizes | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def families(
    hidden: int = 32, heads: int = 4, own_head_dim: int = 12
) -> dict[str, tuple[str, dict]]:
    """Name -> (architecture, settings). own_head_dim: of the models that say it."""
    sizes, wide = usual(hidden, heads), gated(hidden, heads)
    own, window = {"head_dim": own_head_dim}, {"sliding_window": WINDOW}
    ffn = {"intermediate_size": wide["intermediate_size"]}
    gemma = wide | own | window | {"num_hidden_layers": 3, "query_pre_attn_scalar": 20}
    grouped = {"new_decoder_architecture": True, "num_kv_heads": heads // 2}
    one_norm = {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": ffn["intermediate_size"]}
    return {
        "llama": ("LlamaForCausalLM", {**wide, "attention_bias": True, "mlp_bias": True}),
        "llama 3": (
            "LlamaForCausalLM",
            {**wide, **own, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
        ),
        "mistral": ("MistralForCausalLM", {**wide, **window, "rope_parameters": YARN}),
        "qwen 2": (
            "Qwen2ForCausalLM",
            {**wide, "tie_word_embeddings": True, "rope_parameters": DYNAMIC}
            | {"max_position_embeddings": 16},
        ),
        "qwen 3": (
            "Qwen3ForCausalLM",
            {**wide, **own, **window, "use_sliding_window": True, "max_window_layers": 0},
        ),
        "gemma 2": (
            "Gemma2ForCausalLM",
            {**gemma, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        ),
        "gemma 3": (
            "Gemma3ForCausalLM",
            {**gemma, "sliding_window_pattern": 2, "rope_parameters": BY_TYPE},
        ),
        "gemma 4": (
            "Gemma4ForCausalLM",
            {**wide, **own, **window, "num_hidden_layers": 4, "hidden_size_per_layer_input": 0}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2}
            | {"global_head_dim": 2 * own_head_dim, "attention_k_eq_v": True}
            | {"num_global_key_value_heads": 1},
        ),
        "gemma 4 shared": (
            "Gemma4ForCausalLM",
            {**wide, **own, **window, "num_hidden_layers": 6, "hidden_size_per_layer_input": 8}
            | {"layer_types": ["sliding_attention", "full_attention"] * 3}
            | {"vocab_size_per_layer_input": VOCAB, "global_head_dim": 2 * own_head_dim}
            | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        ),
        "olmo 2": ("Olmo2ForCausalLM", {**wide, "rope_parameters": LINEAR}),
        "phi 3": (
            "Phi3ForCausalLM",
            {**wide, **window, "rope_parameters": longrope(hidden // heads)}
            | {"original_max_position_embeddings": 16},
        ),
        "neox": ("GPTNeoXForCausalLM", {**sizes, **ffn}),
        "neox, one after the other": (
            "GPTNeoXForCausalLM",
            {**sizes, **ffn, "use_parallel_residual": False},
        ),
        "falcon 7b": ("FalconForCausalLM", {**sizes, "bias": True}),
        "falcon 40b": ("FalconForCausalLM", {**sizes, **grouped}),
        "falcon 11b": (
            "FalconForCausalLM",
            {**sizes, **grouped, **one_norm, "tie_word_embeddings": False},
        ),
        "falcon, one after the other": (
            "FalconForCausalLM",
            {**sizes, "multi_query": False, "parallel_attn": False},
        ),
        "starcoder 2": ("Starcoder2ForCausalLM", {**wide, **window}),
        "nemotron": ("NemotronForCausalLM", wide),
        "lfm 2": (
            "Lfm2ForCausalLM",
            {
                **wide,
                "num_hidden_layers": 2 * LAYERS,  # two units, for two stages
                "layer_types": ["conv", "full_attention"] * LAYERS,
                "conv_bias": True,
                "conv_L_cache": 4,
            },
        ),
        "gpt 2": ("GPT2LMHeadModel", old(hidden, heads)),
        **similar(hidden, heads, own_head_dim),
    }


def similar(hidden: int, heads: int, own_head_dim: int) -> dict[str, tuple[str, dict]]:
    """The same of families that combine what the others have."""
    wide, own, window = gated(hidden, heads), {"head_dim": own_head_dim}, {"sliding_window": WINDOW}
    even, four = {"num_key_value_heads": heads}, {"num_hidden_layers": 2 * LAYERS} | window
    muP = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
    return {
        "granite": ("GraniteForCausalLM", {**wide, **muP, "logits_scaling": 3.0}),
        "granite swa": (
            "GraniteSWAForCausalLM",
            {**wide, **muP, **window, "layer_types": ["full_attention", "sliding_attention"]},
        ),
        "hyperclova x": (
            "HyperCLOVAXForCausalLM",
            {**wide, **muP, "logits_scaling": 3.0, "residual_multiplier": 1.0},
        ),
        "opt": ("OPTForCausalLM", {**usual(hidden, heads), "ffn_dim": wide["intermediate_size"]}),
        "starcoder": ("GPTBigCodeForCausalLM", old(hidden, heads)),
        "glm": ("GlmForCausalLM", {**wide, **own}),
        "glm 4": ("Glm4ForCausalLM", {**wide, **own}),
        "olmo 3": (
            "Olmo3ForCausalLM",
            {**wide, **four, "rope_parameters": {"full_attention": {**YARN, "truncate": True}}},
        ),
        "gemma": ("GemmaForCausalLM", {**wide, **own}),
        "vault gemma": (
            "VaultGemmaForCausalLM",
            {**wide, **own, **window, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
        ),
        "arcee": ("ArceeForCausalLM", {**wide, **own, "mlp_bias": True}),
        "jais 2": ("Jais2ForCausalLM", wide),
        "seed oss": ("SeedOssForCausalLM", {**wide, **own}),
        "cwm": ("CwmForCausalLM", {**wide, **own, **four, "rope_parameters": LLAMA3}),
        "helium": ("HeliumForCausalLM", {**wide, **even, "head_dim": hidden // heads}),
        "ernie 4.5": ("Ernie4_5ForCausalLM", {**wide, **own, "use_bias": True}),
        "cohere": ("CohereForCausalLM", {**wide, "attention_bias": True}),
        "cohere 2": ("Cohere2ForCausalLM", {**wide, **four}),
        "exaone 4": ("Exaone4ForCausalLM", {**wide, **four, "sliding_window_pattern": 2}),
        "exaone 4, rotary": (
            "Exaone4ForCausalLM",
            {**wide, "sliding_window": None, "layer_types": ["full_attention"] * LAYERS},
        ),
        "smollm 3": ("SmolLM3ForCausalLM", {**wide, "no_rope_layer_interval": 2}),
        "stable lm": ("StableLmForCausalLM", {**wide, "use_qkv_bias": True}),
        "stable lm, parallel": ("StableLmForCausalLM", {**wide, "use_parallel_residual": True}),
        "ministral 3": (
            "Ministral3ForCausalLM",
            {**wide, **own, **window, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.6}},
        ),
        "ministral": (
            "MinistralForCausalLM",
            {**wide, **own, **window, "layer_types": ["sliding_attention", "full_attention"]},
        ),
    }


def with_states(
    hidden: int = 32, heads: int = 4, own_head_dim: int = 12
) -> dict[str, tuple[str, dict]]:
    """The same of models with Mamba-2 layers."""
    plain = TOKENS | {"hidden_size": hidden, "pad_token_id": None, "chunk_size": 8}
    wide, d = gated(hidden, heads), {"num_hidden_layers": 2 * LAYERS}
    letters = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * LAYERS}
    nemotron = {"mamba_num_heads": 2 * heads, "mamba_head_dim": hidden // heads, "n_groups": 2}
    nemotron |= {"ssm_state_size": 6, "head_dim": own_head_dim, "moe_latent_size": hidden // 2}
    nemotron |= {"n_routed_experts": 4, "moe_intermediate_size": 20, "time_step_min": 0.02}
    nemotron |= {"moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 1.5}
    sized = {"mamba_n_heads": 2 * heads, "mamba_d_state": 6, "mamba_chunk_size": 8}
    muP = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
    falcon = {"lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "key_multiplier": 0.7}
    falcon |= {"attention_in_multiplier": 0.6, "attention_out_multiplier": 1.3}
    falcon |= {"ssm_in_multiplier": 1.2, "ssm_multipliers": [0.5, 0.8, 1.5, 0.7, 0.9]}
    falcon |= {"ssm_out_multiplier": 0.8, "mlp_multipliers": [0.6, 1.4]}
    types = {"layer_types": ["linear_attention", "full_attention"] * LAYERS}
    linear = {"linear_num_value_heads": 2 * heads, "linear_num_key_heads": heads}
    linear |= {"linear_key_head_dim": 6, "linear_value_head_dim": hidden // heads}
    latent = {"kv_lora_rank": 16, "qk_nope_head_dim": own_head_dim, "qk_rope_head_dim": 8}
    latent |= {"v_head_dim": 10, "num_key_value_heads": heads}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    mamba = {"num_heads": 2 * heads, "head_dim": hidden // heads, "n_groups": 2, "state_size": 6}
    return {
        "mamba 2": (
            "Mamba2ForCausalLM",
            {**plain, **mamba, "num_hidden_layers": LAYERS, "use_bias": True},
        ),
        "nemotron h": (
            "NemotronHForCausalLM",
            {**wide, **letters, **nemotron, "chunk_size": 8},
        ),
        "nemotron h, without mlp": (
            "NemotronHForCausalLM",
            {**wide, **nemotron, "chunk_size": 8}
            | {"layers_block_type": ["linear_attention", "full_attention"] * LAYERS},
        ),
        "qwen 3 next": (
            "Qwen3NextForCausalLM",
            {**wide, **d, **types, **linear, **experts, "head_dim": 16}
            | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
        ),
        "qwen 3.5": (
            "Qwen3_5ForCausalLM",
            {**wide, **d, **types, **linear, "head_dim": 16, "tie_word_embeddings": True},
        ),
        "qwen 3.5 moe": (
            "Qwen3_5MoeForCausalLM",
            {**wide, **types, **linear, **experts, "head_dim": 16, "num_hidden_layers": LAYERS * 2}
            | {"shared_expert_intermediate_size": 24},
        ),
        "kimi linear": (
            "KimiLinearForCausalLM",
            {**wide, **types, **latent, "num_hidden_layers": 2 * LAYERS, "n_group": 2}
            | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
            | {"linear_head_dim": hidden // heads, "linear_num_heads": heads}
            | {"mlp_layer_types": ["sparse"] * 2 * LAYERS},  # else their files have other names
        ),
        "bamba": (
            "BambaForCausalLM",
            {**wide, **d, **sized, "attn_layer_indices": [1, 3], "mamba_n_groups": 2},
        ),
        "granite 4": (
            "GraniteMoeHybridForCausalLM",
            {**wide, **d, **sized, **types, **muP, "logits_scaling": 3.0}
            | {"shared_intermediate_size": 20, "num_local_experts": 4},
        ),
        "granite 4, dense": (
            "GraniteMoeHybridForCausalLM",
            {**wide, **d, **sized, **types, "shared_intermediate_size": 20}
            | {"num_local_experts": 0, "position_embedding_type": "rope"},
        ),
        "falcon h1": (
            "FalconH1ForCausalLM",
            {**wide, **sized, **falcon, "mamba_d_ssm": 2 * hidden},
        ),
        "falcon h1, normalized": (
            "FalconH1ForCausalLM",
            {**wide, **sized, "mamba_d_ssm": hidden, "mamba_rms_norm": True}
            | {"mamba_norm_before_gate": False, "mamba_n_groups": 2},
        ),
    }


EXPERTS = {"num_experts_per_tok": 2}


def sparse(hidden: int = 32, heads: int = 4, own_head_dim: int = 12) -> dict[str, tuple[str, dict]]:
    """The same of models with experts: their sizes differ from those of dense layers."""
    wide, own = gated(hidden, heads) | EXPERTS, {"head_dim": own_head_dim}
    narrow = {"moe_intermediate_size": hidden // 2 + 4}
    qwen = wide | narrow | {"num_experts": 4}
    deep = wide | narrow | {"n_routed_experts": 8, "num_hidden_layers": 3}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": own_head_dim}
    latent |= {"qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": heads}
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    return {
        "mixtral": ("MixtralForCausalLM", {**wide, "num_local_experts": 4}),
        "qwen 2 moe": (
            "Qwen2MoeForCausalLM",
            {**qwen, "shared_expert_intermediate_size": 24, "num_experts_per_tok": 3}
            | {"mlp_only_layers": [0]},
        ),
        "qwen 3 moe": ("Qwen3MoeForCausalLM", {**qwen, **own, "norm_topk_prob": True}),
        "gpt oss": (
            "GptOssForCausalLM",
            {**wide, **own, "num_local_experts": 4, "sliding_window": WINDOW}
            | {"swiglu_limit": 1.0, "rope_parameters": YARN},
        ),
        "gpt oss, unscaled": (
            "GptOssForCausalLM",
            {**wide, **own, "num_local_experts": 4, "sliding_window": WINDOW}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        ),
        "olmoe": ("OlmoeForCausalLM", {**wide, "num_experts": 4}),
        "granite moe": ("GraniteMoeForCausalLM", {**wide, "num_local_experts": 4}),
        "granite moe, shared": (
            "GraniteMoeSharedForCausalLM",
            {**wide, "num_local_experts": 4, "shared_intermediate_size": 20},
        ),
        "glm 4 moe": (
            "Glm4MoeForCausalLM",
            {**deep, **groups, **own, "attention_bias": True, "use_qk_norm": True}
            | {"partial_rotary_factor": 0.5, "n_shared_experts": 2, "num_mtp_layers": 0},
        ),
        "glm 4 moe lite": (
            "Glm4MoeLiteForCausalLM",
            {**deep, **groups, **latent, "num_mtp_layers": 0},
        ),
        "lfm 2 moe": (
            "Lfm2MoeForCausalLM",
            {**qwen, "num_hidden_layers": 3, "num_dense_layers": 1}
            | {"layer_types": ["conv", "full_attention", "conv"]},
        ),
        "flex olmo": ("FlexOlmoForCausalLM", {**wide, "num_experts": 4}),
        "dots 1": (
            "Dots1ForCausalLM",
            {**deep, **groups, **own, "n_shared_experts": 2, "first_k_dense_replace": 1}
            | {"sliding_window": WINDOW, "max_window_layers": 2},
        ),
        "solar open": (
            "SolarOpenForCausalLM",
            {**narrow, **wide, **groups, **own, "n_routed_experts": 8, "attention_bias": True},
        ),
        "exaone moe": (
            "ExaoneMoeForCausalLM",
            {**qwen, "num_shared_experts": 2, "num_hidden_layers": 3, "sliding_window": WINDOW}
            | {"sliding_window_pattern": 3},
        ),
        "ernie 4.5 moe": (
            "Ernie4_5_MoeForCausalLM",
            {**wide, **narrow, "moe_num_experts": 4, "moe_k": 2, "num_hidden_layers": 4}
            | {"moe_layer_interval": 2},
        ),
        "minimax m2": (
            "MiniMaxM2ForCausalLM",
            {**wide, **own, "num_local_experts": 4, "partial_rotary_factor": 0.5},
        ),
        "youtu": ("YoutuForCausalLM", {**gated(hidden, heads), **latent, "rope_interleave": False}),
        "llama 4": (
            "Llama4ForCausalLM",
            {**wide, **own, "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [1, 3]}
            | {"intermediate_size_mlp": hidden + 12, "num_hidden_layers": 4, "floor_scale": 5}
            | {"attention_chunk_size": 7, "no_rope_layer_interval": 2, "attn_scale": 0.7},
        ),
        "gemma 4 moe": (
            "Gemma4ForCausalLM",
            gated(hidden, heads)
            | {**own, **narrow, "num_hidden_layers": 4, "hidden_size_per_layer_input": 0}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
            | {"global_head_dim": 2 * own_head_dim, "enable_moe_block": True, "num_experts": 4}
            | {"top_k_experts": 2},
        ),
        "deepseek v2": (
            "DeepseekV2ForCausalLM",
            {**deep, **latent, "topk_method": "group_limited_greedy", "q_lora_rank": None}
            | {**groups, "first_k_dense_replace": 1},
        ),
        "deepseek v3": (
            "DeepseekV3ForCausalLM",
            {**deep, **groups, **latent, "rope_parameters": YARN, "num_mtp_layers": 0}
            | {"first_k_dense_replace": 1},
        ),
    }


def encoders(hidden: int = 32, heads: int = 4) -> dict[str, tuple[str, dict]]:
    """BERT and its relatives."""
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": heads, "intermediate_size": 3 * hidden // 2}
    sizes |= {"max_position_embeddings": 40}
    roberta = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
    modern = {"num_hidden_layers": 5, "local_attention": 4, "pad_token_id": 0}
    return {
        "bert": ("BertForPreTraining", sizes),
        "bert, without pairs": ("BertForMaskedLM", {**sizes, "hidden_act": "gelu_pytorch_tanh"}),
        "bert, its layers": ("BertModel", sizes),
        "megatron bert": ("MegatronBertForPreTraining", {**sizes, "type_vocab_size": 3}),
        "megatron bert, its layers": ("MegatronBertModel", sizes),
        "roberta": ("RobertaForMaskedLM", {**sizes, **roberta}),
        "roberta, its layers": ("RobertaModel", {**sizes, **roberta}),
        "xlm roberta": ("XLMRobertaForMaskedLM", {**sizes, **roberta}),
        "xlm roberta, its layers": ("XLMRobertaModel", {**sizes, **roberta}),
        "camembert": ("CamembertForMaskedLM", {**sizes, **roberta}),
        "camembert, its layers": ("CamembertModel", {**sizes, **roberta}),
        "modernbert": ("ModernBertForMaskedLM", {**sizes, **modern}),
        "modernbert, its layers": ("ModernBertModel", {**sizes, **modern, "mlp_bias": True}),
    }


def classifiers() -> dict[str, tuple[str, dict]]:
    """Classifiers of texts, words and choices on encoders and on causal models."""
    encoder, (_, roberta) = encoders()["bert"][1], encoders()["roberta"]
    decoder = {name: value for name, value in encoder.items() if "type" not in name}
    decoder |= {"num_key_value_heads": 2, "pad_token_id": 0}
    names = {"id2label": {0: "no", 1: "yes", 2: "maybe"}}
    texts, words, choices = (
        f"For{n}" for n in ("SequenceClassification", "TokenClassification", "MultipleChoice")
    )
    cases = {
        f"{name}{kind}": (f"{name}{kind}", settings | ({} if kind == choices else names))
        for name, settings in (("Bert", encoder), ("Roberta", roberta))
        for kind in (texts, words, choices)
    }
    cases[f"MegatronBert{texts}"] = (f"MegatronBert{texts}", encoder | names)
    cases |= {f"{n}{texts}": (f"{n}{texts}", decoder | names) for n in ("Llama", "Qwen2")}
    return cases | {f"Mistral{words}": (f"Mistral{words}", decoder | names)}


def encoder_decoders() -> dict[str, tuple[str, dict]]:
    """T5 v1.0 and v1.1, with heads that are not as wide as the model, and other depths."""
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": LAYERS}
    sizes |= {"num_heads": 4, "relative_attention_num_buckets": 8}
    sizes |= {"relative_attention_max_distance": 12, "num_decoder_layers": 3}
    untied = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return {
        "t5": ("T5ForConditionalGeneration", sizes),
        "t5 v1.1": ("T5ForConditionalGeneration", {**sizes, **untied}),
        "mt5": ("MT5ForConditionalGeneration", {**sizes, "num_heads": 4}),
        "t5 v1.1, tied": (
            "T5ForConditionalGeneration",
            {**sizes, "feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False},
        ),
    }
