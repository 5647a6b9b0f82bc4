"""Which weights a model may begin with."""

import dataclasses

import pytest

from maxmeg.config.initial import ADAPTED, FREE, changes
from maxmeg.config.model import DType, ModelConfig, Position, RotaryScaling

SAVED = ModelConfig(vocab_size=100, max_position=64)


def test_fields_are_named_once_and_exist():
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields > FREE and fields > ADAPTED and not FREE & ADAPTED


@pytest.mark.parametrize("position", Position)
def test_what_changes_is_told(position):
    saved = dataclasses.replace(SAVED, position=position)
    assert changes(saved, dataclasses.replace(saved, dtype=DType.float32, init_std=1.0), "m") == []
    wanted = dataclasses.replace(saved, vocab_size=130, rotary_scaling=RotaryScaling.yarn)
    assert changes(saved, wanted, "m") == ["vocab_size 100 -> 130", "rotary_scaling none -> yarn"]
    saved = dataclasses.replace(saved, num_experts=4)
    wanted = dataclasses.replace(saved, expert_capacity=1.25, expert_pad=True)
    assert changes(saved, wanted, "m") == ["expert_capacity 0.0 -> 1.25"]


def test_layers_of_further_tokens_come_and_go():
    saved = dataclasses.replace(SAVED, mtp_depths=2, mtp_loss=0.3)
    assert changes(saved, dataclasses.replace(saved, mtp_depths=3), "m") == ["mtp_depths 2 -> 3"]
    assert changes(saved, dataclasses.replace(saved, mtp_depths=1), "m") == ["mtp_depths 2 -> 1"]
    assert changes(saved, saved.without_mtp(), "m") == ["mtp_depths 2 -> 0"]


@pytest.mark.parametrize(
    ("saved", "wanted", "parts"),
    [
        ({}, {"num_layers": 5, "tied": True}, ["num_layers 4 -> 5, tied False -> True"]),
        ({}, {"norm_eps": 1e-6}, ["init_from=runs/m", "norm_eps 1e-05 -> 1e-06", "finetune.py"]),
        ({}, {"vocab_size": 99}, ["vocab_size=99 is less than the 100", "added"]),
        (
            {"position": Position.learned},
            {"position": Position.learned, "max_position": 128},
            ["max_position 64 -> 128"],
        ),
        ({"mtp_depths": 1}, {"mtp_depths": 1, "num_experts": 2}, ["set model.mtp_depths=0"]),
    ],
)
def test_another_model_is_refused(saved, wanted, parts):
    with pytest.raises(ValueError) as error:
        changes(dataclasses.replace(SAVED, **saved), dataclasses.replace(SAVED, **wanted), "runs/m")
    assert all(part in str(error.value) for part in parts), str(error.value)
