"""The loop of a run, with a device that only notes what it is asked."""

import contextlib
import json
import types

import numpy as np

from maxmeg import train
from maxmeg.config.schema import Config
from maxmeg.optim.schedules import Schedules

STEPS = 5


class Later:
    """A number on the device: reading it waits for its step."""

    def __init__(self, events: list, step: int) -> None:
        self._events, self._step = events, step

    def __float__(self) -> float:
        if ("wait for", self._step) not in self._events:
            self._events.append(("wait for", self._step))
        return 1.0


class Batches(contextlib.AbstractContextManager):
    waited = 0.0

    def __iter__(self):
        for step in range(STEPS):
            self.waited = step / 8
            yield step, {"tokens": np.zeros(1)}

    def __exit__(self, *error) -> None:
        return None


def test_the_next_batch_is_on_its_way_while_a_step_runs(tmp_path):
    """It is placed when the step has been dispatched, before anything waits for that step."""
    config, events = Config(run_dir=str(tmp_path)), []
    config.model.vocab_size, config.log.tensorboard = 64, False
    config.train.num_steps, config.train.eval_every, config.checkpoint.save_every = STEPS, 0, 0

    def place(step, batch):
        events.append(("place", step))
        return batch

    def train_step(state, batch, controls):
        events.append(("step", state))
        return state + 1, {"loss": Later(events, state), "grad_norm": Later(events, state)}

    run = types.SimpleNamespace(
        config=config,
        schedules=Schedules(config),
        checkpointer=types.SimpleNamespace(close=lambda: None),
        batches=lambda start: Batches(),
        controls=lambda step, stop: {},
        place=place,
        train_step=train_step,
        validation={},
        save=lambda state: events.append(("save", state)),
    )
    assert train.train(run, 0, 0) == STEPS
    at = {event: number for number, event in enumerate(events)}
    for step in range(STEPS - 1):
        assert at["step", step] < at["place", step + 1] < at["wait for", step]
        assert at["step", step + 1] < at["wait for", step]
    assert events[-1] == ("save", STEPS) and events[-2] == ("wait for", STEPS - 1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["data_wait_seconds"] for line in lines] == [step / 8 for step in range(STEPS)]
