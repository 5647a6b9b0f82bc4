"""Hooks, the guard, throughput, profile range and what the console shows."""

import io
import logging
import math

import jax
import pytest

from maxmeg.runtime.faults.guard import FEWEST, Guard, NonFiniteLoss
from maxmeg.runtime.logs import Stderr
from maxmeg.runtime.metrics.hooks import Hook, Hooks
from maxmeg.runtime.metrics.parameter_table import ParameterRow, num_bytes, parameter_table
from maxmeg.runtime.metrics.profile import profile_hook
from maxmeg.runtime.metrics.progress import Progress, duration, quantity
from maxmeg.runtime.metrics.throughput import Throughput


def test_hooks_share_metrics_run_in_order_and_all_close():
    seen = []

    def add(step, metrics):
        metrics["b"] = metrics["a"] + 1

    def fail():
        seen.append("close 2")
        raise RuntimeError("close failed")

    hooks = Hooks(
        [
            Hook(add, before=seen.append, close=lambda: seen.append("close 1")),
            Hook(lambda step, metrics: seen.append(metrics["b"]), close=fail),
        ]
    )
    with pytest.raises(RuntimeError, match="close failed"), hooks:
        hooks.before(1)
        hooks(1, {"a": 1})
    assert seen == [1, 2, "close 2", "close 1"]


GOOD = {"loss": 2.0, "grad_norm": 1.0, "skipped": 0.0}
BAD = {"loss": 1.0, "grad_norm": math.inf, "skipped": 1.0}


def test_guard_stops_after_skipped_steps_in_a_row(caplog):
    guard = Guard(lambda step: range(10 * step, 10 * step + 10), max_skipped=2)
    for step, metrics in enumerate([GOOD, BAD, GOOD, BAD]):
        guard(step, metrics)
    assert [record.args[0] for record in caplog.records] == [1, 3]
    assert "step 1 was skipped: loss=1.0, grad_norm=inf is not finite" in caplog.text
    assert "samples 10, 11" in caplog.text
    with pytest.raises(NonFiniteLoss, match=r"steps 3 to 4 .* 30, 31, .*, 45 and 4 more") as error:
        guard(4, BAD)
    assert error.value.steps == (3, 4)
    assert error.value.samples == (*range(30, 40), *range(40, 50))


def test_overflows_above_the_smallest_loss_scale_are_no_fault(caplog):
    guard = Guard(lambda step: [step], max_skipped=2, minimum_scale=4.0)
    for step in range(9):
        guard(step, BAD | {"loss_scale": 8.0})
    assert not caplog.records
    guard(9, BAD | {"loss_scale": 4.0})
    with pytest.raises(NonFiniteLoss):
        guard(10, BAD | {"loss_scale": 8.0, "loss": math.nan})


@pytest.mark.parametrize(("loss", "told"), [(2.4, False), (2.7, True), (0.0, False)])
def test_guard_reports_spikes(loss, told, caplog):
    guard = Guard(lambda step: [step], max_skipped=1, spike_zscore=6)
    for step in range(FEWEST):
        guard(step, GOOD | {"loss": 2 + 0.1 * (-1) ** step})
    guard(FEWEST, GOOD | {"loss": loss})
    assert bool(caplog.records) == told
    assert not told or "standard deviations above the mean" in caplog.text


def clock_of(times):
    return iter(times).__next__


def test_throughput_counts_only_training_time():
    clock = clock_of([10.0, 12.0, 13.0, 15.0, 17.0])  # two arrivals, a pause of 2 s, an arrival
    throughput = Throughput(lambda step: 1000 + step, lambda step: 4e12, 2, 10.0, clock)
    rows = [{}, {}, {}]
    throughput(0, rows[0])
    throughput(1, rows[1])
    with throughput.paused():
        pass
    throughput(2, rows[2])
    assert rows[0] == {}
    assert rows[1] == {
        "step_seconds": 2.0, "tokens_per_second": 500.5, "tflops_per_device": 1.0, "mfu": 10.0,
    }  # fmt: skip
    assert rows[2]["step_seconds"] == 3.0


