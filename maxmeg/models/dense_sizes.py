"""Named dense architectures as data (see registry.py)."""

import typing

from maxmeg.config.mixers import Activation, QkNorm
from maxmeg.config.model import Norm, NormPlace, Position
from maxmeg.config.positions import RotaryScaling
from maxmeg.models import phi3_factors

Fields = dict[str, typing.Any]
NONE: Fields = {}
HEADS = ["attention.num_heads", "attention.num_kv_heads"]
SIZES = ["num_layers", "hidden_size", *HEADS, "mlp.ffn_size"]

BIASES = {"attention.bias_qkv": True, "attention.bias_out": True, "mlp.bias": True}
GPT = {
    **BIASES,
    "vocab_size": 50257,
    "mlp.activation": Activation.gelu_tanh,
    "norm": Norm.layernorm,
    "position": Position.learned,
    "tied": True,
}
GPT2 = {**GPT, "max_position": 1024}
GPT3 = {**GPT, "max_position": 2048}  # dense attention where the paper alternates with sparse
LLAMA = {"mlp.activation": Activation.swiglu, "norm": Norm.rmsnorm, "position": Position.rotary}
LLAMA2 = {**LLAMA, "vocab_size": 32000, "max_position": 4096}
LLAMA3 = {**LLAMA, "vocab_size": 128256, "max_position": 8192, "rotary.base": 500000.0}
LLAMA31 = {
    **LLAMA3,
    "max_position": 131072,
    "rotary.scaling": RotaryScaling.llama3,
    "rotary.factor": 8.0,
    "rotary.original_length": 8192,
}
LLAMA32 = {**LLAMA31, "rotary.factor": 32.0, "tied": True}
SMOLLM2 = {
    **LLAMA,
    "vocab_size": 49152,
    "max_position": 8192,
    "rotary.base": 100000.0,
    "tied": True,
}
MISTRAL = {**LLAMA, "vocab_size": 32000, "max_position": 32768}
QWEN25 = {
    **LLAMA,
    "vocab_size": 152064,
    "max_position": 131072,
    "norm_eps": 1e-6,
    "rotary.base": 1e6,
    "attention.bias_qkv": True,
}
QWEN25_SMALL = {**QWEN25, "vocab_size": 151936, "max_position": 32768, "tied": True}
QWEN3 = {
    **LLAMA,
    "vocab_size": 151936,
    "max_position": 40960,
    "norm_eps": 1e-6,
    "rotary.base": 1e6,
    "attention.head_dim": 128,
    "attention.qk_norm": QkNorm.head,
}
GEMMA = {
    "mlp.activation": Activation.geglu,
    "norm": Norm.rmsnorm,
    "norm_eps": 1e-6,
    "norm_one_plus": True,
    "norm_place": NormPlace.sandwich,
    "position": Position.rotary,
    "attention.head_dim": 256,
    "attention.scale": 256**-0.5,
    "tied": True,
}
GEMMA2 = {
    **GEMMA,
    "vocab_size": 256000,
    "max_position": 8192,
    "layers": "*(local,mlp attention,mlp)",
    "attention.window": 4096,
    "attention.softcap": 50.0,
    "logit_softcap": 30.0,
}
GEMMA3 = {  # text_config; for the text-only 1B, config.json
    **GEMMA,
    "vocab_size": 262208,
    "max_position": 131072,
    "attention.qk_norm": QkNorm.head,
    "layers": "*(5(local,mlp) attention,mlp)",
    "attention.window": 1024,
    "rotary.base": 1e6,
    "rotary.local_base": 1e4,
    "rotary.scaling": RotaryScaling.linear,
    "rotary.factor": 8.0,
}
GEMMA3_TEXT = {
    **GEMMA3,
    "vocab_size": 262144,
    "max_position": 32768,
    "attention.window": 512,
    "rotary.scaling": RotaryScaling.none,
    "rotary.factor": 1.0,
}
OLMO2 = {
    **LLAMA,
    "vocab_size": 100352,
    "max_position": 4096,
    "norm_eps": 1e-6,
    "norm_place": NormPlace.post,
    "attention.qk_norm": QkNorm.heads,
    "rotary.base": 500000.0,
}
PHI3 = {
    **LLAMA,
    "layers": "*(local,mlp)",
    "vocab_size": 32064,
    "max_position": 4096,
    "attention.window": 2047,
}
PHI3_LONG = {  # config.json of July 2024; the window is longer than any row
    **PHI3,
    "max_position": 131072,
    "attention.window": 262144,
    "rotary.scaling": RotaryScaling.longrope,
    "rotary.factor": 32.0,
    "rotary.original_length": 4096,
    "rotary.short_factors": phi3_factors.SHORT_FACTORS,
    "rotary.long_factors": phi3_factors.LONG_FACTORS,
}
NEOX = {
    **BIASES,
    "vocab_size": 50304,  # padded as in its training; more in larger models
    "max_position": 2048,
    "mlp.activation": Activation.gelu,
    "norm": Norm.layernorm,
    "position": Position.rotary,
    "rotary.fraction": 0.25,
    "layers": "*(attention+mlp)",
    "parallel_norms": True,
}
FALCON = {
    "vocab_size": 65024,
    "max_position": 2048,
    "mlp.activation": Activation.gelu,
    "norm": Norm.layernorm,
    "position": Position.rotary,
    "layers": "*(attention+mlp)",
    "tied": True,
}
STARCODER2 = {
    **BIASES,
    "vocab_size": 49152,
    "max_position": 16384,
    "mlp.activation": Activation.gelu_tanh,
    "norm": Norm.layernorm,
    "position": Position.rotary,
    "layers": "*(local,mlp)",
    "attention.window": 4096,
    "init_std": 0.018042,
    "tied": True,
}
NEMOTRON = {
    "vocab_size": 256000,
    "max_position": 4096,
    "mlp.activation": Activation.relu_squared,
    "norm": Norm.layernorm,
    "norm_one_plus": True,
    "position": Position.rotary,
    "rotary.fraction": 0.5,
    "init_std": 0.0134,
}


