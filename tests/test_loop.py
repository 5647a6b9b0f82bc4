"""The loop of a run, with a device that only notes what it is asked."""

import contextlib
import signal
import types

import jax
import numpy as np
import pytest
from hf_folders import write_tokenizer
from short_runs import curve

from maxmeg import train
from maxmeg.checkpoint.resume import Start
from maxmeg.config import files
from maxmeg.config.schema import Config
from maxmeg.data.placement import LocalRows
from maxmeg.evals.perplexity import StopRequested, mean_loss
from maxmeg.optim.schedules import Schedules
from maxmeg.parallel.mesh import MESH_AXES
from maxmeg.processes import multihost
from maxmeg.runtime.faults.signals import Interrupt
from maxmeg.runtime.faults.watchdog import Watchdog
from maxmeg.runtime.metrics import memory

STEPS = 5


class Later:
    """A number on the device: reading it waits for its step."""

    def __init__(self, events: list, step: int) -> None:
        self._events, self._step = events, step

    def __float__(self) -> float:
        if ("wait for", self._step) not in self._events:
            self._events.append(("wait for", self._step))
        return 1.0


class State(int):
    """The number of steps made."""

    model = None


class Batches(contextlib.AbstractContextManager):
    waited = 0.0

    def __iter__(self):
        for step in range(STEPS):
            self.waited = step / 8
            yield step, {"tokens": np.zeros(1)}

    def __exit__(self, *error) -> None:
        return None


def run_of(tmp_path, events: list, metrics=lambda step: {}, **settings) -> types.SimpleNamespace:
    """A run of STEPS steps whose device appends to `events`; metrics(step): more of a step."""
    config = Config(run_dir=str(tmp_path))
    config.model.vocab_size, config.log.tensorboard = 64, False
    config.train.num_steps, config.train.eval_every, config.checkpoint.save_every = STEPS, 0, 0
    for name, value in settings.items():
        section = config.checkpoint if name == "save_every" else config.train
        setattr(section, name, value)

    def place(step, batch):
        events.append(("place", step))
        return batch

    def train_step(state, batch, controls):
        events.append(("step", state))
        numbers = {"loss": Later(events, state), "grad_norm": Later(events, state)}
        return State(state + 1), numbers | metrics(state)

    def validate(model, step, losses, interrupt):
        events.append(("validate", step))
        losses["validation_loss"] = 1.0
        return not interrupt.requested

    return types.SimpleNamespace(
        config=config,
        watchdog=Watchdog(config),
        schedules=Schedules(config),
        checkpointer=types.SimpleNamespace(wait=lambda: True),
        batches=lambda start: Batches(),
        controls=lambda step, stop, state: {},
        place=place,
        program=types.SimpleNamespace(train_step=train_step),
        validation={"": None},
        validate=validate,
        save=lambda state, stopping=False: events.append(("save", state)),
    )


def test_the_next_batch_is_on_its_way_while_a_step_runs(tmp_path):
    """It is placed when the step has been dispatched, before anything waits for that step."""
    events: list = []
    assert trained(run_of(tmp_path, events)) == STEPS
    at = {event: number for number, event in enumerate(events)}
    for step in range(STEPS - 1):
        assert at["step", step] < at["place", step + 1] < at["wait for", step]
        assert at["step", step + 1] < at["wait for", step]
    assert events[-1] == ("save", STEPS) and events[-2] == ("wait for", STEPS - 1)
    lines = curve(tmp_path)
    assert [line["data_wait_seconds"] for line in lines] == [step / 8 for step in range(STEPS)]


def trained(run):
    with Interrupt(run.config.train.exit_after_minutes) as interrupt:
        assert interrupt.requested or interrupt.lets_train()
        return train.train(run, 0, 0, interrupt)


def kill_at(step: int):
    """Metrics, with a real SIGTERM to this process while step `step` is dispatched."""
    return lambda now: signal.raise_signal(signal.SIGTERM) or {} if now == step else {}


def acts(events: list) -> list:
    return [event for event in events if event[0] in ("validate", "save")]


@pytest.mark.parametrize(
    ("metrics", "settings", "expected"),
    [
        (kill_at(2), {"eval_every": 3}, [("save", 3)]),  # its own signal: at once
        (lambda step: {"stop": float(step == 2)}, {"eval_every": 4}, [("save", 4)]),
        (kill_at(9), {"exit_at": 2, "eval_every": 2}, [("save", 2)]),
        (kill_at(9), {"exit_after_minutes": 1e-9, "eval_every": 1}, [("save", 1)]),
        (kill_at(9), {"eval_every": 3}, [("validate", 2), ("validate", 4), ("save", 5)]),
    ],
    ids=["signal", "agreed", "exit_at", "exit_after_minutes", "not stopped"],
)
def test_a_stop_saves_and_never_validates(tmp_path, metrics, settings, expected):
    events: list = []
    trained(run_of(tmp_path, events, metrics, **settings))
    assert acts(events) == expected


