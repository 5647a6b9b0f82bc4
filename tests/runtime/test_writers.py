"""metrics.jsonl, event files, Weights & Biases and the picture of the loss."""

import json
import logging
import math
import sys
import types

import pytest

from maxmeg.runtime.metrics import plots
from maxmeg.runtime.metrics.names import grouped
from maxmeg.runtime.metrics.plots import LossPlot, plot_loss, validation_words
from maxmeg.runtime.metrics.writers import JsonlWriter, TensorBoardWriter, WandbWriter, writer_hook


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, steps, start_step=0, value=0.0):
    writer = JsonlWriter(path, start_step)
    for step in steps:
        writer(step, {"loss": value + step})
    writer.close()


@pytest.mark.parametrize("resume", [0, 1, 6, 10, 15])
def test_each_step_once_after_a_resume(tmp_path, resume):
    path = tmp_path / "run" / "metrics.jsonl"
    write(path, range(1, 11))
    write(path, range(resume + 1, 13), resume, value=100.0)
    expected = {step: step + (100.0 if step > resume else 0.0) for step in range(1, 13)}
    if resume > 10:
        expected = {step: float(step) for step in range(1, 11)}
    assert {row["step"]: row["loss"] for row in rows(path)} == expected
    assert len(rows(path)) == len(expected)
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_line_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    with open(path, "a") as file:
        file.write('{"step": 1')
    write(path, [6], start_step=5)
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 6]


def test_numbers_stay_exact_and_json_valid(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer(1, {"loss": 0.1 + 0.2, "grad_norm": math.inf})
    (row,) = rows(path)  # before close
    assert row.pop("time") > 1e9
    assert row == {"step": 1, "loss": 0.1 + 0.2, "grad_norm": None}
    writer.close()


def test_the_commit_is_written_once_a_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for start, commit in ((0, "abc"), (2, "def-dirty"), (4, "")):
        writer = JsonlWriter(path, start, {"commit": commit})
        for step in (start + 1, start + 2):
            writer(step, {})
        writer.close()
    assert [row.get("commit") for row in rows(path)] == ["abc", None, "def-dirty", None, None, None]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("learning_rate", "optim/lr"),
        ("validation_loss", "val/loss"),
        ("validation_loss_per_byte/web", "val/loss_per_byte/web"),
        ("peak_memory_gib", "memory/peak_gib"),
        ("load_balancing_loss", "moe/load_balancing_loss"),
    ],
)
def test_names_have_groups(name, shown):
    assert grouped(name) == shown


def test_training_goes_on_when_the_disk_is_full(tmp_path, caplog):
    class Full:
        calls = 0

        def __call__(self, step, metrics):
            Full.calls += 1
            raise OSError(28, "No space left on device")

        def close(self):
            raise OSError(28, "No space left on device")

    hook = writer_hook(Full())
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            hook.call(step, {})
        hook.close()
    assert Full.calls == 1
    assert "Full stops at step 0, training goes on: [Errno 28]" in caplog.text


def test_event_files_are_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    first = TensorBoardWriter(folder)
    assert not folder.exists()  # before the first step
    for step in range(1, 7):
        first(step, {"loss": float(step)})
    first.close()
    resumed = TensorBoardWriter(folder, start_step=4)
    for step in range(5, 9):
        resumed(step, {"loss": 100.0 + step, "learning_rate": 1e-3})
    resumed.close()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 105.0), (6, 106.0), (7, 107.0), (8, 108.0),
    ]  # fmt: skip
    assert len(events.Scalars("optim/lr")) == 4


def test_wandb_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'maxmeg\[wandb\]'"):
        WandbWriter("project", tmp_path, {})


def test_wandb_continues_the_run_of_its_folder(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    def init(**settings):
        calls.append(settings)
        return Run()

    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: fake)
    for _ in range(2):
        writer = WandbWriter("project", tmp_path / "run", {"seed": 1})
        writer(3, {"loss": 1.0})
        writer.close()
    assert calls[1:3] == [(3, {"train/loss": 1.0}), "finish"]
    assert calls[0]["id"] == calls[3]["id"] and calls[0]["resume"] == "allow"
    assert calls[0]["project"] == "project" and calls[0]["config"] == {"seed": 1}


def test_a_curve_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    write(tmp_path / "metrics.jsonl", range(1, 4))
    monkeypatch.setattr(plots, "write_atomically", full)
    shown = plots.write_plots(str(tmp_path))
    assert shown == {"loss curve": "not drawn: [Errno 28] No space left on device"}


def test_the_curve_is_drawn_at_validations_and_the_last_one_is_told(tmp_path):
    curve, writer, seen = LossPlot(str(tmp_path)), JsonlWriter(tmp_path / "metrics.jsonl"), []
    validation = {"validation_loss": 2.0, "validation_loss_per_byte": 0.5}
    for step, metrics in enumerate(({"loss": math.nan}, {"loss": 3.0}, {"loss": 2.5}), 1):
        metrics |= validation if step != 2 else {}
        writer(step, metrics)
        curve(step, metrics)
        seen.append((tmp_path / "loss.png").exists())
    writer.close()
    assert seen == [False, False, True]  # nothing to draw; no validation; drawn
    image = (tmp_path / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "again.png", tmp_path.name)
    assert (tmp_path / "again.png").read_bytes() == image
    words = "validation loss: 2.0000 at step 3 (0.5000 nats per byte, 0.721 bits)"
    assert validation_words(str(tmp_path)) == words


def test_plot_of_nothing_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    with pytest.raises(ValueError, match="holds no loss"):
        plot_loss(path, tmp_path / "loss.png")