def test_no_peak_no_mfu():
    throughput = Throughput(lambda step: 1, lambda step: 1.0, 1, None)
    metrics = {}
    throughput(0, {})
    throughput(1, metrics)
    assert "mfu" not in metrics and "tflops_per_device" in metrics


def test_profile_traces_the_chosen_steps(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    hooks = Hooks([profile_hook("profile", 3, 2)])
    with hooks:
        for step in range(1, 10):  # metrics of a step arrive after the next one's dispatch
            hooks.before(step)
            calls.append(step)
            if step > 1:
                hooks(step - 1, {})
    assert calls == [1, 2, "profile", 3, 4, 5, "stop", 6, 7, 8, 9]
    calls.clear()
    hooks = Hooks([profile_hook("profile", 1, 50)])
    with hooks:
        hooks.before(1)
    assert calls == ["profile", "stop"]  # with the run
    assert "xprof --logdir=profile" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"log\.profile_steps=0"):
        profile_hook("profile", 1, 0)


def metrics_of(step, **more):
    return {
        "loss": 3.0 - step / 10, "learning_rate": 3e-4, "grad_norm": 0.5, "step_seconds": 2.0,
        "tokens_per_second": 12345.0, "tflops_per_device": 1.5,
    } | more  # fmt: skip


def test_plain_lines_where_stdout_is_no_terminal():
    out = io.StringIO()
    progress = Progress(100, every=10, file=out, clock=clock_of(range(100)))
    hook = progress.hook()
    for step in range(1, 26):
        hook.before(step)
        more = {"validation_loss": 2.5, "mfu": 41.23} if step == 15 else {}
        hook.call(step, metrics_of(step, **more))
    hook.close()
    lines = out.getvalue().splitlines()
    assert [int(line.split("/")[0]) for line in lines] == [1, 10, 15, 20]
    assert lines[1] == (  # the mean loss of steps 2 to 10
        " 10/100  loss 2.400  lr 3.0e-4  gnorm 0.5  12.3k tok/s  1.5 TFLOP/s  eta 1m30s"
    )
    assert "val 2.500" in lines[2] and "mfu" in lines[2] and "mfu" not in lines[3]


def test_skipped_steps_have_no_part_in_the_mean_loss():
    out = io.StringIO()
    progress = Progress(100, every=3, file=out)
    for step, loss in enumerate((2.0, 1.0, math.nan), 1):
        progress(step, {"loss": loss, "skipped": float(math.isnan(loss))})
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["2.000", "1.000"]


def test_lines_count_skipped_steps_and_show_the_loss_scale():
    out = io.StringIO()
    progress = Progress(100, every=4, file=out)
    for step, scale in enumerate((2.0**32, 2.0**32, 2.0**31, 1000.0), 1):
        progress(step, {"loss": 2.0, "loss_scale": scale, "skipped": float(step < 4)})
    lines = out.getvalue().splitlines()
    assert "scale 2^32  skipped 1" in lines[0]
    assert "scale 1e+03  skipped 2" in lines[1]  # since the line before


LONGEST = {
    "loss": 11.25, "validation_loss": 11.25, "validation_loss_per_byte": 1.25,
    "learning_rate": 2.7e-11, "grad_norm": 0.0001234, "step_seconds": 1.0, "mfu": 41.25,
    "tokens_per_second": 12.3e6, "tflops_per_device": 412.0, "data_wait_seconds": 0.5,
    "peak_memory_gib": 131.25,
}  # fmt: skip


