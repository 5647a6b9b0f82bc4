"""Named architectures with linear attention as data (see registry.py)."""

from maxmeg.models.dense_sizes import QWEN3, Fields
from maxmeg.models.expert_sizes import sparse

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

LINEAR: dict[str, Fields] = {
    "qwen3-next-80b-a3b": sparse(QWEN3_NEXT, (48, 2048, 16, 2, 5120), (512, 512)),
}
