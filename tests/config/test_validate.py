"""Every rule between settings: the error holds the values and a remedy; good configs pass."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxmeg.config.architecture import divisors
from maxmeg.config.model import AttentionBackend, NormPlace, Position, RotaryScaling
from maxmeg.config.schema import Config, LossBackend, ParallelConfig
from maxmeg.config.validate import BELOW_ONE, LOWEST, axis_sizes, resolve, validate
from maxmeg.models.registry import (
    ARCHITECTURES,
    LONGEST_SAMPLE,
    architecture,
    use_architecture,
)
from maxmeg.ops import attention, cross_entropy

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")


def config_with(settings: dict) -> Config:
    """The default config with `settings` by dotted path."""
    config = Config()
    for path, value in settings.items():
        section, name = path.split(".")
        assert hasattr(getattr(config, section), name), path
        setattr(getattr(config, section), name, value)
    return config


# settings, number of devices, what the error must hold
BAD = [
    ({"model.num_heads": 5}, 1, ["hidden_size=128", "num_heads=5", "1, 2, 4, 8", "head_dim"]),
    ({"model.num_heads": 0}, 1, ["num_heads=0", "choose num_heads in 1, 2, 4"]),
    ({"model.num_heads": -4}, 1, ["num_heads=-4", "choose num_heads in 1, 2, 4"]),
    ({"model.num_kv_heads": 3}, 1, ["num_heads=4", "num_kv_heads=3", "in 1, 2, 4"]),
    ({"model.num_kv_heads": 8}, 1, ["num_heads=4", "num_kv_heads=8", "in 1, 2, 4"]),
    ({"model.num_kv_heads": -1}, 1, ["num_kv_heads=-1", "in 1, 2, 4"]),
    ({"model.head_dim": -8}, 1, ["head_dim=-8", "at least 0"]),
    ({"model.head_dim": -8, "model.position": Position.none}, 1, ["head_dim=-8", "at least 0"]),
    ({"model.rotary_fraction": 0.01}, 1, ["rotary_fraction=0.01", "head size 32", "raise it"]),
    ({"model.rotary_fraction": 1.5}, 1, ["rotary_fraction=1.5", "(0, 1]"]),
    ({"model.rotary_fraction": 0.0}, 1, ["rotary_fraction=0.0", "(0, 1]"]),
    ({"model.parallel_norms": True}, 1, ["parallel_norms=true needs", "parallel_block=true"]),
    (
        {
            "model.parallel_norms": True,
            "model.parallel_block": True,
            "model.norm_place": NormPlace.post,
        },
        1,
        ["parallel_norms=true has no effect with norm_place=post"],
    ),
    ({"model.attention_global_every": 6}, 1, ["attention_global_every=6", "attention_window=0"]),
    (
        {"model.attention_global_every": 1, "model.attention_window": 8},
        1,
        ["attention_global_every=1", "n >= 2"],
    ),
    ({"model.rotary_local_base": 1e4}, 1, ["rotary_local_base=10000.0", "global_every=0"]),
    ({"model.attention_window": -1}, 1, ["attention_window=-1", "at least 0"]),
    ({"lora.rank": -1}, 1, ["lora.rank=-1", "at least 0"]),
    ({"lora.rank": 8, "lora.targets": ()}, 1, ["lora.targets is empty", "query,value"]),
    ({"lora.rank": 8, "lora.alpha": 0.0}, 1, ["lora.alpha=0.0", "positive"]),
    ({"lora.alpha": 32.0}, 1, ["lora.alpha=32.0 has no effect with lora.rank=0"]),
    ({"model.rotary_factor": 2.0}, 1, ["model.rotary_factor=2.0 has no effect with", "=none"]),
    (
        {"model.rotary_scaling": RotaryScaling.linear, "model.position": Position.learned},
        1,
        ["model.rotary_scaling=linear has no effect", "position=learned"],
    ),
    (
        {"model.rotary_scaling": RotaryScaling.linear, "model.rotary_low": 2.0},
        1,
        ["model.rotary_low=2.0 has no effect with rotary_scaling=linear"],
    ),
    (
        {"model.rotary_scaling": RotaryScaling.linear, "model.rotary_factor": 0.5},
        1,
        ["model.rotary_factor=0.5 must be at least 1"],
    ),
    (
        {"model.rotary_scaling": RotaryScaling.llama3, "model.rotary_factor": 8.0},
        1,
        ["model.rotary_original_length=0", "at least 2", "llama3"],
    ),
    (
        {
            "model.rotary_scaling": RotaryScaling.yarn,
            "model.rotary_original_length": 64,
            "model.rotary_low": 40.0,
        },
        1,
        ["rotary_low=40.0", "rotary_high=4.0", "0 < low < high"],
    ),
    (
        {
            "model.rotary_scaling": RotaryScaling.longrope,
            "model.rotary_original_length": 64,
            "model.rotary_short_factors": (1.0,),
        },
        1,
        ["rotary_short_factors must be 16 positive numbers", "are 1", "rotary_long_factors"],
    ),
    ({"parallel.pipe": 2, "model.scan_layers": False}, 2, ["scan_layers=false", "pipe=2"]),
    ({"parallel.tensor": 8}, 8, ["model.num_heads=4", "parallel.tensor=8", "tensor in 1, 2, 4"]),
    (
        {"model.num_kv_heads": 1, "parallel.tensor": 2},
        2,
        ["model.num_kv_heads=1", "parallel.tensor=2", "tensor in 1", "change model.num_kv_heads"],
    ),
    (
        {"model.ffn_size": 130, "parallel.tensor": 4},
        4,
        ["model.ffn_size=130", "parallel.tensor=4", "tensor in 1, 2, 5"],
    ),
    (
        {"data.sequence_length": 250, "parallel.tensor": 4},
        4,
        ["data.sequence_length=250", "parallel.tensor=4", "tensor in 1, 2, 5"],
    ),
    (
        {"parallel.fsdp": 3, "train.global_batch_size": 3},
        3,
        ["model.hidden_size=128", "parallel.fsdp=3", "fsdp in 1, 2, 4"],
    ),
    ({"parallel.tensor": 3}, 8, ["tensor=3", "8 devices", "product", "fsdp=0"]),
    ({"parallel.data": 4, "parallel.fsdp": 1}, 8, ["data=4", "8 devices", "product"]),
    ({"parallel.fsdp": 1}, 8, ["mesh of size 1", "8 devices", "product"]),
    ({"parallel.data": 16}, 8, ["data=16", "8 devices", "product"]),
    ({"parallel.data": 0}, 8, ["parallel.data=0", "at least 1"]),
    ({"parallel.fsdp": -1}, 8, ["parallel.fsdp=-1", "at least 1"]),
    ({"train.global_batch_size": 30}, 8, ["=30", "divisible by 8", "fsdp 8", "24 and 32"]),
    ({"train.global_batch_size": 5}, 8, ["=5", "divisible by 8", "8 and"]),
    ({"train.global_batch_size": 0}, 1, ["global_batch_size=0", "nearest choices are 1"]),
    (
        {"train.global_batch_size": 24, "train.micro_batch_size": 5, "parallel.data": 2},
        2,
        ["=24", "divisible by 10 = data 2", "micro_batch_size 5", "20 and 30"],
    ),
    (
        {"model.max_position": 128},
        1,
        ["sequence_length=256", "max_position=128", "shorten", "raise"],
    ),
    ({"optim.min_lr": 1.0}, 1, ["optim.min_lr=1.0", "[0, optim.lr=0.0003]"]),
    ({"optim.warmup_init_lr": -0.1}, 1, ["optim.warmup_init_lr=-0.1", "[0, optim.lr=0.0003]"]),
    *[
        ({path: low - 1}, 1, [f"{path}={low - 1}", f"at least {low}"])
        for path, low in LOWEST.items()
    ],
    *[({path: math.nan}, 1, [f"{path}=nan", "at least"]) for path in ("optim.lr", *BELOW_ONE)],
    *[({path: 1.0}, 1, [f"{path}=1.0", "below 1"]) for path in BELOW_ONE],
    *[({path: -0.5}, 1, [f"{path}=-0.5", "at least 0"]) for path in BELOW_ONE],
]


@pytest.mark.parametrize(("settings", "num_devices", "fragments"), BAD, ids=str)
def test_bad_settings_name_values_and_remedy(settings, num_devices, fragments):
    with pytest.raises(ValueError) as error:
        validate(config_with(settings), num_devices)
    missing = [fragment for fragment in fragments if fragment not in str(error.value)]
    assert not missing, str(error.value)


def test_every_broken_rule_is_listed_at_once():
    settings = {"model.num_kv_heads": 3, "train.num_steps": 0, "train.global_batch_size": 7}
    with pytest.raises(ValueError) as error:
        validate(config_with(settings), 2)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    for path in settings:
        assert any(f"{path}={settings[path]}" in line for line in lines), path


def test_an_axis_to_come_says_what_is_there():
    with pytest.raises(
        NotImplementedError, match="available are pipe, data, fsdp, expert and tensor"
    ) as error:
        validate(config_with({"parallel.context": 2}), 8)
    assert "parallel.context=2" in str(error.value)


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_the_default_config_is_valid(num_devices):
    validate(Config(), num_devices)


MESHES = [
    ({}, 1),
    ({}, 8),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 8),
    ({"tensor": 4}, 64),
    ({"data": 16, "tensor": 4}, 128),
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_named_architectures_are_valid_where_their_heads_divide(name):
    for parallel, num_devices in MESHES:
        config = use_architecture(Config(), name)
        config.train.global_batch_size = 128
        config.parallel = ParallelConfig(**parallel)
        model, tensor = config.model, config.parallel.tensor
        assert config.data.sequence_length == min(model.max_position, LONGEST_SAMPLE)
        if model.num_heads % tensor or model.kv_heads % tensor:
            with pytest.raises(ValueError, match=rf"heads=\d+ is not .* parallel.tensor={tensor}:"):
                validate(config, num_devices)
        else:
            validate(config, num_devices)


def test_an_unknown_architecture_names_those_there_are():
    with pytest.raises(ValueError, match=r"'gpt5'.*gpt2-124m.*llama3-8b"):
        architecture("gpt5")


POWERS = st.sampled_from([1, 2, 3, 4, 8])
ALONE = {"context": st.just(1)}  # experts lie along it first: see below


@given(sizes=st.fixed_dictionaries(dict.fromkeys(AXES, POWERS) | ALONE), rest=st.booleans())
def test_a_mesh_makes_exactly_its_devices(sizes, rest):
    count = math.prod(sizes.values())
    given_sizes = {**sizes, "fsdp": 0} if rest else sizes
    assert axis_sizes(ParallelConfig(**given_sizes), count) == sizes
    assert list(axis_sizes(ParallelConfig(**given_sizes), count)) == list(AXES)


@given(
    sizes=st.fixed_dictionaries(
        {axis: st.integers(0 if axis == "fsdp" else 1, 6) for axis in AXES} | ALONE
    ),
    count=st.integers(1, 64),
)
def test_a_mesh_fits_or_says_why(sizes, count):
    others = math.prod(size for axis, size in sizes.items() if axis != "fsdp")
    fits = count % others == 0 and sizes["fsdp"] in (0, count // others)
    if fits:
        assert math.prod(axis_sizes(ParallelConfig(**sizes), count).values()) == count
    else:
        with pytest.raises(ValueError, match=rf"does not make {count} devices"):
            axis_sizes(ParallelConfig(**sizes), count)


@pytest.mark.parametrize(
    ("sizes", "expert_axis", "fold"),
    [
        ({"tensor": 4, "expert": 8}, 8, 1),
        ({"tensor": 4, "expert": 8, "expert_tensor": 4}, 8, 1),
        ({"tensor": 4, "expert": 8, "expert_tensor": 2}, 4, 2),
        ({"tensor": 4, "expert": 8, "expert_tensor": 1}, 2, 4),
        ({"tensor": 2, "context": 2, "expert": 4, "expert_tensor": 1}, 1, 2),
        ({"tensor": 2, "context": 2, "expert": 4}, 2, 1),
        ({"expert": 4, "expert_tensor": 1}, 4, 1),
    ],
)
def test_experts_lie_along_tensor_and_context_first(sizes, expert_axis, fold):
    parallel = ParallelConfig(**sizes, fsdp=2)
    assert parallel.fold == fold and parallel.expert_axis == expert_axis
    others = parallel.tensor * parallel.context * 2
    assert parallel.devices == others * expert_axis
    assert axis_sizes(parallel, parallel.devices)["expert"] == expert_axis


@given(st.integers(1, 500), st.integers(0, 40))
def test_divisors_divide(number, at_most):
    found = [int(text) for text in divisors(number, at_most).split(", ")]
    highest = at_most or number
    assert found == [d for d in range(1, number + 1) if number % d == 0 and d <= highest]


# model.vocab_size, model.max_position -> after resolve with a tokenizer of 300, length 256
RESOLVED = {(0, 0): (300, 256), (512, 0): (512, 256), (0, 64): (300, 64), (300, 1024): (300, 1024)}


@pytest.mark.parametrize(("before", "after"), RESOLVED.items(), ids=str)
def test_resolve_fills_in_only_what_is_open(before, after):
    config = config_with({"model.vocab_size": before[0], "model.max_position": before[1]})
    for _ in range(2):  # a resolved config, saved and run again, stays as it is
        resolve(config, tokenizer_vocab_size=300)
        assert (config.model.vocab_size, config.model.max_position) == after


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    config = config_with({"model.vocab_size": 256})
    with pytest.raises(
        ValueError, match="vocab_size=256 is smaller than the tokenizer's 300: raise"
    ):
        resolve(config, tokenizer_vocab_size=300)


def test_the_padded_vocabulary_divides_for_every_tensor_size():
    for vocab_size, tensor in itertools.product((1, 127, 128, 50257, 128256), (1, 2, 3, 8)):
        config = config_with({"model.vocab_size": vocab_size})
        padded = config.model.padded_vocab_size(tensor)
        assert padded % (128 * tensor) == 0 and 0 <= padded - vocab_size < 128 * tensor
    assert architecture("gpt2-124m").padded_vocab_size(1) == 50304  # Megatron-LM's number


def test_backends_that_a_config_can_name_are_those_of_the_ops():
    assert {b.value for b in AttentionBackend} == {"auto", *attention.BACKENDS}
    assert {b.value for b in LossBackend} == {"auto", *cross_entropy.BACKENDS}
