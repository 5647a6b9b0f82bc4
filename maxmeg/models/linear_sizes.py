"""Named architectures with linear attention as data (see registry.py)."""

from maxmeg.config.model import Position
from maxmeg.models.dense_sizes import LLAMA, QWEN3, Fields
from maxmeg.models.expert_sizes import SIGMOID, sparse

QWEN3_NEXT = {
    **QWEN3,
    "max_position": 262144,
    "norm_one_plus": True,
    "rotary.base": 1e7,
    "rotary.fraction": 0.25,
    "attention.head_dim": 256,
    "attention.output_gate": True,
    "delta.num_heads": 32,
    "delta.num_key_heads": 16,
    "layers": "*(3(gated_delta,moe) attention,moe)",
    "moe.top_k": 10,
    "moe.shared_ffn_size": 512,
    "moe.shared_gate": True,
    "moe.aux_loss": 0.001,
}
KIMI_LINEAR = {
    **LLAMA,
    **SIGMOID,
    "vocab_size": 163840,
    "max_position": 1048576,
    "position": Position.none,
    "attention.head_dim": 128,
    "mla.kv_rank": 512,
    "mla.rotary_size": 64,
    "mla.value_size": 128,
    "mla.norm_eps": 1e-6,
    "delta.num_heads": 32,
    "layers": "kda,mlp 6(2(kda,moe) mla,moe kda,moe) *(kda,moe mla,moe)",
    "moe.top_k": 8,
    "moe.shared_ffn_size": 1024,
    "moe.scale": 2.446,
}

LINEAR: dict[str, Fields] = {
    "qwen3-next-80b-a3b": sparse(QWEN3_NEXT, (48, 2048, 16, 2, 5120), (512, 512)),
    "kimi-linear-48b-a3b": sparse(KIMI_LINEAR, (27, 2304, 32, 32, 9216), (256, 1024)),
}
