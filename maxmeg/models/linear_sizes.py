"""Named architectures with linear attention as data (see registry.py)."""

from maxmeg.config.model import Position
from maxmeg.models.dense_sizes import LLAMA, QWEN3, Fields, sized
from maxmeg.models.expert_sizes import SIGMOID, sparse

QWEN = {
    **QWEN3,
    "max_position": 262144,
    "norm_one_plus": True,
    "rotary.base": 1e7,
    "rotary.fraction": 0.25,
    "attention.head_dim": 256,
    "attention.output_gate": True,
    "delta.num_heads": 32,
    "delta.num_key_heads": 16,
}
QWEN3_NEXT = {
    **QWEN,
    "layers": "*(3(gated_delta,moe) attention,moe)",
    "moe.top_k": 10,
    "moe.shared_ffn_size": 512,
    "moe.shared_gate": True,
    "moe.aux_loss": 0.001,
}
QWEN35 = {**QWEN, "vocab_size": 248320, "layers": "*(3(gated_delta,mlp) attention,mlp)"}
QWEN35_MOE = {**QWEN3_NEXT, "vocab_size": 248320}
TIED = {"tied": True}
SMALL = {"delta.num_heads": 16}
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


def qwen35(sizes: tuple[int, int, int, int], heads: int, experts: tuple[int, int, int]) -> Fields:
    """sizes: as of `sized`, without the MLP. heads: of values of the delta rule. experts: number,
    width of one and of the shared one, number that a token uses."""
    number, width, top_k = experts
    others = {"delta.num_heads": heads, "moe.shared_ffn_size": width, "moe.top_k": top_k}
    return sparse({**QWEN35_MOE, **others}, (*sizes, 0), (number, width))


LINEAR: dict[str, Fields] = {
    "qwen3-next-80b-a3b": sparse(QWEN3_NEXT, (48, 2048, 16, 2, 5120), (512, 512)),
    "qwen3.5-0.8b": sized(QWEN35, (24, 1024, 8, 2, 3584), TIED | SMALL),
    "qwen3.5-2b": sized(QWEN35, (24, 2048, 8, 2, 6144), TIED | SMALL),
    "qwen3.5-4b": sized(QWEN35, (32, 2560, 16, 4, 9216), TIED),
    "qwen3.5-9b": sized(QWEN35, (32, 4096, 16, 4, 12288)),
    "qwen3.5-27b": sized(QWEN35, (64, 5120, 24, 4, 17408), {"delta.num_heads": 48}),
    "qwen3.5-35b-a3b": qwen35((40, 2048, 16, 2), 32, (256, 512, 8)),
    "qwen3.5-122b-a10b": qwen35((48, 3072, 32, 2), 64, (256, 1024, 8)),
    "qwen3.5-397b-a17b": qwen35((60, 4096, 32, 2), 64, (512, 1024, 10)),
    "kimi-linear-48b-a3b": sparse(KIMI_LINEAR, (27, 2304, 32, 32, 9216), (256, 1024)),
}
