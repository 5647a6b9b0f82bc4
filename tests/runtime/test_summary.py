"""The first screen of a run: numbers counted by hand, and its width."""

import types

import pytest

from maxmeg.config.architectures import use_architecture
from maxmeg.config.quantization import QuantizationRecipe
from maxmeg.config.schema import Config, Optimizer
from maxmeg.config.setting import with_fields
from maxmeg.runtime import screen
from maxmeg.runtime.metrics.progress import quantity
from maxmeg.runtime.metrics.summary import summary

ONE = dict.fromkeys(("pipe", "data", "fsdp", "expert", "context", "tensor"), 1)
STATE = types.SimpleNamespace(model={}, optimizer={}, remainders=None, ema=None)
SMALL = {"num_layers": 2, "hidden_size": 8, "attention.num_heads": 2, "vocab_size": 257}
NORMS_AND_TABLES = 5 * 8 + 2 * 257 * 8
ATTENTION, MLP = 4 * 8 * 8, 3 * 8 * 32  # weights of a layer


def words(config: Config, **axes: int) -> dict[str, str]:
    return dict(summary(config, ONE | axes, STATE))


def model_of(fields: dict) -> Config:
    return with_fields(Config(), {f"model.{name}": value for name, value in fields.items()})


def test_parameters_are_counted_without_the_padding_of_the_vocabulary():
    config = model_of(SMALL | {"mlp.ffn_size": 32})
    for tensor in (1, 4):
        total = NORMS_AND_TABLES + 2 * (ATTENTION + MLP)
        assert words(config, tensor=tensor)["params"] == f"{total:,}"


def test_active_and_trained_parameters_are_told():
    experts = {"layers": "*(attention,moe)", "moe.num_experts": 8, "moe.ffn_size": 4}
    config = model_of(SMALL | experts | {"moe.top_k": 2})
    expert, adapters = 3 * 8 * 4, 2 * 2 * 2 * 8 * 4
    total = NORMS_AND_TABLES + 2 * (ATTENTION + 8 * 8 + 8 * expert)
    active = quantity(total - 2 * 6 * expert)
    assert words(config)["params"] == f"{total:,}, {active} active (top 2 of 8 experts)"
    config.lora.rank = 4  # of query and value
    total, shown = total + adapters, f"{quantity(adapters)} trainable"
    assert words(config)["params"].startswith(f"{total:,}, ") and shown in words(config)["params"]


def test_what_differs_from_the_defaults_is_told():
    config = with_fields(
        model_of(SMALL | {"hidden_size": 16, "mlp.ffn_size": 24}),
        {
            "train.quantization.recipe": QuantizationRecipe.nvfp4,
            "optim.optimizer": Optimizer.muon,
            "optim.ema.decay": 0.9,
            "optim.offload": True,
        },
    )
    share = 2 * 4 * 16 * 16 / (5 * 16 + 2 * 257 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 24))
    assert words(config)["model"].endswith(f"bfloat16, nvfp4 for {share:.0%} of parameters")
    assert "optimizer (muon, with averages, in host memory), step" in words(config)["memory"]
    plain = words(model_of(SMALL))["memory"]
    assert "optimizer, step" in plain and plain.endswith(" per device")


@pytest.mark.parametrize("name", ["gpt3-175b", "deepseek-v3"])
def test_every_line_of_a_large_run_fits(name, monkeypatch):
    """With all axes of the mesh, behind the prefix of srun; data is the line after them."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    config = use_architecture(Config(), name)
    config.train.global_batch_size, config.train.num_steps = 16384, 1_000_000
    config.train.micro_batch_size, config.lora.rank = 1, int(name == "gpt3-175b")
    config.parallel.expert, config.parallel.expert_tensor = 64, 1
    axes = {"pipe": 16, "data": 32, "fsdp": 8, "expert": 8, "tensor": 8}
    lines = [screen.wrapped(text, label) for label, text in words(config, **axes).items()]
    assert [line.split()[0] for line in lines] == ["model", "params", "memory", "mesh", "batch"]
    parts = "\n".join(lines).splitlines()
    assert max(map(len, parts)) <= 74 and len(parts) <= 8
    assert "expert 8 x tensor 8 (experts over 64 devices)" in " ".join(lines[3].split())
