"""The hooks of a training run, from its settings."""

import contextlib
import os
import time
from collections.abc import Iterator

import jax
import numpy as np

from maxmeg.config import files
from maxmeg.config.schema import Config
from maxmeg.data import run_folder
from maxmeg.optim.schedules import Schedules
from maxmeg.planning.cost.flops import training_flops
from maxmeg.planning.hardware import peak_tflops
from maxmeg.runtime.faults.guard import Guard
from maxmeg.runtime.faults.stragglers import Stragglers
from maxmeg.runtime.faults.watchdog import VALIDATING, Watchdog
from maxmeg.runtime.gpu_environment import recorded_environment
from maxmeg.runtime.metrics.attention_logits import logit_hook
from maxmeg.runtime.metrics.expert_load import ExpertLoad
from maxmeg.runtime.metrics.hooks import Hook, Hooks, Metrics
from maxmeg.runtime.metrics.memory import peak_memory_hook
from maxmeg.runtime.metrics.plots import METRICS_FILE, LossPlot
from maxmeg.runtime.metrics.profile import profile_hook
from maxmeg.runtime.metrics.progress import Progress
from maxmeg.runtime.metrics.throughput import Throughput
from maxmeg.runtime.metrics.writers import (
    JsonlWriter,
    TensorBoardWriter,
    WandbWriter,
    Writer,
    writer_hook,
)
from maxmeg.runtime.revision import commit

RATES = ("learning_rate", "weight_decay")


def make_throughput(
    config: Config, schedules: Schedules, num_devices: int, kind: str
) -> Throughput:
    """Throughput on `num_devices` devices of this `device_kind`."""
    length = config.data.sequence_length

    def flops(step: int) -> float:
        size = schedules.batch_size(step - 1)
        frozen = config.lora.rank > 0
        rest = {"frozen": frozen, "source_length": config.data.source_tokens}
        rest["max_targets"] = config.data.max_targets
        return training_flops(config.model, length, size, config.parallel.tensor, **rest)

    def tokens(step: int) -> int:
        return schedules.batch_size(step - 1) * length

    return Throughput(tokens, flops, num_devices, peak_tflops(kind))


class Observer:
    """Context manager that calls the hooks of a run with the metrics of each step.

    The metrics of the newest step stay on the device until the next step is dispatched.
    skipped: whether the last flushed step skipped its update.
    """

    def __init__(self, config: Config, schedules: Schedules, start_step: int, watchdog: Watchdog):
        kind = jax.devices()[0].device_kind
        self._throughput = make_throughput(config, schedules, jax.device_count(), kind)
        self._hooks = training_hooks(config, schedules, self._throughput, start_step, watchdog)
        self._schedules, self._watchdog = schedules, watchdog
        self._length = config.data.sequence_length
        self._step: int | None = None
        self._metrics: dict = {}
        self._save_seconds = 0.0
        self._stop_agreed, self.skipped = False, False

    def before(self, step: int) -> None:
        """Call before the dispatch of the step after `step` updates."""
        self._hooks.before(step + 1)

    def dispatched(self, step: int, metrics: dict) -> None:
        """Flush the metrics of the previous step; hold those of the step after `step` updates."""
        self.flush()
        rates = {name: getattr(self._schedules, name)(step) for name in RATES}
        self._step, self._metrics = step, {**metrics, **rates}

    def stops(self, requested: bool) -> bool:
        """Whether all processes have agreed to stop, or this only process was asked to."""
        return self._stop_agreed or (requested and jax.process_count() == 1)

    @contextlib.contextmanager
    def validation(self, state) -> Iterator[Metrics]:
        """Yields the newest step's metrics, for its validation losses; then flushes them.

        The throughput excludes this time, which becomes the metric eval_seconds.
        """
        jax.block_until_ready(state)
        begin = time.perf_counter()
        with self._throughput.paused(), self._watchdog.phase(VALIDATING):
            yield self._metrics
        self._metrics["eval_seconds"] = time.perf_counter() - begin
        with self._throughput.paused():
            self.flush()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """The throughput excludes the `with` block: the next step's metric save_seconds."""
        begin = time.perf_counter()
        with self._throughput.paused():
            yield
        self._save_seconds = time.perf_counter() - begin

    def flush(self) -> None:
        """Fetch the held metrics and call the hooks with them."""
        if self._step is None:
            return
        step, layers = self._step, self._metrics.pop("layers", {})
        values: dict = {name: float(value) for name, value in self._metrics.items()}
        if layers:
            values["layers"] = jax.device_get(layers)
        self._step = None
        self._stop_agreed |= values.pop("stop", 0.0) > 0
        self.skipped = values.get("skipped", 0.0) > 0
        values["consumed_samples"] = self._schedules.consumed_samples(step + 1)
        values["consumed_tokens"] = values["consumed_samples"] * self._length
        if self._save_seconds:
            values["save_seconds"], self._save_seconds = self._save_seconds, 0.0
        self._hooks(step + 1, values)

    def __enter__(self) -> "Observer":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception) -> bool | None:
        return self._hooks.__exit__(*exception)


def config_hook(config: Config) -> Hook:
    """Write config.yaml and tokenizer into the run folder after this process's first step."""
    unwritten = [config]

    def call(step: int, metrics: Metrics) -> None:
        if unwritten:
            run_folder.write(unwritten.pop())

    return Hook(call)


def training_hooks(
    config: Config,
    schedules: Schedules,
    throughput: Throughput,
    start_step: int,
    watchdog: Watchdog,
) -> Hooks:
    """Watchdog, guard and profile in every process; console and metrics files in process 0."""
    primary = jax.process_index() == 0

    def samples(step: int) -> range:
        first, size = schedules.extent(step - 1)
        return range(first, first + size)

    log, folder = config.log, config.run_dir
    scaling = config.optim.loss_scale
    minimum = float(np.float32(scaling.fixed or scaling.minimum))  # as the metric is rounded
    guard = Guard(samples, config.train.max_skipped_steps, log.spike_zscore, minimum)
    hooks = [
        watchdog.hook(lambda step: schedules.batch_size(step - 1)),
        guard.hook(),
        throughput.hook(),
    ]
    if watchdog.peers is not None and config.watchdog.straggler:
        hooks.append(Stragglers(watchdog, config.watchdog.straggler, log.every).hook())
    if log.profile_start:
        path = os.path.join(folder, "profile")
        hooks.append(profile_hook(path, log.profile_start, log.profile_steps))
    if config.optim.qk_clip.threshold:
        hooks.append(logit_hook())
    if config.model.has("moe"):
        path = os.path.join(folder, "experts.json") if primary else ""
        hooks.append(ExpertLoad(config.model, schedules.num_steps, log.every, path).hook())
    if primary:
        hooks.append(peak_memory_hook())
        hooks.append(config_hook(config))
        path = os.path.join(folder, METRICS_FILE)
        once = {"commit": commit(), "environment": recorded_environment()}
        writers: list[Writer] = [JsonlWriter(path, start_step, once), LossPlot(folder)]
        if log.tensorboard:
            writers.append(TensorBoardWriter(os.path.join(folder, "tensorboard"), start_step))
        if log.wandb_project:
            writers.append(WandbWriter(log.wandb_project, folder, files.to_dict(config)))
        hooks += [writer_hook(writer) for writer in writers]
        hooks.append(Progress(schedules.num_steps, start_step, log.every).hook())
    hooks.append(watchdog.last_hook())
    return Hooks(hooks)
