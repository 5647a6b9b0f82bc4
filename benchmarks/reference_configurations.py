"""The 24 training runs that `reference_runs.py` records: features by name, and a table of names.

A feature is settings on top of BASE; every group has a plain choice without a name, which is BASE.
Any two choices of different groups meet in at least one configuration, unless
`maxmeg.config.validate` refuses them or they are RARE. When a setting is renamed, edit its feature
here. Settings `layers.*` choose the mixers of the four layers (see `layers_of`).
"""

BASE = {
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.attention.num_heads": 8,
    "model.dtype": "float32",
    "data.sequence_length": 64,
    "data.split": "1,0,0",
    "train.num_steps": 5,
    "train.global_batch_size": 16,
    "train.loss_chunk": 48,  # does not divide a device's tokens
    "optim.lr": 1e-2,
    "optim.warmup_steps": 2,
    "log.tensorboard": False,
}
EXPERTS = {"layers.moe": "1111", "model.moe.num_experts": 8}
STAGES = {"parallel.pipe": 2, "train.micro_batch_size": 2}
FEATURES = {
    "attention": {
        "gqa": {"model.attention.num_kv_heads": 2},
        "mqa": {"model.attention.num_kv_heads": 1},
        "mla": {
            "layers.mla": True,
            "model.attention.head_dim": 8,
            "model.mla.kv_rank": 32,
            "model.mla.query_rank": 24,
            "model.mla.rotary_size": 4,
            "model.mla.value_size": 16,
        },
    },
    "window": {
        "window": {"layers.local": "1111", "model.attention.window": 24},
        "alternating": {"layers.local": "1010", "model.attention.window": 16},
    },
    "mlp": {
        "dropless": {**EXPERTS, "model.moe.aux_loss": 0.01, "model.moe.z_loss": 0.001},
        "capacity": {
            **EXPERTS,
            "model.moe.capacity_factor": 1.25,
            "model.moe.pad_to_capacity": True,
            "model.moe.global_aux_loss": 0.01,
        },
        "shared": {
            **EXPERTS,
            "model.moe.top_k": 3,
            "model.moe.ffn_size": 64,
            "model.moe.shared_ffn_size": 64,
            "layers.moe": "0111",
            "model.moe.score": "sigmoid",
            "model.moe.normalize_weights": True,
            "model.moe.bias_balancing": True,
            "model.moe.num_groups": 4,
            "model.moe.topk_groups": 2,
        },
        "sinkhorn": {
            **EXPERTS,
            "layers.moe": "0101",
            "model.moe.sinkhorn": True,
            "model.moe.jitter": 0.1,
        },
    },
    "block": {
        "gpt": {
            "model.norm": "layernorm",
            "model.mlp.activation": "gelu_tanh",
            "model.attention.bias_qkv": True,
            "model.attention.bias_out": True,
            "model.mlp.bias": True,
            "model.tied": True,
        },
        "gemma": {
            "model.mlp.activation": "geglu",
            "model.norm_place": "sandwich",
            "model.norm_one_plus": True,
            "model.embedding_scale": 8.0,
            "model.logit_softcap": 20.0,
            "model.attention.softcap": 30.0,
            "model.attention.sinks": True,
        },
        "parallel": {
            "layers.parallel": True,
            "model.parallel_norms": True,
            "model.norm": "layernorm",
        },
    },
    "position": {
        "learned": {"model.position": "learned"},
        "yarn": {
            "model.rotary.scaling": "yarn",
            "model.rotary.factor": 2.0,
            "model.rotary.original_length": 32,
        },
    },
    "qk_norm": {
        "qk_norm": {"model.attention.qk_norm": "head"},
        "qk_norm_heads": {"model.attention.qk_norm": "heads"},
    },
    "mtp": {"mtp": {"model.mtp.num_layers": 1}},
    "lora": {"lora": {"lora.rank": 4, "lora.dropout": 0.1, "lora.targets": ["*"]}},
    "data": {
        "documents": {
            "data.reset_position_ids": True,
            "data.reset_attention_mask": True,
            "data.eod_mask_loss": True,
        },
        "sft": {"data.objective": "sft", "data.packing": "best_fit"},
    },
    "dropout": {
        "dropout": {
            "model.dropout_hidden": 0.1,
            "model.attention.dropout": 0.1,
            "model.dropout_embedding": 0.1,
        },
    },
    "replicas": {
        "zero": {"parallel.data": 2},
        "replicas": {"parallel.data": 2, "parallel.zero1": False},
    },
    "tensor": {"tensor": {"parallel.tensor": 2}},
    "pipe": {
        "1f1b": STAGES,
        "interleaved": {**STAGES, "parallel.chunks": 2},
        "zero_bubble": {**STAGES, "parallel.schedule": "zero_bubble"},
    },
    "expert": {
        "all_to_all": {"parallel.expert": 2},
        "gather": {"parallel.expert": 2, "parallel.expert_exchange": "gather"},
    },
    "loop": {
        "accumulate": {"train.micro_batch_size": 1},
        "unrolled": {"model.scan_layers": False},
    },
    "recompute": {
        "selective": {"model.recompute": "selective"},
        "recompute_full": {"model.recompute": "full"},
    },
    "dtype": {"bfloat16": {"model.dtype": "bfloat16"}},
    "optimizer": {"sgd": {"optim.optimizer": "sgd"}},
    "loss": {
        "tiled": {
            "train.loss_backend": "tiled",
            "train.z_loss": 1e-3,
            "train.label_smoothing": 0.1,
        },
        "megatron": {"train.loss_reduction": "megatron"},
    },
}
RARE = ("gather", "unrolled")  # features that one configuration has, for the time they take
CONFIGURATIONS = (
    ("gqa window gemma learned qk_norm mtp", "dropout zero tensor interleaved sgd tiled"),
    (
        "gqa alternating gpt learned qk_norm_heads lora sft",
        "zero 1f1b accumulate recompute_full bfloat16",
    ),
    ("gqa window parallel learned qk_norm lora sft", "dropout tensor recompute_full tiled"),
    ("gqa alternating yarn mtp documents", "zero 1f1b recompute_full bfloat16 tiled"),
    (
        "mqa parallel qk_norm_heads lora documents",
        "zero interleaved accumulate recompute_full bfloat16",
    ),
    (
        "alternating parallel yarn qk_norm documents",
        "dropout zero tensor 1f1b accumulate selective bfloat16 sgd megatron",
    ),
    ("mla parallel yarn mtp", "dropout replicas zero_bubble"),
    (
        "mqa dropless learned documents",
        "dropout replicas tensor 1f1b accumulate selective bfloat16 tiled",
    ),
    ("window dropless gemma qk_norm lora", "tensor unrolled megatron"),
    (
        "mla alternating dropless learned mtp documents",
        "dropout zero tensor accumulate selective bfloat16 sgd",
    ),
    ("dropless gpt yarn qk_norm_heads mtp sft", "dropout interleaved bfloat16 sgd megatron"),
    (
        "gqa alternating dropless gemma learned qk_norm lora sft",
        "dropout zero_bubble all_to_all recompute_full bfloat16 sgd megatron",
    ),
    (
        "mla capacity learned mtp",
        "tensor interleaved all_to_all accumulate recompute_full megatron",
    ),
    (
        "mqa alternating capacity gemma yarn qk_norm_heads sft",
        "dropout zero all_to_all accumulate sgd megatron",
    ),
    ("window capacity yarn qk_norm", "replicas tensor 1f1b recompute_full bfloat16 sgd"),
    (
        "gqa alternating capacity gpt qk_norm_heads mtp documents",
        "tensor zero_bubble gather accumulate selective sgd tiled",
    ),
    ("gqa shared gemma learned lora", "dropout replicas interleaved selective bfloat16 sgd tiled"),
    ("mla window shared gpt mtp sft", "zero 1f1b all_to_all selective megatron"),
    (
        "mqa window shared gpt yarn qk_norm mtp",
        "dropout tensor zero_bubble recompute_full sgd tiled",
    ),
    (
        "window shared qk_norm_heads lora documents",
        "dropout replicas tensor all_to_all accumulate sgd",
    ),
    ("mqa alternating sinkhorn gemma qk_norm_heads mtp", "tensor 1f1b bfloat16"),
    ("mla window sinkhorn gemma yarn lora documents", "zero zero_bubble tiled"),
    (
        "gqa sinkhorn gpt qk_norm lora sft",
        "dropout replicas tensor accumulate recompute_full sgd megatron",
    ),
    (
        "alternating sinkhorn learned lora sft",
        "dropout replicas zero_bubble all_to_all accumulate selective bfloat16 tiled",
    ),
)


def layers_of(settings: dict) -> dict:
    """Return the settings with `model.layers` in place of the `layers.*` entries."""
    said = {name: value for name, value in settings.items() if name.startswith("layers.")}
    rest = {name: value for name, value in settings.items() if name not in said}
    local, moe = said.get("layers.local", "0000"), said.get("layers.moe", "0000")
    attention = [("attention", "local"), ("mla", "local_mla")]["layers.mla" in said]
    joint = "+" if "layers.parallel" in said else ","
    layers = [
        joint.join([attention[int(local[i])], ("mlp", "moe")[int(moe[i])]]) for i in range(len(moe))
    ]
    return {**rest, "model.layers": " ".join(layers)}
