"""Named architectures with Mamba-2 layers as data (see registry.py)."""

from maxmeg.config.mixers import Activation, RouterScore
from maxmeg.config.model import Position
from maxmeg.models.dense_sizes import LLAMA, NONE, Fields

MAMBA_SIZES = ("num_heads", "head_dim", "num_groups", "state_size")
NEMOTRON_H = {
    "vocab_size": 131072,
    "max_position": 8192,
    "position": Position.none,
    "mlp.activation": Activation.relu_squared,
    "attention.num_heads": 32,
    "attention.num_kv_heads": 8,
    "attention.head_dim": 128,
    "mamba.min_step": 0.001,  # transformers clamps to it
}
NEMOTRON_NANO = {**NEMOTRON_H, "max_position": 131072, "attention.num_heads": 40}
BAMBA = {
    **LLAMA,
    "vocab_size": 128256,
    "max_position": 4096,
    "rotary.fraction": 0.5,
    "attention.num_heads": 32,
    "attention.num_kv_heads": 8,
}
GRANITE = {
    **LLAMA,
    "vocab_size": 100352,
    "max_position": 131072,
    "position": Position.none,
    "tied": True,
    "num_layers": 40,
    "init_std": 0.1,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
}
GRANITE_LAYERS = "5(mamba,{0}) attention,{0} 3(9(mamba,{0}) attention,{0}) 4(mamba,{0})"
FALCON_H1 = {
    **LLAMA,
    "layers": "*(attention+mamba,mlp)",
    "rotary.base": 1e11,
    "embedding_scale": 32**0.5,
}


def hybrid(base: Fields, width: int, mamba: tuple[int, int, int, int], others: Fields) -> Fields:
    """mamba: number and size of heads, number of groups, size of the state."""
    sizes = {f"mamba.{name}": size for name, size in zip(MAMBA_SIZES, mamba, strict=True)}
    return {**base, "hidden_size": width, **sizes, **others}


def lettered(pattern: str, ffn: int = 0, others: Fields = NONE) -> Fields:
    """Layers in Megatron-LM's letters."""
    sizes = {"mlp.ffn_size": ffn} if "-" in pattern else {}
    return {"layers": pattern, "num_layers": len(pattern), **sizes, **others}


HYBRIDS: dict[str, Fields] = {
    "nemotron-h-4b": hybrid(
        NEMOTRON_H,
        3072,
        (112, 64, 8, 128),
        lettered("M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-" * 5, 12288),
    ),
    "nemotron-h-8b": hybrid(
        NEMOTRON_H,
        4096,
        (128, 64, 8, 128),
        lettered("M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-" * 5, 21504),
    ),
    "nemotron-h-56b": hybrid(
        NEMOTRON_H,
        8192,
        (256, 64, 8, 256),
        lettered("M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-" * 5, 32768, {"attention.num_heads": 64}),
    ),
    "nemotron-nano-9b-v2": hybrid(
        NEMOTRON_NANO,
        4480,
        (128, 80, 8, 128),
        lettered("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 15680),
    ),
    "nemotron-nano-12b-v2": hybrid(
        NEMOTRON_NANO, 5120, (128, 80, 8, 128), lettered("M-M-M-M*-" * 6 + "M-" * 4, 20480)
    ),
    "nemotron-3-nano-30b-a3b": hybrid(
        {**NEMOTRON_H, "attention.num_kv_heads": 2},
        2688,
        (64, 64, 8, 128),
        {
            **lettered("MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME"),
            "max_position": 262144,
            "moe.num_experts": 128,
            "moe.top_k": 6,
            "moe.ffn_size": 1856,
            "moe.shared_ffn_size": 3712,
            "moe.score": RouterScore.sigmoid,
            "moe.bias_balancing": True,
            "moe.normalize_weights": True,
            "moe.scale": 2.5,
        },
    ),
    "bamba-9b": hybrid(
        BAMBA,
        4096,
        (128, 64, 1, 128),
        {
            "layers": "9(mamba,mlp) *(attention,mlp 8(mamba,mlp))",
            "num_layers": 32,
            "mlp.ffn_size": 14336,
        },
    ),
    "mamba2-2.7b": hybrid(
        {"position": Position.none},
        2560,
        (80, 64, 1, 128),
        {"layers": "*(mamba)", "num_layers": 64, "vocab_size": 50288, "tied": True}
        | {"max_position": 2**20, "init_std": 0.1},
    ),
    "granite-4.0-h-micro": hybrid(
        GRANITE,
        2048,
        (64, 64, 1, 128),
        {
            "layers": GRANITE_LAYERS.format("mlp"),
            "attention.num_heads": 32,
            "attention.num_kv_heads": 8,
            "attention.scale": 1 / 64,
            "mlp.ffn_size": 8192,
            "logit_scale": 1 / 8,
        },
    ),
    "granite-4.0-h-tiny": hybrid(
        GRANITE,
        1536,
        (48, 64, 1, 128),
        {
            "layers": GRANITE_LAYERS.format("moe"),
            "attention.num_heads": 12,
            "attention.num_kv_heads": 4,
            "attention.scale": 1 / 128,
            "moe.num_experts": 64,
            "moe.top_k": 6,
            "moe.ffn_size": 512,
            "moe.shared_ffn_size": 1024,
            "logit_scale": 1 / 6,
        },
    ),
    "granite-4.0-h-small": hybrid(
        GRANITE,
        4096,
        (128, 64, 1, 128),
        {
            "layers": GRANITE_LAYERS.format("moe"),
            "attention.num_heads": 32,
            "attention.num_kv_heads": 8,
            "attention.scale": 1 / 128,
            "moe.num_experts": 72,
            "moe.top_k": 10,
            "moe.ffn_size": 768,
            "moe.shared_ffn_size": 1536,
            "logit_scale": 1 / 16,
        },
    ),
    "falcon-h1-0.5b": hybrid(
        FALCON_H1,
        1024,
        (24, 64, 1, 128),
        {
            "vocab_size": 32784,
            "max_position": 16384,
            "num_layers": 36,
            "attention.num_heads": 8,
            "attention.num_kv_heads": 2,
            "attention.head_dim": 64,
            "attention.scale": 0.390625 * 64**-0.5,
            "attention.output_scale": 0.9375,
            "mlp.ffn_size": 2048,
            "mlp.gate_scale": 1.25 * 2**-0.5,
            "mlp.output_scale": 0.5859375,
            "mamba.norm": False,
            "mamba.scales": tuple(1.25 * s for s in (8**-0.5, 0.25, 8**-0.5, 0.5, 8**-0.5)),
            "mamba.output_scale": 18**-0.5,
            "logit_scale": 0.0390625,
        },
    ),
    "falcon-h1-7b": hybrid(
        FALCON_H1,
        3072,
        (24, 128, 1, 256),
        {
            "vocab_size": 130049,
            "max_position": 262144,
            "num_layers": 44,
            "attention.num_heads": 12,
            "attention.num_kv_heads": 2,
            "attention.head_dim": 128,
            "attention.scale": 0.030690398488999456 * 128**-0.5,
            "attention.output_scale": 0.10416666666666667,
            "mlp.ffn_size": 12288,
            "mlp.gate_scale": 0.2946278254943948,
            "mlp.output_scale": 0.032552083333333336,
            "mamba.norm": True,
            "mamba.scales": tuple(s / 2.4 for s in (8**-0.5, 0.25, 32**-0.5, 0.5, 8**-0.5)),
            "mamba.output_scale": 72**-0.5,
            "logit_scale": 0.013020833333333334,
        },
    ),
}