@pytest.mark.parametrize("labelled", [False, True], ids=["alone", "srun --label"])
def test_lines_fit_and_keep_what_matters(labelled, monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if labelled:
        monkeypatch.setenv("SLURM_PROCID", "0")
    for absent in LONGEST:
        out = io.StringIO()
        progress = Progress(1_000_000, file=out, clock=clock_of([0.0, 1e6]))
        for step in (1, 500_000):
            progress(step, {name: value for name, value in LONGEST.items() if name != absent})
        lines = out.getvalue().splitlines()
        assert len(lines) == 2 and max(map(len, lines)) <= (74 if labelled else 78)
        assert ("  loss 11.250  " in lines[1]) == (absent != "loss")
        assert ("  val 11.250" in lines[1]) == (absent != "validation_loss")


def test_waiting_for_data_is_shown_where_it_is_worth_it():
    out = io.StringIO()
    progress = Progress(100, every=4, file=out, clock=clock_of(range(100)))
    for step in range(1, 9):
        waited = 1.0 if 4 < step < 7 else 0.001 if step < 4 else 0.0
        progress(step, metrics_of(step, data_wait_seconds=waited))
    lines = out.getvalue().splitlines()
    assert ["data wait" in line for line in lines] == [False, False, True]
    assert "data wait 25%" in lines[2]  # 2 of 4 x 2 seconds


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_live_bar_on_a_terminal():
    out = Terminal()
    hook = Progress(4, every=2, file=out).hook()
    for step in range(1, 5):
        hook.before(step)
        hook.call(step, metrics_of(step))
    hook.close()
    text = out.getvalue()
    assert "1/4" in text and "2/4" in text and "4/4" in text and "3/4" not in text
    assert "compiling the step" in text and "\x1b[?25h" in text  # the cursor is shown again


def test_log_lines_are_printed_above_the_live_bar(monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    record = logging.makeLogRecord({"msg": "attention backend: xla"})
    handler, hook = Stderr(), Progress(4, file=out).hook()
    hook.before(1)
    handler.emit(record)
    hook.close()
    assert "attention backend: xla\n" in out.getvalue() and not err.getvalue()
    handler.emit(record)
    assert err.getvalue() == "attention backend: xla\n"


def test_resumed_runs_print_their_first_step():
    out = io.StringIO()
    progress = Progress(100, start_step=37, every=10, file=out)
    for step in range(38, 42):
        progress(step, metrics_of(step))
    assert [line.split("/")[0].strip() for line in out.getvalue().splitlines()] == ["38", "40"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m"), (273600, "3d04h")],
)
def test_durations_are_formatted(seconds, text):
    assert duration(seconds) == text


def test_numbers_are_formatted_briefly():
    assert [quantity(n) for n in (0, 950, 12345, 999_700, 8.03e9)] == [
        "0", "950", "12.3k", "1M", "8.03B",
    ]  # fmt: skip
    assert [num_bytes(n) for n in (512, 1536, 2.8e9)] == ["512 B", "1.5 KiB", "2.61 GiB"]


def test_the_table_of_parameters_fits():
    rows = [
        ParameterRow(
            "embedding.weight", (1024, 64), ("vocab", "embed"), (("tensor", "fsdp"), None), 4096
        ),
        ParameterRow("stack.groups.0.sublayers.1.mixers.mlp.up.weight", (64,), (None,), (), 256),
        ParameterRow(f"stack.groups.0.{'deep.' * 20}weight", (), (), (), 4),
    ]
    lines = parameter_table(rows, 78)
    assert len(lines) == 5 and max(map(len, lines)) <= 78
    assert lines[1].split() == ["embedding.weight", "1024/tensor+fsdp", "x", "64", "4", "KiB"]
    assert lines[2].startswith("layers.0.1.mlp.up.weight ") and lines[3].startswith("..")
    assert lines[4].split() == ["all", "4.25", "KiB"]


@pytest.mark.parametrize(("per_byte", "shown"), [(0.5, True), (1.999, False)])
def test_the_loss_per_byte_is_shown_where_tokens_are_not_bytes(per_byte, shown):
    file = io.StringIO()
    losses = {"validation_loss": 2.0, "validation_loss_per_byte": per_byte}
    Progress(10, file=file)(1, {"loss": 2.0, **losses})
    assert ("val/byte" in file.getvalue()) == shown
