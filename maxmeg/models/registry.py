"""Named architectures as data: fields of ModelConfig, of which max_position is the longest row.

Each is what its authors published: for GPT-3 table 2.1 of Brown et al. 2020, for the others the
config.json of the model of that name on Hugging Face, except where a comment says otherwise.
tests/models/test_registry.py holds each against its published number of parameters, and
tests/oracle/test_parameter_counts.py against transformers' own model.
"""

import dataclasses
import math
import typing

from maxmeg.config.model import (
    Activation,
    ModelConfig,
    Norm,
    NormPlace,
    Position,
    QkNorm,
    RotaryScaling,
    RouterScore,
)
from maxmeg.config.schema import Config

LONGEST_SAMPLE = 8192  # tokens a row when nothing else is asked for, though a model may know longer
Fields = dict[str, typing.Any]

BIASES = {"bias_qkv": True, "bias_attention_out": True, "bias_mlp": True}
GPT = {
    **BIASES,
    "vocab_size": 50257,
    "activation": Activation.gelu_tanh,
    "norm": Norm.layernorm,
    "position": Position.learned,
    "tied": True,
}
GPT2 = {**GPT, "max_position": 1024}
GPT3 = {**GPT, "max_position": 2048}  # dense attention where the paper alternates with sparse
LLAMA = {"activation": Activation.swiglu, "norm": Norm.rmsnorm, "position": Position.rotary}
LLAMA2 = {**LLAMA, "vocab_size": 32000, "max_position": 4096}
LLAMA3 = {**LLAMA, "vocab_size": 128256, "max_position": 8192, "rotary_base": 500000.0}
LLAMA31 = {
    **LLAMA3,
    "max_position": 131072,
    "rotary_scaling": RotaryScaling.llama3,
    "rotary_factor": 8.0,
    "rotary_original_length": 8192,
}
LLAMA32 = {**LLAMA31, "rotary_factor": 32.0, "tied": True}
SMOLLM2 = {
    **LLAMA,
    "vocab_size": 49152,
    "max_position": 8192,
    "rotary_base": 100000.0,
    "tied": True,
}
MISTRAL = {**LLAMA, "vocab_size": 32000, "max_position": 32768}
QWEN25 = {
    **LLAMA,
    "vocab_size": 152064,
    "max_position": 131072,
    "norm_eps": 1e-6,
    "rotary_base": 1e6,
    "bias_qkv": True,
}
QWEN25_SMALL = {**QWEN25, "vocab_size": 151936, "max_position": 32768, "tied": True}
QWEN3 = {
    **LLAMA,
    "vocab_size": 151936,
    "max_position": 40960,
    "norm_eps": 1e-6,
    "rotary_base": 1e6,
    "head_dim": 128,
    "qk_norm": QkNorm.head,
}
GEMMA = {
    "activation": Activation.geglu,
    "norm": Norm.rmsnorm,
    "norm_eps": 1e-6,
    "norm_one_plus": True,
    "norm_place": NormPlace.sandwich,
    "position": Position.rotary,
    "head_dim": 256,
    "attention_scale": 256**-0.5,
    "tied": True,
}
GEMMA2 = {
    **GEMMA,
    "vocab_size": 256000,
    "max_position": 8192,
    "attention_window": 4096,
    "attention_global_every": 2,
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
}
GEMMA3 = {  # text_config, or of the 1B, which reads no images, config.json
    **GEMMA,
    "vocab_size": 262208,
    "max_position": 131072,
    "qk_norm": QkNorm.head,
    "attention_window": 1024,
    "attention_global_every": 6,
    "rotary_base": 1e6,
    "rotary_local_base": 1e4,
    "rotary_scaling": RotaryScaling.linear,
    "rotary_factor": 8.0,
}
GEMMA3_TEXT = {
    **GEMMA3,
    "vocab_size": 262144,
    "max_position": 32768,
    "attention_window": 512,
    "rotary_scaling": RotaryScaling.none,
    "rotary_factor": 1.0,
}
OLMO2 = {
    **LLAMA,
    "vocab_size": 100352,
    "max_position": 4096,
    "norm_eps": 1e-6,
    "norm_place": NormPlace.post,
    "qk_norm": QkNorm.heads,
    "rotary_base": 500000.0,
}
PHI3 = {**LLAMA, "vocab_size": 32064, "max_position": 4096, "attention_window": 2047}
PHI3_LONG = {  # config.json of July 2024; the window is longer than any row
    **PHI3,
    "max_position": 131072,
    "attention_window": 262144,
    "rotary_scaling": RotaryScaling.longrope,
    "rotary_factor": 32.0,
    "rotary_original_length": 4096,
    "rotary_short_factors": (
        *(1.1, 1.1, 1.1, 1.3000000000000003, 1.3500000000000003, 1.3500000000000003),
        *(1.4000000000000004, 1.5500000000000005, *(2.000000000000001,) * 17),
        *(*(2.0500000000000007,) * 6, *(2.1000000000000005,) * 2, 2.1500000000000004),
        *(*(2.25,) * 5, 2.3999999999999995, 2.4499999999999993, 2.499999999999999),
        *(2.6999999999999984, 2.6999999999999984, 2.7499999999999982, 2.799999999999998),
        *(2.8999999999999977, 3.049999999999997),
    ),
    "rotary_long_factors": (
        *(1.0700000524520874, 1.1200000047683716, 1.149999976158142, 1.4199999570846558),
        *(1.5699999332427979, 1.7999999523162842, 2.129999876022339, 2.129999876022339),
        *(3.009999990463257, 5.910000324249268, 6.950000286102295, 9.070000648498535),
        *(9.930000305175781, 10.710000038146973, 11.130000114440918, 14.609999656677246),
        *(15.409998893737793, 19.809999465942383, 37.279998779296875, 38.279998779296875),
        *(38.599998474121094, 40.12000274658203, 46.20000457763672, 50.940006256103516),
        *(53.66000747680664, 54.9373893737793, 56.89738845825195, 57.28738784790039),
        *(59.98738479614258, 60.86738586425781, 60.887386322021484, 61.71739196777344),
        *(62.91739273071289, 62.957393646240234, 63.41739273071289, 63.8173942565918),
        *(63.83739471435547, 63.897396087646484, 63.93739700317383, 64.06739807128906),
        *(64.11434936523438, 64.12435150146484, 64.15435028076172, 64.19435119628906),
        *(64.24435424804688, 64.57435607910156, 64.69000244140625, 64.76000213623047),
    ),
}
NEOX = {
    **BIASES,
    "vocab_size": 50304,  # with the padding of its training, which larger ones have more of
    "max_position": 2048,
    "activation": Activation.gelu,
    "norm": Norm.layernorm,
    "position": Position.rotary,
    "rotary_fraction": 0.25,
    "parallel_block": True,
    "parallel_norms": True,
}
FALCON = {
    "vocab_size": 65024,
    "max_position": 2048,
    "activation": Activation.gelu,
    "norm": Norm.layernorm,
    "position": Position.rotary,
    "parallel_block": True,
    "tied": True,
}
STARCODER2 = {
    **BIASES,
    "vocab_size": 49152,
    "max_position": 16384,
    "activation": Activation.gelu_tanh,
    "norm": Norm.layernorm,
    "position": Position.rotary,
    "attention_window": 4096,
    "init_std": 0.018042,
    "tied": True,
}
NEMOTRON = {
    "vocab_size": 256000,
    "max_position": 4096,
    "activation": Activation.relu_squared,
    "norm": Norm.layernorm,
    "norm_one_plus": True,
    "position": Position.rotary,
    "rotary_fraction": 0.5,
    "init_std": 0.0134,
}
MIXTRAL = {
    **LLAMA,
    "vocab_size": 32000,
    "max_position": 32768,
    "rotary_base": 1e6,
    "num_experts": 8,
    "router_aux_loss": 0.02,
}
QWEN2_MOE = {
    **QWEN25,
    "vocab_size": 151936,
    "shared_gate": True,
    "router_over_all": True,
    "router_aux_loss": 0.001,
}
QWEN3_MOE = {
    **QWEN3,
    "num_experts": 128,
    "experts_per_token": 8,
    "router_aux_loss": 0.001,
}
GPT_OSS = {
    **LLAMA,
    **BIASES,
    "vocab_size": 201088,
    "max_position": 131072,
    "head_dim": 64,
    "activation": Activation.quick_geglu,
    "activation_clamp": 7.0,
    "glu_offset": 1.0,
    "attention_window": 128,
    "attention_global_every": 2,
    "attention_sinks": True,
    "rotary_base": 150000.0,
    "rotary_scaling": RotaryScaling.yarn,
    "rotary_factor": 32.0,
    "rotary_original_length": 4096,
    "rotary_high": 32.0,
    "rotary_truncate": False,
    "experts_per_token": 4,
    "router_logit_bias": True,
    "router_aux_loss": 0.001,  # theirs does not say what it was trained with
}
SIGMOID = {
    "router_score": RouterScore.sigmoid,
    "router_normalize": True,
    "router_bias": True,
}
GLM45 = {
    **LLAMA,
    **SIGMOID,
    "vocab_size": 151552,
    "max_position": 131072,
    "head_dim": 128,
    "bias_qkv": True,
    "rotary_base": 1e6,
    "rotary_fraction": 0.5,
    "experts_per_token": 8,
    "router_sequence_aux_loss": 1e-4,  # section 2.4 of its paper
}
MLA = {
    **LLAMA,
    "norm_eps": 1e-6,
    "head_dim": 128,
    "mla_kv_rank": 512,
    "mla_rotary_size": 64,
    "mla_value_size": 128,
    "mla_norm_eps": 1e-6,
    "rotary_interleaved": True,
    "first_dense_layers": 1,
    "router_sequence_aux_loss": 0.001,
}
MLA_LONG = {
    **MLA,
    "max_position": 163840,
    "rotary_scaling": RotaryScaling.yarn,
    "rotary_factor": 40.0,
    "rotary_original_length": 4096,
    "rotary_high": 32.0,
    "rotary_attention_factor": 1.0,
}
DEEPSEEK_V2 = {
    **MLA_LONG,
    "vocab_size": 102400,
    "experts_per_token": 6,
    "router_over_all": True,
}


