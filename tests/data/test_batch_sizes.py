"""Batch sizes against Megatron-LM's rule, against a step-by-step walk, and across a resume."""

import json

import pytest

from maxmeg.config.data import DataOrder
from maxmeg.config.schema import Config
from maxmeg.data.batch_sizes import BatchSizes, Origin

RAMPUPS = [
    ((16, 8, 300000), 1024),
    ((1, 1, 10), 7),
    ((3, 2, 1), 9),
    ((4, 4, 1000), 4),
    ((2, 7, 333), 163),
    ((5, 5, 9999), 500),
]


def run(**settings):
    config = Config()
    for path, value in settings.items():
        section, name = path.split("__")
        setattr(getattr(config, section), name, value)
    return config


def rampup_size(consumed, rampup, final):
    """Megatron-LM's rule, evaluated sample by sample."""
    start, increment, samples = rampup
    if start == final or consumed > samples:
        return final
    each = samples / ((final - start) // increment)
    return start + int(consumed / each) * increment


@pytest.mark.parametrize(("rampup", "final"), RAMPUPS)
def test_rampup_equals_a_walk(rampup, final):
    sizes = BatchSizes(run(train__batch_rampup=rampup, train__global_batch_size=final))
    consumed, step = 0, 0
    while consumed <= rampup[2] + 3 * final:
        assert sizes.consumed_samples(step) == consumed
        assert sizes.batch_size(step) == rampup_size(consumed, rampup, final)
        assert sizes.step_at(consumed) == step
        consumed, step = consumed + sizes.batch_size(step), step + 1
    assert sizes.batch_sizes[-1] == final
    assert sizes.consumed_samples(step + 10**9) == consumed + final * 10**9


def test_schedule_by_tokens():
    text = "0:768 250B:1536 500B:3072 750B:6144"
    config = run(
        train__batch_schedule=text, train__global_batch_size=6144, data__sequence_length=4096
    )
    sizes = BatchSizes(config)
    switches = [61_035_156, 122_070_312, 183_105_468]
    for size, following, samples in zip(
        (768, 1536, 3072), (1536, 3072, 6144), switches, strict=True
    ):
        step = sizes.step_at(samples)
        assert sizes.batch_size(step - 1) == size
        assert sizes.batch_size(step) == following
        assert sizes.consumed_samples(step - 1) < samples <= sizes.consumed_samples(step)


def test_schedule_may_skip_an_entry_that_one_batch_passes():
    config = run(
        train__batch_schedule="0:10 1K:20 1.1K:5", train__global_batch_size=5,
        data__sequence_length=100,
    )  # fmt: skip
    assert BatchSizes(config).batch_sizes == (10, 20, 5)
    config.train.batch_schedule = "0:12 1K:20 1.1K:5"  # thresholds 10 and 11 samples
    assert BatchSizes(config).batch_sizes == (12, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train__batch_rampup": (1, 2)}, "three numbers"),
        ({"train__batch_rampup": (1, 2, 100)}, "32 - 1 is not divisible by 2"),
        ({"train__batch_rampup": (64, 2, 100)}, "start at most train.global_batch_size=32"),
        ({"train__batch_schedule": "0:x"}, "'0:x' is not TOKENS:BATCH_SIZE"),
        ({"train__batch_schedule": "5:32"}, "begin at 0"),
        ({"train__batch_schedule": "0:8 1M:16 1M:32"}, "grow"),
        ({"train__batch_schedule": "0:16"}, "set it to 16"),
        ({"train__batch_schedule": "0:32", "train__batch_rampup": (8, 8, 9)}, "one of the two"),
        ({"train__global_batch_size": 0}, "at least 1"),
        ({"train__global_batch_size": 30}, "choose 28 or 32"),
    ],
)
def test_contradictions_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        BatchSizes(run(**settings), batch_multiple=4)


def resumed(config, step, before):
    """Those of a run that resumes the checkpoint which a run with `before` saved at `step`."""
    metadata = json.loads(json.dumps(before.progress(step)))
    return BatchSizes(config, 1, Origin.of_checkpoint(step, metadata))


def test_a_ramp_up_and_a_schedule_by_tokens_continue_from_the_consumed_samples():
    before = BatchSizes(run(train__global_batch_size=8))
    ramp = run(train__batch_rampup=(8, 8, 900), train__global_batch_size=32)
    after = resumed(ramp, 50, before)
    step, consumed = 50, 400
    while consumed < 1500:
        assert after.extent(step) == (consumed, rampup_size(consumed, (8, 8, 900), 32))
        step, consumed = step + 1, consumed + after.batch_size(step)
    tokens = run(train__batch_schedule="0:8 90K:16 200K:32", data__sequence_length=256)
    after = resumed(tokens, 50, before)  # 351 and 781 samples
    assert [after.extent(step) for step in (49, 50, 74)] == [(392, 8), (400, 16), (784, 32)]


def test_validation_continues_where_other_settings_left_it():
    config = run(train__eval_every=10, train__eval_steps=2)
    first = BatchSizes(config)
    assert [first.evaluation_start(step) for step in (9, 19, 25)] == [0, 64, 128]
    config.train.eval_every, config.train.eval_steps = 25, 5
    second = resumed(config, 30, first)  # three validations of 64 samples, after steps 9, 19, 29
    assert [second.evaluation_start(step) for step in (49, 74)] == [192, 352]
    config.data.order = DataOrder.native
    assert resumed(config, 30, first).evaluation_start(74) == 0


def test_a_checkpoint_without_its_batch_sizes_had_equal_ones():
    origin = Origin.of_checkpoint(50, {"consumed_samples": 405})
    after = BatchSizes(run(train__global_batch_size=8), 1, origin)
    assert [after.consumed_samples(step) for step in (10, 50, 51)] == [80, 405, 413]
