"""Suggestions in errors: the field, option or command for another program's name of it, and the
next command for a model on the Hugging Face Hub or for text that was named as a corpus."""

import difflib
import os
import re
from collections.abc import Iterable, Sequence

# Field -> its names in Hugging Face, torchtitan, MaxText and nanoGPT (nanochat).
SYNONYMS = {
    "optim.lr": "learning_rate max_lr peak_lr base_lr",
    "optim.min_lr": "min_learning_rate lr_min",
    "optim.decay": "lr_scheduler_type lr_scheduler scheduler lr_schedule lr_schedule_type",
    "optim.warmup_steps": "warmup num_warmup_steps warmup_iters lr_warmup_steps",
    "optim.warmup_fraction": "warmup_ratio warmup_steps_fraction",
    "optim.clip_norm": "max_grad_norm max_norm grad_clip gradient_clipping_threshold",
    "optim.optimizer": "optim_type opt_type optimizer_name",
    "optim.beta1": "adam_beta1 adam_b1",
    "optim.beta2": "adam_beta2 adam_b2",
    "optim.eps": "adam_epsilon adam_eps epsilon",
    "optim.weight_decay": "adam_weight_decay wd",
    "train.quantization.recipe": "fp8 fp4 float8 quant use_fp8 enable_fp8 fp4_format",
    "optim.offload": "optimizer_memory_host_offload offload_optimizer cpu_offload",
    "optim.ema.decay": "ema use_ema",
    "train.num_steps": "max_steps steps train_steps training_steps num_train_steps max_iters"
    " num_iterations iterations train_iters iters epochs num_epochs num_train_epochs",
    "train.global_batch_size": "batch_size train_batch_size total_batch_size batch",
    "train.micro_batch_size": "per_device_train_batch_size per_device_batch_size"
    " device_batch_size local_batch_size gradient_accumulation_steps accumulation_steps grad_accum",
    "train.eval_every": "eval_interval eval_freq validation_freq val_every",
    "train.eval_steps": "eval_iters val_steps",
    "data.sequence_length": "seq_length seq_len sequence_len max_seq_len max_seq_length"
    " max_sequence_length max_target_length block_size max_length context_length",
    "data.paths": "data_path data_dir dataset dataset_name dataset_path train_file train_files"
    " train_data",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path tokenizer_type",
    "data.num_workers": "dataloader_num_workers",
    "model.num_layers": "n_layer n_layers layers num_hidden_layers num_decoder_layers"
    " base_num_decoder_layers depth",
    "model.attention.num_heads": "n_head n_heads heads num_attention_heads num_query_heads"
    " base_num_query_heads",
    "model.attention.num_kv_heads": "n_kv_head n_kv_heads num_key_value_heads base_num_kv_heads"
    " num_query_groups",
    "model.hidden_size": "n_embd d_model dim emb_dim base_emb_dim hidden_dim model_dim",
    "model.mlp.ffn_size": "n_inner d_ff ffn_dim mlp_dim base_mlp_dim intermediate_size"
    " ffn_hidden_size feed_forward_size",
    "model.max_position": "n_positions n_ctx max_position_embeddings",
    "model.vocab_size": "n_vocab padded_vocab_size",
    "model.rotary.base": "rope_theta rope_base rope_max_timescale rotary_theta",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon normalization_layer_epsilon",
    "model.mlp.activation": "hidden_act hidden_activation activation_function mlp_activations",
    "model.tied": "tie_word_embeddings tie_embeddings logits_via_embedding weight_tying",
    "model.init_std": "initializer_range init_method_std",
    "model.attention.window": "sliding_window sliding_window_size window_size",
    "model.attention.backend": "attn_implementation attention attention_type flash_attention",
    "model.moe.num_experts": "num_local_experts n_routed_experts moe_num_experts",
    "model.moe.top_k": "num_experts_per_tok moe_top_k top_k router_topk",
    "model.moe.ffn_size": "moe_intermediate_size moe_mlp_dim",
    "model.dropout_hidden": "dropout hidden_dropout resid_pdrop dropout_rate",
    "model.attention.dropout": "attention_dropout attn_pdrop",
    "model.dtype": "torch_dtype bf16 fp16 precision mixed_precision mixed_precision_param",
    "model.recompute": "gradient_checkpointing activation_checkpoint activation_checkpointing"
    " remat remat_policy",
    "parallel.tensor": "tp tensor_parallel_size tensor_parallel_degree tensor_parallelism"
    " ici_tensor_parallelism",
    "parallel.pipe": "pp pipeline pipeline_parallel_size pipeline_parallel_degree"
    " ici_pipeline_parallelism",
    "parallel.fsdp": "data_parallel_shard_degree fsdp_size ici_fsdp_parallelism",
    "parallel.fsdp_gather": "reshard_after_forward fsdp_reshard_after_forward"
    " data_parallel_sharding_strategy",
    "parallel.data": "dp data_parallel_size data_parallel_replicate_degree ici_data_parallelism",
    "parallel.expert": "ep expert_parallel_size expert_parallel_degree ici_expert_parallelism",
    "checkpoint.init_from": "model_name_or_path pretrained_model_name_or_path"
    " pretrained_checkpoint load_parameters_path initial_load_path",
    "checkpoint.load": "resume resume_from resume_from_checkpoint load_full_state_path",
    "checkpoint.save_every": "save_steps save_interval checkpoint_interval checkpoint_period"
    " interval",
    "checkpoint.keep_last": "save_total_limit keep_latest_k max_to_keep",
    "log.every": "log_interval logging_steps log_freq log_period log_every",
    "log.wandb_project": "wandb use_wandb report_to enable_wandb",
    "log.profile_start": "profile enable_profiling profiler_steps skip_first_n_steps_for_profiler",
    "lora.rank": "r lora_r lora_rank use_lora",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules lora_target_modules",
    "run_dir": "output_dir out_dir out save_dir base_output_directory dump_folder run_name"
    " checkpoint_dir ckpt_dir model model_path model_name_or_path config checkpoint ckpt",
    # options of commands
    "num_tokens": "max_new_tokens max_tokens new_tokens max_length",
    "temperature": "temp do_sample",
    "prompts": "prompt_file input_file input file",
    "batch": "batch_size per_device_eval_batch_size",
    "batch_size": "bs batch",
    "paths": "dataset data data_path",
    "num_batches": "eval_steps eval_iters",
    "shots": "num_fewshot n_shot few_shot",
    "limit": "max_samples num_examples",
    "tensor": "tp tensor_parallel_size gpus num_gpus devices",
    "hardware": "gpus gpu num_gpus devices cluster",
    "input": "model model_path checkpoint source",
    "name": "served_model_name",
    "share": "enable_prefix_caching",
    "max_prompt": "max_model_len",
    "to": "format output_format",
    # commands
    "train": "finetune sft pretrain fit",
    "generate": "gen sample infer inference complete",
    "preprocess": "tokenize prepare",
    "convert": "export import",
    "plan": "estimate",
}
# What was removed, and what to do instead. Of a setting or a flag: the values that changed nothing,
# which saved runs hold; of setting=value: the value in its place, which such runs get.
_OVERLAP = "leave it out: XLA runs transfers over tensor beside other work"
_DELAYED = "use train.quantization.recipe=tensorwise, whose scales are those of the step itself"
_HISTORY = "leave it out: scales are those of the step itself"
REMOVED = {
    "parallel.tensor_overlap": ("auto off", _OVERLAP),
    "tp-comm-overlap": ("", _OVERLAP),
    "parallel.expert_exchange=ragged": ("all_to_all", "use all_to_all"),
    "parallel.schedule=gpipe": ("one_f_one_b", "use one_f_one_b: as fast, in less memory"),
    "train.quantization.recipe=delayed": ("tensorwise", _DELAYED),
    "train.quantization.margin": ("0", _HISTORY),
    "train.quantization.amax_history_length": ("1024", _HISTORY),
    "train.quantization.amax_algorithm": ("max", _HISTORY),
    "fp8-margin": ("", _HISTORY),
    "fp8-amax-history-len": ("", _HISTORY),
    "fp8-amax-compute-algo": ("", _HISTORY),
}
DEVICES = "gpus gpu num_gpus n_gpus device devices num_devices nproc_per_node"  # not settings
_ROOTS = ("runs", "configs", "data", "checkpoints", "models")  # folder names, not users of the Hub