def scores_scale(yarn_scale: float) -> float:
    """Of attention, by the scale that MLA_LONG's rotation has for all dimensions."""
    return 192**-0.5 * (0.1 * yarn_scale * math.log(40) + 1) ** 2


def gpt(base: Fields, num_layers: int, hidden_size: int, num_heads: int) -> Fields:
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}
    return {**base, **sizes}


def sized(base: Fields, sizes: tuple[int, int, int, int, int], **others) -> Fields:
    """sizes: layers, hidden size, heads, heads of keys and values, inner width of the MLP."""
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size")
    return {**base, **dict(zip(names, sizes, strict=True)), **others}


def sparse(
    base: Fields, sizes: tuple[int, int, int, int, int], experts: tuple[int, int], **others
) -> Fields:
    """experts: how many, and the inner width of one."""
    numbers = {"num_experts": experts[0], "expert_ffn_size": experts[1]}
    return sized({**base, **numbers}, sizes, **others)


def gemma(base: Fields, sizes: tuple[int, int, int, int, int], **others) -> Fields:
    return sized(base, sizes, embedding_scale=sizes[1] ** 0.5, **others)


ARCHITECTURES: dict[str, Fields] = {
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
    "smollm2-135m": sized(SMOLLM2, (30, 576, 9, 3, 1536), init_std=1 / 24),
    "smollm2-360m": sized(SMOLLM2, (32, 960, 15, 5, 2560)),
    "smollm2-1.7b": sized(SMOLLM2, (24, 2048, 32, 32, 8192), rotary_base=130000.0),
    "mistral-7b-v0.1": sized(MISTRAL, (32, 4096, 32, 8, 14336), attention_window=4096),
    "mistral-7b-v0.3": sized(MISTRAL, (32, 4096, 32, 8, 14336), vocab_size=32768, rotary_base=1e6),
    "qwen2.5-0.5b": sized(QWEN25_SMALL, (24, 896, 14, 2, 4864)),
    "qwen2.5-1.5b": sized(QWEN25_SMALL, (28, 1536, 12, 2, 8960), max_position=131072),
    "qwen2.5-3b": sized(QWEN25_SMALL, (36, 2048, 16, 2, 11008)),
    "qwen2.5-7b": sized(QWEN25, (28, 3584, 28, 4, 18944)),
    "qwen2.5-14b": sized(QWEN25, (48, 5120, 40, 8, 13824), norm_eps=1e-5),
    "qwen2.5-32b": sized(QWEN25, (64, 5120, 40, 8, 27648), norm_eps=1e-5),
    "qwen2.5-72b": sized(QWEN25, (80, 8192, 64, 8, 29568), norm_eps=1e-5),
    "qwen3-0.6b": sized(QWEN3, (28, 1024, 16, 8, 3072), tied=True),
    "qwen3-1.7b": sized(QWEN3, (28, 2048, 16, 8, 6144), tied=True),
    "qwen3-4b": sized(QWEN3, (36, 2560, 32, 8, 9728), tied=True),
    "qwen3-8b": sized(QWEN3, (36, 4096, 32, 8, 12288)),
    "qwen3-14b": sized(QWEN3, (40, 5120, 40, 8, 17408)),
    "qwen3-32b": sized(QWEN3, (64, 5120, 64, 8, 25600)),
    "gemma2-2b": gemma(GEMMA2, (26, 2304, 8, 4, 9216)),
    "gemma2-9b": gemma(GEMMA2, (42, 3584, 16, 8, 14336)),
    "gemma2-27b": gemma(GEMMA2, (46, 4608, 32, 16, 36864), head_dim=128, attention_scale=144**-0.5),
    "gemma3-1b": gemma(GEMMA3_TEXT, (26, 1152, 4, 1, 6912)),
    "gemma3-4b": gemma(GEMMA3, (34, 2560, 8, 4, 10240)),
    "gemma3-12b": gemma(GEMMA3, (48, 3840, 16, 8, 15360)),
    "gemma3-27b": gemma(GEMMA3, (62, 5376, 32, 16, 21504), head_dim=128, attention_scale=168**-0.5),
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
        {**NEOX, "vocab_size": 50432, "activation": Activation.gelu_tanh}, 44, 6144, 64
    ),
    "falcon-7b": sized(FALCON, (32, 4544, 71, 1, 18176)),
    "falcon-40b": sized(FALCON, (60, 8192, 128, 8, 32768), parallel_norms=True),
    "starcoder2-3b": sized(STARCODER2, (30, 3072, 24, 2, 12288), rotary_base=999999.4420358813),
    "starcoder2-7b": sized(STARCODER2, (32, 4608, 36, 4, 18432), rotary_base=1e6),
    "starcoder2-15b": sized(
        STARCODER2, (40, 6144, 48, 4, 24576), rotary_base=1e5, init_std=0.01275, tied=False
    ),
    "minitron-4b": sized(NEMOTRON, (32, 3072, 24, 8, 9216)),
    "minitron-8b": sized(NEMOTRON, (32, 4096, 48, 8, 16384), head_dim=128),
    "nemotron4-15b": sized(NEMOTRON, (32, 6144, 48, 8, 24576)),  # Parmar et al. 2024, table 1
    "nemotron4-340b": sized(NEMOTRON, (96, 18432, 96, 8, 73728), init_std=0.0063),  # its report
}
SPARSE = {
    "mixtral-8x7b": sized(MIXTRAL, (32, 4096, 32, 8, 14336)),
    "mixtral-8x22b": sized(
        MIXTRAL, (56, 6144, 48, 8, 16384), max_position=65536, router_aux_loss=0.001
    ),
    "qwen1.5-moe-a2.7b": sparse(
        QWEN2_MOE, (24, 2048, 16, 16, 5632), (60, 1408), shared_ffn_size=5632,
        experts_per_token=4, max_position=8192,
    ),
    "qwen2-57b-a14b": sparse(
        QWEN2_MOE, (28, 3584, 28, 4, 18944), (64, 2560), shared_ffn_size=20480,
        experts_per_token=8,
    ),
    "qwen3-30b-a3b": sparse(QWEN3_MOE, (48, 2048, 32, 4, 6144), (128, 768)),
    "qwen3-235b-a22b": sparse(QWEN3_MOE, (94, 4096, 64, 4, 12288), (128, 1536)),
    "gpt-oss-20b": sparse(GPT_OSS, (24, 2880, 64, 8, 2880), (32, 2880)),
    "gpt-oss-120b": sparse(GPT_OSS, (36, 2880, 64, 8, 2880), (128, 2880)),
    "glm4.5-air": sparse(
        GLM45, (46, 4096, 96, 8, 10944), (128, 1408), shared_ffn_size=1408, first_dense_layers=1,
    ),
    "glm4.5": sparse(
        GLM45, (92, 5120, 96, 8, 12288), (160, 1536), shared_ffn_size=1536, first_dense_layers=3,
        router_scale=2.5, qk_norm=QkNorm.head,
    ),
    "deepseek-v2-lite": sparse(
        DEEPSEEK_V2, (27, 2048, 16, 16, 10944), (64, 1408), shared_ffn_size=2816,
        attention_scale=scores_scale(0.707),
    ),
    "deepseek-v2": sparse(  # whose scale of YaRN is not that of DeepSeek-V2.5
        DEEPSEEK_V2, (60, 5120, 128, 128, 12288), (160, 1536), shared_ffn_size=3072,
        mla_query_rank=1536, attention_scale=scores_scale(0.707), router_scale=16.0,
        router_groups=8, router_groups_kept=3, router_group_best=1,
    ),
    "deepseek-v3": sparse(
        {**MLA_LONG, **SIGMOID}, (61, 7168, 128, 128, 18432), (256, 2048), vocab_size=129280,
        attention_scale=scores_scale(1.0), shared_ffn_size=2048,
        mla_query_rank=1536, first_dense_layers=3, experts_per_token=8, router_scale=2.5,
        router_groups=8, router_groups_kept=4, router_group_best=2,
        router_sequence_aux_loss=1e-4,  # section 4.2 of its paper; config.json has 0.001
    ),
    "moonlight-16b-a3b": sparse(
        {**MLA, **SIGMOID}, (27, 2048, 16, 16, 11264), (64, 1408), vocab_size=163840,
        max_position=8192, norm_eps=1e-5, rotary_base=50000.0, shared_ffn_size=2816,
        experts_per_token=6, router_scale=2.446,
    ),
}  # fmt: skip
ARCHITECTURES |= SPARSE
ALIASES = {  # Megatron-LM's names
    "345m": "gpt2-355m",
    "1.3b": "gpt3-1.3b",
    "6.7b": "gpt3-6.7b",
    "175b": "gpt3-175b",
}


def architecture(name: str) -> ModelConfig:
    """The ModelConfig of a named architecture, its max_position set."""
    fields = ARCHITECTURES.get(ALIASES.get(name, name))
    if fields is None:
        known = [*ARCHITECTURES, *ALIASES]
        raise ValueError(f"no architecture is named {name!r}: choose from {known}")
    return ModelConfig(**fields)


def use_architecture(config: Config, name: str) -> Config:
    """`config` with the named architecture, and samples as long as it knows, up to 8192 tokens."""
    model = architecture(name)
    length = min(model.max_position, LONGEST_SAMPLE)
    data = dataclasses.replace(config.data, sequence_length=length)
    return dataclasses.replace(config, model=model, data=data)