def test_a_stop_during_validation_saves_at_once(tmp_path):
    events: list = []
    run = run_of(tmp_path, events, eval_every=2)
    validate = run.validate
    run.validate = lambda *given: signal.raise_signal(signal.SIGTERM) or validate(*given)
    trained(run)
    assert acts(events) == [("validate", 1), ("save", 2)]


def test_evaluation_ends_where_a_flag_is_set():
    seen: list[int] = []

    def eval_step(model, batch, stop):
        seen.append(stop)
        return {"tokens": 1.0, "loss_sum": 2.0, "stop": stop}

    flags = iter([0, 0, 1, 1, 1])
    with pytest.raises(StopRequested):
        mean_of_five(eval_step, lambda: next(flags))
    assert seen == [0, 0, 1, 1]  # known when the next batch has been dispatched


def mean_of_five(eval_step, stop):
    """The mean loss over five batches."""
    rows = LocalRows(shards=1, owned=(0,), micro_batch_size=0)
    mesh = jax.make_mesh((1,) * 7, MESH_AXES, devices=jax.devices()[:1])
    names = ("tokens", "targets", "positions", "loss_mask")
    batches = [dict.fromkeys(names, np.zeros((1, 4), np.int32))] * 5
    return mean_loss(eval_step, None, batches, mesh, 1, rows, stop)


def test_a_mean_loss_is_divided_by_weights_below_1():
    sums = iter([{"tokens": 1e-3, "loss_sum": 2e-3}, *[{"tokens": 0, "loss_sum": 0}] * 4])
    assert mean_of_five(lambda *_: next(sums), lambda: None).per_token == pytest.approx(2)
    assert mean_of_five(lambda *_: {"tokens": 0, "loss_sum": 0}, lambda: None).per_token == 0


def test_saves_wait_for_a_step_that_was_not_skipped(tmp_path):
    events: list = []
    skipped = {1: 1.0, 2: 1.0}
    metrics = lambda step: {"skipped": skipped.get(step, 0.0)}  # noqa: E731
    trained(run_of(tmp_path, events, metrics, save_every=2))
    assert acts(events) == [("save", 4), ("save", 5)]


def test_the_run_folder_is_complete_once_a_step_is_made(tmp_path, monkeypatch):
    """It then holds config.yaml, the tokenizer, and the peak memory of every step."""
    source, folder = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    write_tokenizer(source)
    monkeypatch.setattr(memory, "_statistics", lambda _: [{"peak_bytes_in_use": 3 * memory.GIB}])
    run = run_of(folder, [])
    run.config.data.tokenizer = f"huggingface:{source}"
    train_step = run.program.train_step

    def fails(state, batch, controls):
        raise RuntimeError("out of memory")

    run.program.train_step = fails
    with pytest.raises(RuntimeError):
        trained(run)
    assert not (folder / "config.yaml").exists()
    run.program.train_step = train_step
    trained(run)
    assert (folder / "config.yaml").exists() and (folder / "tokenizer/tokenizer.json").exists()
    lines = curve(folder)
    assert [line["peak_memory_gib"] for line in lines] == [3.0] * STEPS


def test_a_row_is_a_finished_step_with_the_seconds_of_validation_and_saving(tmp_path):
    """Validation stands in the row of its step, before the save that has its number."""
    events: list = []
    run = run_of(tmp_path, events, eval_every=2, save_every=2)
    saved, rows = [], tmp_path / "metrics.jsonl"
    run.save = lambda state, stopping=False: saved.append((state, rows.read_text().count("\n")))
    trained(run)
    lines = curve(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert saved == [(2, 2), (4, 4), (5, 5)]
    assert [n for n, line in enumerate(lines, 1) if "validation_loss" in line] == [2, 4, 5]
    assert all(("eval_seconds" in line) == ("validation_loss" in line) for line in lines)
    assert [n for n, line in enumerate(lines, 1) if "save_seconds" in line] == [3, 5]
    length = run.config.data.sequence_length
    assert all(line["consumed_tokens"] == length * line["consumed_samples"] for line in lines)


@pytest.mark.parametrize("rank", [0, 1])
def test_process_0_alone_prints_what_is_resumed(tmp_path, monkeypatch, capsys, rank):
    config = run_of(tmp_path, []).config
    begun = Start(STEPS, None, {"consumed_samples": 9, "config": files.to_dict(config)}, {})
    monkeypatch.setattr(multihost.jax, "process_index", lambda: rank)
    train.announce(types.SimpleNamespace(config=config), begun)
    out = capsys.readouterr().out
    shown = ["resumed at step 5, sample 9" in out, "already finished" in out, bool(out)]
    assert shown == [rank == 0] * 3
