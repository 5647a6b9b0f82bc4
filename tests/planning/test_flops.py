"""FLOPs against Megatron-LM's numbers, and what the planner knows of mixers; names of GPUs."""

import ast
from pathlib import Path

import pytest

from maxmeg.config.architectures import architecture
from maxmeg.config.mixers import Activation
from maxmeg.config.model import ModelConfig
from maxmeg.config.setting import with_fields
from maxmeg.planning import cost
from maxmeg.planning.cost.flops import training_flops
from maxmeg.planning.cost.parameters import parameter_counts
from maxmeg.planning.hardware import gpu, peak_tflops

REL = 5e-7  # the known values have seven digits

GPT = {"vocab_size": 50257, "mlp.activation": Activation.gelu}
GPT_345M = GPT | {"num_layers": 24, "hidden_size": 1024, "attention.num_heads": 16}
DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "num_layers": 61,
    "mtp.num_layers": 1,
    "hidden_size": 7168,
    "attention.num_heads": 128,
    "attention.head_dim": 128,
    "layers": "3(mla,mlp) *(mla,moe)",
    "mla.kv_rank": 512,
    "mla.query_rank": 1536,
    "mlp.ffn_size": 18432,
    "moe.num_experts": 256,
    "moe.top_k": 8,
    "moe.ffn_size": 2048,
    "moe.shared_ffn_size": 2048,
}


@pytest.mark.parametrize(
    ("name", "sequence_length", "tensor", "expected"),
    [
        ("345m", 1024, 1, 2.326530e12),
        ("175b", 2048, 8, 2.174868e15),
        ("llama3-8b", 8192, 1, 4.216455e14),
    ],
)
def test_flops_of_a_sample_equal_megatron(name, sequence_length, tensor, expected):
    flops = training_flops(architecture(name), sequence_length, tensor=tensor)
    assert flops == pytest.approx(expected, rel=REL)


def test_latent_attention_and_further_tokens_count_as_megatron_has_it():
    """DeepSeek-V3 and one further token. Megatron-LM leaves routers out."""
    model, tokens = with_fields(ModelConfig(), DEEPSEEK_V3), 4096
    sparse = model.num_layers - 3 + model.mtp.num_layers
    routers = 6 * tokens * sparse * model.hidden_size * model.moe.num_experts
    found = training_flops(model, tokens) - routers
    assert found == pytest.approx(1.064931e15, rel=REL)


def test_flops_of_a_hybrid_equal_those_of_megatron():
    """Nemotron-H 8B by the formulas of num_floating_point_operations for hybrid models."""
    B, L, D, V, F, H, G, K = 2, 8192, 4096, 131072, 21504, 32, 8, 128
    state, groups, heads = 128, 8, 128
    inner, share = heads * 64, K * H / D
    attention = 4 * B * L * D * share * (D + D * G / H + L / 2)
    mamba = 2 * B * L * D * (2 * inner + 2 * groups * state + heads) + 7 * B * L * inner * state
    mamba += 2 * B * L * inner * D
    wanted = 3 * (4 * attention + 24 * mamba + 24 * 4 * B * L * D * F + 2 * B * L * D * V)
    assert training_flops(architecture("nemotron-h-8b"), L, B) == pytest.approx(wanted, rel=1e-12)


def test_retro_multiplies_neighbours_by_the_encoder_and_scores_within_chunks():
    L, m, k, r, D = 256, 64, 2, 128, 128
    S = L // m * k * r
    encoder = "attention 2(encoder_attention,encoder_cross,encoder_mlp) encoder_norm "
    fields = {"layers": encoder + "chunked_cross,mlp *(attention,chunked_cross,mlp)"}
    fields |= {"num_layers": 6, "vocab_size": 1000, "mlp.ffn_size": 4 * D}
    fields |= {"retro.chunk_length": m, "retro.neighbour_length": r}
    model = with_fields(ModelConfig(), fields | {"mlp.activation": Activation.gelu})
    of_encoder = 2 * (S * (4 + 2 + 8) * D * D + L * 2 * D * D)
    of_decoder = 2 * (L * (4 + 2 + 8) * D * D + S * 2 * D * D)
    scores = 2 * D * (2 * S * r + 2 * S * m + 2 * L * k * r + L * L)  # two are causal
    wanted = 6 * (of_encoder + of_decoder + L * D * model.padded_vocab_size(1) + scores)
    assert training_flops(model, L, source_length=S) == pytest.approx(wanted, rel=1e-12)


def test_a_window_saves_the_scores_outside_it():
    """In local layers; global ones among them are whole."""
    whole, local, mixed = (
        training_flops(with_fields(ModelConfig(), {**GPT_345M, "num_layers": 26, **fields}), 1024)
        for fields in (
            {},
            {"layers": "*(local,mlp)", "attention.window": 256},
            {"layers": "*(5(local,mlp) attention,mlp)", "attention.window": 256},
        )
    )
    pairs = sum(min(n + 1, 256) for n in range(1024))
    saved = 12 * 26 * 1024 * (1024**2 / 2 - pairs)
    assert whole - local == pytest.approx(saved, rel=1e-3)  # half a pair a token is not counted
    assert 26 * mixed == pytest.approx(4 * whole + 22 * local, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "tflops", "memory"),
    [
        ("NVIDIA A100-SXM4-40GB", 312.0, 40),
        ("NVIDIA A100-SXM4-80GB", 312.0, 80),
        ("NVIDIA A100 80GB PCIe", 312.0, 80),
        ("NVIDIA B200", 2250.0, 192),
        ("NVIDIA GB200", 2500.0, 192),
        ("NVIDIA GH200 480GB", 989.4, 96),
        ("NVIDIA A10", 125.0, 24),
        ("NVIDIA A10G", 70.0, 24),
    ],
)
def test_gpu_by_name(name, tflops, memory):
    assert peak_tflops(name) == tflops
    assert gpu(name).memory_gb == memory


@pytest.mark.parametrize("name", ["cpu", "Tesla V100-SXM2-16GB", "TPU v5 lite", ""])
def test_unlisted_devices_have_no_peak(name):
    assert gpu(name) is None and peak_tflops(name) is None


def test_a_convolution_multiplies_each_token_by_all_of_its_weights():
    fields = {"layers": "*(conv,mlp)", "conv.kernel_size": 5, "vocab_size": 1024}
    model, tokens = with_fields(ModelConfig(), fields), 64
    counts = parameter_counts(model)
    weights = counts["conv"] + counts["mlp"] + counts["output"]
    assert training_flops(model, tokens) == 6 * tokens * weights


def test_the_planner_names_no_mixer_but_attention_and_experts():
    """A further mixer is planned by what its spec answers: weights, multiplications, widths."""
    trees = [ast.parse(path.read_text()) for path in Path(cost.__path__[0]).parent.rglob("*.py")]
    imported = [
        alias.name
        for node in (node for tree in trees for node in ast.walk(tree))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("maxmeg.layers")
        for alias in node.names
    ]
    specs = {name for name in imported if name.endswith("Spec")}
    assert specs == {"MixerSpec", "ResidualSpec", "AttentionSpec", "MoeSpec"}