def gpt(base: Fields, num_layers: int, hidden_size: int, num_heads: int) -> Fields:
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "attention.num_heads": num_heads}
    return {**base, **sizes}


def sized(base: Fields, sizes: tuple[int, int, int, int, int], others: Fields = NONE) -> Fields:
    """sizes: num_layers, hidden_size, num_heads, num_kv_heads, ffn_size."""
    return {**base, **dict(zip(SIZES, sizes, strict=True)), **others}


def gemma(base: Fields, sizes: tuple[int, int, int, int, int], others: Fields = NONE) -> Fields:
    return sized(base, sizes, {"embedding_scale": sizes[1] ** 0.5, **others})


DENSE: dict[str, Fields] = {
    "gpt2-124m": gpt(GPT2, 12, 768, 12),
    "gpt2-355m": gpt(GPT2, 24, 1024, 16),
    "gpt2-774m": gpt(GPT2, 36, 1280, 20),
    "gpt2-1.5b": gpt(GPT2, 48, 1600, 25),
    "gpt3-125m": gpt(GPT3, 12, 768, 12),
    "gpt3-350m": gpt(GPT3, 24, 1024, 16),
    "gpt3-760m": gpt(GPT3, 24, 1536, 16),
    "gpt3-1.3b": gpt(GPT3, 24, 2048, 16),  # the table's 24 heads of 128 are not 2048 wide
    "gpt3-2.7b": gpt(GPT3, 32, 2560, 32),
    "gpt3-6.7b": gpt(GPT3, 32, 4096, 32),
    "gpt3-13b": gpt(GPT3, 40, 5120, 40),  # the table's 5140 is not 40 heads of 128
    "gpt3-175b": gpt(GPT3, 96, 12288, 96),
    "22b": gpt(GPT3, 48, 6144, 64),  # Korthikanti et al. 2022, table 3
    "llama2-7b": sized(LLAMA2, (32, 4096, 32, 32, 11008)),
    "llama2-13b": sized(LLAMA2, (40, 5120, 40, 40, 13824)),
    "llama2-70b": sized(LLAMA2, (80, 8192, 64, 8, 28672)),
    "llama3-8b": sized(LLAMA3, (32, 4096, 32, 8, 14336)),
    "llama3-70b": sized(LLAMA3, (80, 8192, 64, 8, 28672)),
    "llama3.1-8b": sized(LLAMA31, (32, 4096, 32, 8, 14336)),
    "llama3.1-70b": sized(LLAMA31, (80, 8192, 64, 8, 28672)),
    "llama3.1-405b": sized(LLAMA31, (126, 16384, 128, 8, 53248)),
    "llama3.2-1b": sized(LLAMA32, (16, 2048, 32, 8, 8192)),
    "llama3.2-3b": sized(LLAMA32, (28, 3072, 24, 8, 8192)),
    "smollm2-135m": sized(SMOLLM2, (30, 576, 9, 3, 1536), {"init_std": 1 / 24}),
    "smollm2-360m": sized(SMOLLM2, (32, 960, 15, 5, 2560)),
    "smollm2-1.7b": sized(SMOLLM2, (24, 2048, 32, 32, 8192), {"rotary.base": 130000.0}),
    "mistral-7b-v0.1": sized(
        MISTRAL, (32, 4096, 32, 8, 14336), {"layers": "*(local,mlp)", "attention.window": 4096}
    ),
    "mistral-7b-v0.3": sized(
        MISTRAL, (32, 4096, 32, 8, 14336), {"vocab_size": 32768, "rotary.base": 1e6}
    ),
    "qwen2.5-0.5b": sized(QWEN25_SMALL, (24, 896, 14, 2, 4864)),
    "qwen2.5-1.5b": sized(QWEN25_SMALL, (28, 1536, 12, 2, 8960), {"max_position": 131072}),
    "qwen2.5-3b": sized(QWEN25_SMALL, (36, 2048, 16, 2, 11008)),
    "qwen2.5-7b": sized(QWEN25, (28, 3584, 28, 4, 18944)),
    "qwen2.5-14b": sized(QWEN25, (48, 5120, 40, 8, 13824), {"norm_eps": 1e-5}),
    "qwen2.5-32b": sized(QWEN25, (64, 5120, 40, 8, 27648), {"norm_eps": 1e-5}),
    "qwen2.5-72b": sized(QWEN25, (80, 8192, 64, 8, 29568), {"norm_eps": 1e-5}),
    "qwen3-0.6b": sized(QWEN3, (28, 1024, 16, 8, 3072), {"tied": True}),
    "qwen3-1.7b": sized(QWEN3, (28, 2048, 16, 8, 6144), {"tied": True}),
    "qwen3-4b": sized(QWEN3, (36, 2560, 32, 8, 9728), {"tied": True}),
    "qwen3-8b": sized(QWEN3, (36, 4096, 32, 8, 12288)),
    "qwen3-14b": sized(QWEN3, (40, 5120, 40, 8, 17408)),
    "qwen3-32b": sized(QWEN3, (64, 5120, 64, 8, 25600)),
    "gemma2-2b": gemma(GEMMA2, (26, 2304, 8, 4, 9216)),
    "gemma2-9b": gemma(GEMMA2, (42, 3584, 16, 8, 14336)),
    "gemma2-27b": gemma(
        GEMMA2, (46, 4608, 32, 16, 36864), {"attention.head_dim": 128, "attention.scale": 144**-0.5}
    ),
    "gemma3-1b": gemma(GEMMA3_TEXT, (26, 1152, 4, 1, 6912)),
    "gemma3-4b": gemma(GEMMA3, (34, 2560, 8, 4, 10240)),
    "gemma3-12b": gemma(GEMMA3, (48, 3840, 16, 8, 15360)),
    "gemma3-27b": gemma(
        GEMMA3, (62, 5376, 32, 16, 21504), {"attention.head_dim": 128, "attention.scale": 168**-0.5}
    ),
    "olmo2-1b": sized(OLMO2, (16, 2048, 16, 16, 8192)),
    "olmo2-7b": sized(OLMO2, (32, 4096, 32, 32, 11008)),
    "olmo2-13b": sized(OLMO2, (40, 5120, 40, 40, 13824)),
    "olmo2-32b": sized(OLMO2, (64, 5120, 40, 8, 27648)),
    "phi3-mini-4k": sized(PHI3, (32, 3072, 32, 32, 8192)),
    "phi3-mini-128k": sized(PHI3_LONG, (32, 3072, 32, 32, 8192)),
    "phi3-medium-4k": sized(PHI3, (40, 5120, 40, 10, 17920)),
    "pythia-70m": gpt(NEOX, 6, 512, 8),
    "pythia-160m": gpt(NEOX, 12, 768, 12),
    "pythia-410m": gpt(NEOX, 24, 1024, 16),
    "pythia-1b": gpt(NEOX, 16, 2048, 8),
    "pythia-1.4b": gpt(NEOX, 24, 2048, 16),
    "pythia-2.8b": gpt(NEOX, 32, 2560, 32),
    "pythia-6.9b": gpt({**NEOX, "vocab_size": 50432}, 32, 4096, 32),
    "pythia-12b": gpt({**NEOX, "vocab_size": 50688}, 36, 5120, 40),
    "gpt-neox-20b": gpt(
        {**NEOX, "vocab_size": 50432, "mlp.activation": Activation.gelu_tanh}, 44, 6144, 64
    ),
    "falcon-7b": sized(FALCON, (32, 4544, 71, 1, 18176)),
    "falcon-40b": sized(FALCON, (60, 8192, 128, 8, 32768), {"parallel_norms": True}),
    "starcoder2-3b": sized(
        STARCODER2, (30, 3072, 24, 2, 12288), {"rotary.base": 999999.4420358813}
    ),
    "starcoder2-7b": sized(STARCODER2, (32, 4608, 36, 4, 18432), {"rotary.base": 1e6}),
    "starcoder2-15b": sized(
        STARCODER2,
        (40, 6144, 48, 4, 24576),
        {"init_std": 0.01275, "tied": False, "rotary.base": 1e5},
    ),
    "minitron-4b": sized(NEMOTRON, (32, 3072, 24, 8, 9216)),
    "minitron-8b": sized(NEMOTRON, (32, 4096, 48, 8, 16384), {"attention.head_dim": 128}),
    "nemotron4-15b": sized(NEMOTRON, (32, 6144, 48, 8, 24576)),  # Parmar et al. 2024, table 1
    "nemotron4-340b": sized(
        NEMOTRON, (96, 18432, 96, 8, 73728), {"init_std": 0.0063}
    ),  # its report
}
