"""Which weights a model may begin with."""

import dataclasses

import pytest

from maxmeg.config.initial import changes
from maxmeg.config.model import DType, ModelConfig, Position
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.setting import with_fields

LEARNED, MTP = {"position": Position.learned}, {"mtp.num_layers": 1}
SAVED = ModelConfig(vocab_size=100, max_position=64)


@pytest.mark.parametrize("position", Position)
def test_changes_of_a_model_are_listed(position):
    saved = dataclasses.replace(SAVED, position=position)
    assert changes(saved, dataclasses.replace(saved, dtype=DType.float32, init_std=1.0), "m") == []
    wanted = with_fields(saved, {"vocab_size": 130, "rotary.scaling": RotaryScaling.yarn})
    assert changes(saved, wanted, "m") == ["vocab_size 100 -> 130", "rotary.scaling none -> yarn"]
    saved = with_fields(saved, {"layers": "*(attention,moe)", "moe.num_experts": 4})
    wanted = with_fields(saved, {"moe.capacity_factor": 1.25, "moe.pad_to_capacity": True})
    assert changes(saved, wanted, "m") == ["moe.capacity_factor 0.0 -> 1.25"]


def test_mtp_layers_can_be_added_and_removed():
    saved = with_fields(SAVED, {"mtp.num_layers": 2, "mtp.loss_weight": 0.3})
    for number in (3, 1):
        wanted = with_fields(saved, {"mtp.num_layers": number})
        assert changes(saved, wanted, "m") == [f"mtp.num_layers 2 -> {number}"]
    assert changes(saved, saved.without_mtp(), "m") == ["mtp.num_layers 2 -> 0"]


@pytest.mark.parametrize(
    ("saved", "wanted", "parts"),
    [
        ({}, {"num_layers": 5, "tied": True}, ["num_layers 4 -> 5, tied False -> True"]),
        ({}, {"norm_eps": 1e-6}, ["init_from=runs/m", "norm_eps 1e-05 -> 1e-06", "finetune:"]),
        ({}, {"vocab_size": 99}, ["vocab_size=99 is less than the 100", "added"]),
        (LEARNED, LEARNED | {"max_position": 128}, ["max_position 64 -> 128"]),
        (MTP, MTP | {"layers": "*(attention,moe)"}, ["set model.mtp.num_layers=0"]),
    ],
)
def test_another_model_is_refused(saved, wanted, parts):
    with pytest.raises(ValueError) as error:
        changes(with_fields(SAVED, saved), with_fields(SAVED, wanted), "runs/m")
    assert all(part in str(error.value) for part in parts), str(error.value)