def removed(path: str) -> str:
    """Return the message for a setting, or for path=value, that was removed; empty for others.

    path: also without its section.
    """
    names = (name for name in REMOVED if name == path or name.endswith(f".{path}"))
    return next((f"{name} was removed: {REMOVED[name][1]}" for name in names), "")


def nearest(name: str, paths: Iterable[str]) -> str | None:
    """Return the dotted path that `name` (dotted or not) most likely means, or None.

    First a field that another framework calls so, then one of that name in any section, preferably
    in the named section; then the most similar path.
    """
    paths = list(paths)
    section, _, last = name.replace("-", "_").lower().rpartition(".")
    named = [path for path in paths if path.rpartition(".")[2] == last]
    same = [path for path, names in SYNONYMS.items() if last in names.split() and path in paths]
    has_section = section and any(path.startswith(f"{section}.") for path in paths)
    same = [*named, *same] if has_section else [*same, *named]
    same.sort(key=lambda path: path.rpartition(".")[0] != section)
    return next(iter(same + difflib.get_close_matches(name, paths, 1, 0.6)), None)


def nearest_few(name: str, names: Sequence[str], count: int = 3) -> str:
    """Return the names most similar to `name`, for an error: "a, b or c". Those that begin with it,
    in upper or lower case and without punctuation, come first."""

    def letters(text: str) -> str:
        return re.sub(r"[\W_]", "", text).lower()

    close = [each for each in names if letters(each).startswith(letters(name))]
    close += difflib.get_close_matches(name, [e for e in names if e not in close], count, 0.0)
    close = close[:count]
    return " or ".join(filter(None, [", ".join(close[:-1]), *close[-1:]]))


def hub_command(name: str) -> str:
    """Return " (... command ...)" that downloads `name` if it looks like a model on the Hugging
    Face Hub, or converts it if it is a GGUF file, else ""."""
    if name.endswith(".gguf"):
        return f" (a GGUF file is converted first: maxmeg convert --input={name} --output=FOLDER)"
    owner, _, model = name.partition("/")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) or owner in _ROOTS or os.path.exists(owner):
        return ""
    download = f"hf download {name} --local-dir {model}"
    return f" (a model on the Hugging Face Hub is downloaded first: {download})"


def corpus_command(prefix: str) -> str:
    """Return what to give instead of a prefix without an .idx or .bin file."""
    if prefix.endswith((".bin", ".idx")) and os.path.exists(prefix):
        return f"give the prefix alone, without the ending: {prefix[:-4]}"
    if os.path.isfile(prefix):
        name = os.path.basename(prefix).partition(".")[0]
        return (
            f"{prefix} is a file to preprocess, not the prefix of a .bin and an .idx file; run "
            f"maxmeg preprocess --input={prefix} --output={name} --append_eod "
            f"--tokenizer=TOKENIZER and give {name}_text_document (chats: data.objective=sft)"
        )
    return "give the prefix of a .bin and an .idx file"
