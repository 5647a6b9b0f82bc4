"""Schedules against Megatron-LM's numbers, against a step-by-step walk, and across a resume."""

import json

import pytest

from maxmeg.config import files
from maxmeg.config.flags import parse
from maxmeg.config.schema import Config, LrDecay, OptimConfig, WeightDecayRamp, WsdDecay
from maxmeg.data.batch_sizes import Origin
from maxmeg.optim.schedules import Schedules, learning_rate_at, weight_decay_at

REL = 1e-9


def run(**settings):
    config = Config()
    for path, value in settings.items():
        section, name = path.split("__")
        setattr(getattr(config, section), name, value)
    return config


def optim(**settings):
    return OptimConfig(**({"lr": 6e-4, "min_lr": 6e-5} | settings))


@pytest.mark.parametrize(
    ("name", "steps", "warmup"),
    [("gpt", 800, 40), ("gpt2-124m", 100_000, 2000), ("finetune:{folder}", 100, 10)],
)
def test_warm_up_of_the_configs_shrinks_with_the_run(name, steps, warmup, tmp_path):
    """A smoke run of 1 step works with each; a run of the usual length has the usual warm-up."""
    files.save(run(model__max_position=64), tmp_path / "config.yaml")
    named = name.format(folder=tmp_path)

    def schedules(*flags):
        config, _ = parse(["train", f"--config={named}", *flags])
        return Schedules(config)

    whole = schedules()
    assert whole.num_steps == steps
    assert whole.step_at(whole.warmup_samples) == warmup
    for num_steps in (1, 2, 10):
        short = schedules(f"--train.num_steps={num_steps}")
        assert 0 <= short.warmup_samples < short.decay_samples
    chosen = schedules("--optim.warmup_steps=3")
    assert chosen.step_at(chosen.warmup_samples) == 3


@pytest.mark.parametrize(
    ("settings", "samples", "wsd", "expected"),
    [
        ({"decay": LrDecay.linear}, 300, 0, 4.8e-4),
        ({"decay": LrDecay.cosine}, 300, 0, 5.368319996e-4),
        ({"decay": LrDecay.inverse_square_root}, 300, 0, 3.464101615e-4),
        ({"decay": LrDecay.wsd}, 900, 200, 2.836753237e-4),
        ({"decay": LrDecay.wsd, "wsd_decay": WsdDecay.minus_sqrt}, 900, 200, 2.181623382e-4),
        ({"decay": LrDecay.wsd, "wsd_decay": WsdDecay.linear}, 900, 200, 3.3e-4),
        ({"decay": LrDecay.wsd, "wsd_decay": WsdDecay.cosine}, 900, 200, 3.3e-4),
        ({"decay": LrDecay.wsd}, 800, 200, 6e-4),
        ({"decay": LrDecay.constant}, 5000, 0, 6e-4),
        ({"decay": LrDecay.linear}, 1001, 0, 6e-5),
        ({"decay": LrDecay.inverse_square_root}, 1001, 0, 6e-5),
        ({"decay": LrDecay.cosine}, 50, 0, 3e-4),
        ({"decay": LrDecay.cosine, "warmup_init_lr": 2e-4}, 50, 0, 4e-4),
        ({"decay": LrDecay.cosine, "warmup_init_lr": 2e-4}, 0, 0, 2e-4),
    ],
)
def test_learning_rate_equals_megatron(settings, samples, wsd, expected):
    rate = learning_rate_at(samples, optim(**settings), warmup=100, decay=1000, wsd=wsd)
    assert rate == pytest.approx(expected, rel=REL)


@pytest.mark.parametrize("decay", LrDecay)
@pytest.mark.parametrize("shape", WsdDecay)
def test_every_shape_rises_falls_and_stays_between_floor_and_peak(decay, shape):
    settings = optim(decay=decay, wsd_decay=shape)
    rates = [
        learning_rate_at(s, settings, warmup=100, decay=1000, wsd=200) for s in range(0, 1200, 7)
    ]
    warm, rest = rates[:15], rates[15:]
    assert warm == sorted(warm) and rest == sorted(rest, reverse=True)
    assert rates[0] == 0 and all(6e-5 <= rate <= 6e-4 for rate in rest)
    assert rest[-1] == (6e-4 if decay is LrDecay.constant else 6e-5)


