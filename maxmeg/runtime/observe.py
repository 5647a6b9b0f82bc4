"""The hooks of a training run, from its settings."""

import os

import numpy as np

from maxmeg.config import files
from maxmeg.config.lazy import Lazy
from maxmeg.config.schema import Config
from maxmeg.optim.schedules import Schedules
from maxmeg.planning.flops import training_flops
from maxmeg.planning.hardware import peak_tflops
from maxmeg.runtime.guard import guard_hook
from maxmeg.runtime.hooks import Hook, Hooks, Metrics
from maxmeg.runtime.profile import profile_hook
from maxmeg.runtime.progress import Progress
from maxmeg.runtime.throughput import Throughput
from maxmeg.runtime.writers import JsonlWriter, TensorBoardWriter, WandbWriter, writer_hook

loads = Lazy("maxmeg.runtime.loads")


def make_throughput(
    config: Config, schedules: Schedules, num_devices: int, kind: str
) -> Throughput:
    """Throughput on `num_devices` devices of a kind."""
    length = config.data.sequence_length

    def flops(step: int) -> float:
        size = schedules.batch_size(step)
        frozen = config.lora.rank > 0
        return training_flops(config.model, length, size, config.parallel.tensor, frozen=frozen)

    def tokens(step: int) -> int:
        return schedules.batch_size(step) * length

    return Throughput(tokens, flops, num_devices, peak_tflops(kind))


class Pending:
    """Metrics of the newest step, still on the device: handed on when the next is dispatched."""

    def __init__(self, hooks: Hooks, schedules: Schedules):
        self._hooks, self._schedules = hooks, schedules
        self._step: int | None = None
        self._metrics: dict = {}
        self.stop_agreed = False

    def put(self, step: int, metrics: dict) -> None:
        """Metrics of step `step`; those of the step before must have been handed on."""
        self._step, self._metrics = step, dict(metrics)

    def add(self, values: Metrics) -> None:
        self._metrics.update(values)

    def hand_on(self) -> None:
        """Wait for the metrics and call the hooks with them."""
        if self._step is None:
            return
        step, counts = self._step, self._metrics.pop("expert_loads", None)
        values: dict = {name: float(value) for name, value in self._metrics.items()}
        if counts is not None:
            values["expert_loads"] = np.asarray(counts)
        self._step = None
        self.stop_agreed |= values.pop("stop", 0.0) > 0
        values["learning_rate"] = self._schedules.learning_rate(step)
        values["weight_decay"] = self._schedules.weight_decay(step)
        values["consumed_samples"] = self._schedules.consumed_samples(step + 1)
        self._hooks(step, values)


def training_hooks(
    config: Config, schedules: Schedules, throughput: Throughput, start_step: int, primary: bool
) -> Hooks:
    """Guard and profile on every process; console, metrics.jsonl, TensorBoard, wandb on one."""

    def samples(step: int) -> range:
        first = schedules.consumed_samples(step)
        return range(first, first + schedules.batch_size(step))

    hooks: list[Hook] = [guard_hook(samples), throughput.hook()]
    log, folder = config.log, config.run_dir
    if log.profile_start:
        path = os.path.join(folder, "profile")
        hooks.append(profile_hook(path, log.profile_start, log.profile_steps))
    if config.model.num_experts:
        path = os.path.join(folder, "experts.json") if primary else ""
        hooks.append(loads.ExpertLoads(config.model, schedules.num_steps, log.every, path).hook())
    if primary:
        writers: list[JsonlWriter | TensorBoardWriter | WandbWriter] = [
            JsonlWriter(os.path.join(folder, "metrics.jsonl"), start_step)
        ]
        if log.tensorboard:
            writers.append(TensorBoardWriter(os.path.join(folder, "tensorboard"), start_step))
        if log.wandb_project:
            writers.append(WandbWriter(log.wandb_project, folder, files.to_dict(config)))
        hooks += [writer_hook(writer) for writer in writers]
        hooks.append(Progress(schedules.num_steps, start_step, log.every).hook())
    return Hooks(hooks, schedules.num_steps)
