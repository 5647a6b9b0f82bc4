"""Named architectures with experts as data (see registry.py)."""

import math

from maxmeg.config.mixers import Activation, QkNorm, RouterScore
from maxmeg.config.positions import RotaryScaling
from maxmeg.models.dense_sizes import BIASES, LLAMA, NONE, QWEN3, QWEN25, Fields, sized

MIXTRAL = {
    **LLAMA,
    "vocab_size": 32000,
    "max_position": 32768,
    "rotary.base": 1e6,
    "layers": "*(attention,moe)",
    "moe.num_experts": 8,
    "moe.aux_loss": 0.02,
}
QWEN2_MOE = {
    **QWEN25,
    "vocab_size": 151936,
    "layers": "*(attention,moe)",
    "moe.shared_gate": True,
    "moe.softmax_before_topk": True,
    "moe.aux_loss": 0.001,
}
QWEN3_MOE = {
    **QWEN3,
    "layers": "*(attention,moe)",
    "moe.num_experts": 128,
    "moe.top_k": 8,
    "moe.aux_loss": 0.001,
}
GPT_OSS = {
    **LLAMA,
    **BIASES,
    "vocab_size": 201088,
    "max_position": 131072,
    "attention.head_dim": 64,
    "mlp.activation": Activation.quick_geglu,
    "mlp.activation_clamp": 7.0,
    "mlp.glu_offset": 1.0,
    "attention.window": 128,
    "layers": "*(local,moe attention,moe)",
    "attention.sinks": True,
    "rotary.base": 150000.0,
    "rotary.scaling": RotaryScaling.yarn,
    "rotary.factor": 32.0,
    "rotary.original_length": 4096,
    "rotary.high": 32.0,
    "rotary.truncate": False,
    "moe.top_k": 4,
    "moe.logit_bias": True,
    "moe.aux_loss": 0.001,  # not published
}
SIGMOID = {
    "moe.score": RouterScore.sigmoid,
    "moe.normalize_weights": True,
    "moe.bias_balancing": True,
}
GLM45 = {
    **LLAMA,
    **SIGMOID,
    "vocab_size": 151552,
    "max_position": 131072,
    "attention.head_dim": 128,
    "attention.bias_qkv": True,
    "rotary.base": 1e6,
    "rotary.fraction": 0.5,
    "moe.top_k": 8,
    "moe.sequence_aux_loss": 1e-4,  # section 2.4 of its paper
}
MLA = {
    **LLAMA,
    "norm_eps": 1e-6,
    "attention.head_dim": 128,
    "mla.kv_rank": 512,
    "mla.rotary_size": 64,
    "mla.value_size": 128,
    "mla.norm_eps": 1e-6,
    "rotary.interleaved": True,
    "layers": "mla,mlp *(mla,moe)",
    "moe.sequence_aux_loss": 0.001,
}
MLA_LONG = {
    **MLA,
    "max_position": 163840,
    "rotary.scaling": RotaryScaling.yarn,
    "rotary.factor": 40.0,
    "rotary.original_length": 4096,
    "rotary.high": 32.0,
    "rotary.attention_factor": 1.0,
}
DEEPSEEK_V2 = {**MLA_LONG, "vocab_size": 102400, "moe.top_k": 6, "moe.softmax_before_topk": True}


def scores_scale(yarn_scale: float) -> float:
    """Scale of attention scores with YaRN's factor for all dimensions, as in DeepSeek's models."""
    return 192**-0.5 * (0.1 * yarn_scale * math.log(40) + 1) ** 2


def sparse(
    base: Fields,
    sizes: tuple[int, int, int, int, int],
    experts: tuple[int, int],
    others: Fields = NONE,
) -> Fields:
    """experts: (number, width of one)."""
    numbers = {"moe.num_experts": experts[0], "moe.ffn_size": experts[1]}
    return sized({**base, **numbers}, sizes, others)


SPARSE: dict[str, Fields] = {
    "mixtral-8x7b": sized(MIXTRAL, (32, 4096, 32, 8, 14336)),
    "mixtral-8x22b": sized(
        MIXTRAL, (56, 6144, 48, 8, 16384), {"max_position": 65536, "moe.aux_loss": 0.001}
    ),
    "qwen1.5-moe-a2.7b": sparse(
        QWEN2_MOE,
        (24, 2048, 16, 16, 5632),
        (60, 1408),
        {"max_position": 8192, "moe.shared_ffn_size": 5632, "moe.top_k": 4},
    ),
    "qwen2-57b-a14b": sparse(
        QWEN2_MOE,
        (28, 3584, 28, 4, 18944),
        (64, 2560),
        {"moe.shared_ffn_size": 20480, "moe.top_k": 8},
    ),
    "qwen3-30b-a3b": sparse(QWEN3_MOE, (48, 2048, 32, 4, 6144), (128, 768)),
    "qwen3-235b-a22b": sparse(QWEN3_MOE, (94, 4096, 64, 4, 12288), (128, 1536)),
    "gpt-oss-20b": sparse(GPT_OSS, (24, 2880, 64, 8, 2880), (32, 2880)),
    "gpt-oss-120b": sparse(GPT_OSS, (36, 2880, 64, 8, 2880), (128, 2880)),
    "glm4.5-air": sparse(
        GLM45,
        (46, 4096, 96, 8, 10944),
        (128, 1408),
        {"layers": "attention,mlp *(attention,moe)", "moe.shared_ffn_size": 1408},
    ),
    "glm4.5": sparse(
        GLM45,
        (92, 5120, 96, 8, 12288),
        (160, 1536),
        {
            "layers": "3(attention,mlp) *(attention,moe)",
            "moe.shared_ffn_size": 1536,
            "moe.scale": 2.5,
            "attention.qk_norm": QkNorm.head,
        },
    ),
    "deepseek-v2-lite": sparse(
        DEEPSEEK_V2,
        (27, 2048, 16, 16, 10944),
        (64, 1408),
        {"moe.shared_ffn_size": 2816, "attention.scale": scores_scale(0.707)},
    ),
    "deepseek-v2": sparse(
        DEEPSEEK_V2,
        (60, 5120, 128, 128, 12288),
        (160, 1536),
        {
            "moe.shared_ffn_size": 3072,
            "mla.query_rank": 1536,
            "attention.scale": scores_scale(0.707),
            "moe.scale": 16.0,
            "moe.num_groups": 8,
            "moe.topk_groups": 3,
            "moe.group_score_topk": 1,
        },
    ),
    "deepseek-v3": sparse(
        {**MLA_LONG, **SIGMOID},
        (61, 7168, 128, 128, 18432),
        (256, 2048),
        {
            "vocab_size": 129280,
            "layers": "3(mla,mlp) *(mla,moe)",
            "attention.scale": scores_scale(1.0),
            "moe.shared_ffn_size": 2048,
            "mla.query_rank": 1536,
            "moe.top_k": 8,
            "moe.scale": 2.5,
            "moe.num_groups": 8,
            "moe.topk_groups": 4,
            "moe.group_score_topk": 2,
            "moe.sequence_aux_loss": 1e-4,
        },
    ),
    "moonlight-16b-a3b": sparse(
        {**MLA, **SIGMOID},
        (27, 2048, 16, 16, 11264),
        (64, 1408),
        {
            "vocab_size": 163840,
            "max_position": 8192,
            "norm_eps": 1e-5,
            "rotary.base": 50000.0,
            "moe.shared_ffn_size": 2816,
            "moe.top_k": 6,
            "moe.scale": 2.446,
        },
    ),
}