def test_weight_decay_follows_its_ramp():
    def at(samples, ramp):
        settings = optim(weight_decay=0.1, weight_decay_end=0.3, weight_decay_ramp=ramp)
        return weight_decay_at(samples, settings, 1000)

    assert at(250, WeightDecayRamp.constant) == 0.1
    assert at(250, WeightDecayRamp.linear) == pytest.approx(0.15, rel=REL)
    assert at(250, WeightDecayRamp.cosine) == pytest.approx(0.1292893219, rel=REL)
    assert at(1000, WeightDecayRamp.cosine) == pytest.approx(0.3, rel=REL)
    assert at(1001, WeightDecayRamp.linear) == 0.3


def test_steps_are_their_samples():
    schedules = Schedules(
        run(train__num_steps=100, train__global_batch_size=8, optim__warmup_steps=10)
    )
    assert (schedules.warmup_samples, schedules.decay_samples) == (80, 800)
    assert schedules.learning_rate(0) == 0
    assert schedules.learning_rate(5) == pytest.approx(1.5e-4, rel=REL)
    assert schedules.learning_rate(10) == pytest.approx(3e-4, rel=REL)
    assert schedules.learning_rate(100) == 0


def test_wsd_falls_over_its_last_steps():
    schedules = Schedules(
        run(optim__decay=LrDecay.wsd, optim__wsd_decay_steps=20, optim__wsd_decay=WsdDecay.linear)
    )
    assert schedules.learning_rate(80) == 3e-4
    assert schedules.learning_rate(90) == pytest.approx(1.5e-4, rel=REL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim__warmup_steps": 100}, r"optim.warmup_steps=100 >= train.num_steps=100: warm-up"),
        (
            {"optim__warmup_samples": 999, "optim__decay_steps": 20},
            r"warmup_samples=999 >= optim.decay_steps=20 \(999 >= 640 samples\)",
        ),
        (
            {
                "optim__decay": LrDecay.wsd,
                "optim__wsd_decay_steps": 60,
                "optim__warmup_steps": 50,
            },
            "only 1600 lie between",
        ),
    ],
)
def test_contradictions_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Schedules(run(**settings), batch_multiple=4)


def resumed(config, step, before):
    """Schedules of a run that resumes the checkpoint which a run with `before` saved at `step`."""
    metadata = json.loads(json.dumps(before.progress(step)))
    return Schedules(config, 1, Origin.of_checkpoint(step, metadata))


@pytest.mark.parametrize(
    "settings",
    [
        {"optim__warmup_steps": 10},
        {"train__batch_rampup": (8, 8, 900), "optim__warmup_steps": 10},
        {"train__batch_schedule": "0:8 100K:24 300K:32", "optim__decay_steps": 80},
    ],
)
def test_a_resume_without_changes_changes_nothing(settings):
    config = run(**settings)
    whole = Schedules(config)
    for first, second in ((1, 2), (9, 10), (37, 64), (50, 99), (100, 100)):
        again = resumed(config, second, resumed(config, first, whole))
        for step in range(110):
            for value in ("batch_size", "consumed_samples", "learning_rate", "weight_decay"):
                assert getattr(again, value)(step) == getattr(whole, value)(step)
            assert again.evaluation_start(step) == whole.evaluation_start(step)
        assert again.progress(99) == whole.progress(99)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_steps_before_a_resume_count_with_the_batch_size_that_they_had(size):
    """100 steps, the first 50 of 8 samples: a warm-up that is over stays where it was."""
    config = run(train__global_batch_size=8, optim__warmup_steps=10, train__eval_every=20)
    config.train.eval_steps = 3
    before = Schedules(config)
    config.train.global_batch_size = size
    after = resumed(config, 50, before)
    assert after.batch_sizes == (size,)
    assert [after.consumed_samples(step) for step in (10, 50, 60)] == [80, 400, 400 + 10 * size]
    assert after.warmup_samples == before.warmup_samples == 80
    assert after.decay_samples == after.total_samples == 400 + 50 * size
    assert after.learning_rate(100) == pytest.approx(config.optim.min_lr)
    assert after.step_at(400 + size) == 51 and after.step_at(400) == 50
    # Validations after steps 19 and 39 read 24 samples each; those to come read 3 x size.
    assert [after.evaluation_start(step) for step in (59, 79)] == [48, 48 + 3 * size]
    config.optim.decay_samples = 800
    moved = resumed(config, 50, before)
    assert moved.learning_rate(50) == before.learning_rate(50)  # lengths in samples never move
