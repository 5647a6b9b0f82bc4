"""Train a language model: python -m maxmeg.train --config=configs/gpt.py [--SETTING=VALUE ...]"""

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    run_module("train")

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from maxmeg.checkpoint.disk import orders_of, to_tree
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.resume import Start, check_start, start
from maxmeg.config import files
from maxmeg.config.options import Train as Options
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.config.validate import batch_unit, resolve, validate
from maxmeg.data import run_folder
from maxmeg.data.batch_sizes import Origin
from maxmeg.data.loader import eval_batches, train_loader
from maxmeg.data.placement import place_batch, place_flag
from maxmeg.data.resuming import record_order
from maxmeg.data.sample_prompt import sample_prompt
from maxmeg.data.source import Corpora, Source
from maxmeg.evals.perplexity import StopRequested, mean_loss, validation_metrics
from maxmeg.inference.samples import sample_at_end
from maxmeg.objectives.objective import Objective
from maxmeg.optim.schedules import Schedules
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.mesh import sizes_of
from maxmeg.planning.automatic import choose, cluster_here
from maxmeg.planning.compile import check_step
from maxmeg.planning.remedies import planned_memory
from maxmeg.planning.show.text import memory_table
from maxmeg.processes import multihost
from maxmeg.program import Program
from maxmeg.runtime.determinism import check_deterministic
from maxmeg.runtime.faults.lock import lock_run
from maxmeg.runtime.faults.out_of_memory import check_memory, explains_out_of_memory
from maxmeg.runtime.faults.peers import ending_together
from maxmeg.runtime.faults.signals import Interrupt
from maxmeg.runtime.faults.watchdog import SAVING, Watchdog
from maxmeg.runtime.garbage import collected_every
from maxmeg.runtime.gpu_environment import set_gpu_environment
from maxmeg.runtime.logs import start_logging
from maxmeg.runtime.metrics.summary import print_end, print_resumed, print_summary
from maxmeg.runtime.observe import Observer
from maxmeg.runtime.screen import say
from maxmeg.runtime.slurm import warn_of_late_save
from maxmeg.state import evaluated_model


class Run:
    """A run before its first step: its program, its data, its checkpoints, checked and opened."""

    def __init__(
        self,
        config: Config,
        watchdog: Watchdog | None = None,
        source: Source | None = None,
        objective: Objective | None = None,
    ) -> None:
        """source, objective: None means those that the settings in config.data name."""
        self.watchdog = watchdog or Watchdog(config)
        validate(config, jax.device_count(), jax.default_backend())
        os.makedirs(config.run_dir, exist_ok=True)
        self.source = source or Corpora(config)
        self.tokenizer = self.source.tokenizer
        resolve(config, self.tokenizer.vocab_size, self.tokenizer.required_size)
        choose(config, cluster_here())
        check_memory(config)
        self.config = config
        self.base: dict = {}  # identity of the frozen base, set when the state is there
        self.program = Program(config, self.tokenizer.byte_lengths(), objective)
        self.checkpointer = Checkpointer(
            files.checkpoint_folder(config),
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            asynchronous=config.checkpoint.asynchronous,
            verify=config.checkpoint.verify,
            timeout_seconds=config.checkpoint.timeout_seconds,
        )
        self.watchdog.wait_for_save = self.checkpointer.wait

    def open_data(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Open the schedules, the training set and the validation sets by name.

        step, metadata: of the checkpoint that is resumed, whose samples and their order are kept;
        0 and empty for a new run.
        """
        config, mesh = self.config, self.program.mesh
        origin = Origin.of_checkpoint(step, metadata) if metadata else Origin()
        self.schedules = Schedules(config, batch_unit(config, dict(mesh.shape)), origin)
        self.data, self.validation = self.source.open(config, self.schedules, step, metadata)

    def batches(self, start_step: int):
        """A loader of (step, this process's rows) from `start_step` on."""
        rows = self.program.rows
        return train_loader(self.data, self.config, start_step, self.schedules.extent, rows)

    def place(self, step: int, batch: dict[str, np.ndarray]) -> Batch:
        size = self.schedules.batch_size(step)
        return place_batch(batch, self.program.rows, self.program.mesh, size)

    def controls(self, step: int, stop: bool, state) -> dict[str, jax.Array | np.floating]:
        """Scalars of step `step`. With float16 this waits for the step before: its update may have
        been skipped, for which the schedules wait too."""
        if state.scaler is not None:
            self.schedules.skipped_samples = int(state.scaler.skipped_samples)
        return {
            "learning_rate": np.float32(self.schedules.learning_rate(step)),
            "weight_decay": np.float32(self.schedules.weight_decay(step)),
            "stop": place_flag(stop, self.program.mesh),
        }

    def validate(self, state, step: int, losses: dict[str, float], interrupt: Interrupt) -> bool:
        """Add to `losses` the mean loss over train.eval_steps batches of each validation set.

        False where a process was asked to stop meanwhile; then nothing is added.
        """
        size, rows = self.config.train.global_batch_size, self.program.rows
        mesh, eval_step = self.program.mesh, self.program.eval_step
        first, results = self.schedules.evaluation_start(step), {}
        model = evaluated_model(state, self.config.optim.ema.evaluates)
        computing = self.program.compute_copy(model)
        for name, data in self.validation.items():
            batches = eval_batches(data, self.config.train.eval_steps, size, rows, first)
            evaluated = (eval_step, computing, batches, mesh, size, rows)
            try:
                results[name] = mean_loss(*evaluated, lambda: place_flag(interrupt.requested, mesh))
            except StopRequested:
                return False
        losses |= validation_metrics(results)
        return True

    def save(self, state, stopping: bool = False) -> None:
        """Begin to save the state; stopping: as the last act of a run that was asked to stop."""
        if stopping:
            warn_of_late_save(self.checkpointer.seconds)
        step = int(state.step)
        progress = self.schedules.progress(step)
        metadata = {
            "config": files.to_dict(run_folder.stored(self.config)),
            "tokenizer": self.tokenizer.identity,
            "base": self.base,
            **progress,
            "data_order": record_order(self.data, progress["consumed_samples"]),
        }
        with self.watchdog.phase(SAVING):
            self.checkpointer.save(step, to_tree(state), metadata, orders_of(state))


def train(run: Run, state, start_step: int, interrupt: Interrupt):
    """Run the training loop. Returns the final state, which has been saved.

    A stop request saves at the next step that all processes agree on, and never validates.
    """
    settings, save_every = run.config.train, run.config.checkpoint.save_every
    observer = Observer(run.config, run.schedules, start_step, run.watchdog)
    at_end = contextlib.ExitStack()
    at_end.callback(run.checkpointer.wait)  # a save in the background ends before the program
    postponed = False  # a save that was due after a skipped step
    collected, loader = collected_every(settings.gc_interval), run.batches(start_step)
    with at_end, observer, collected as collect, loader as batches:
        for step, batch in batches:
            observer.before(step)
            controls = run.controls(step, interrupt.requested, state)
            with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
                state, metrics = run.program.train_step(state, run.place(step, batch), controls)
            collect(step + 1)
            observer.dispatched(step, {**metrics, "data_wait_seconds": batches.waited})
            last = step + 1 == settings.num_steps
            stopping = observer.stops(interrupt.requested) or due(settings.exit_at, step)
            if due(settings.eval_every, step, last) and run.validation and not stopping:
                with observer.validation(state) as losses:
                    stopping = not run.validate(state, step, losses, interrupt)
            if due(save_every, step) or postponed or stopping or last:
                observer.flush()  # too many skipped steps raise here, before the save
                postponed = observer.skipped and not (stopping or last)
                if not postponed:
                    with observer.saving():
                        run.save(state, stopping)
            if stopping or last:
                break
    return state


def due(every: int, step: int, last: bool = False) -> bool:
    """Whether something happens after step `step`: every so many steps (0: never), or the last."""
    return every > 0 and ((step + 1) % every == 0 or last)


def finish(run: Run, state) -> None:
    """Wait for the save; then say where things are, draw the losses, write a sample."""
    saved = run.checkpointer.wait()
    config, step, mesh = run.config, int(state.step), run.program.mesh
    done = step == config.train.num_steps
    data, sample = next(iter(run.validation.values()), run.data), ""
    if done and (prompt := sample_prompt(config, run.source, data)):
        model = evaluated_model(state, config.optim.ema.evaluates)
        sample = sample_at_end(prompt, model, config, run.tokenizer, step, mesh, saved)
    if multihost.is_primary():
        print_end(config, step, sample, saved)


def announce(run: Run, start: Start) -> None:
    """Print what is about to be trained, and what changed since the checkpoint that it resumes."""
    if not multihost.is_primary():
        return
    print_resumed(run.config, start.step, start.metadata)
    if start.step < run.config.train.num_steps:
        print_summary(run.config, sizes_of(run.program.mesh), run.program.abstract)


def set_up(config: Config, cache: str = "") -> None:
    """Prepare the process: environment, devices, other processes, logging.

    cache: a folder for the programs that are compiled for GPUs.
    """
    environment = set_gpu_environment(config.train.deterministic, cache)
    multihost.initialize(config.watchdog.silence)
    start_logging()
    if environment and multihost.is_primary():
        say(environment.words(), "gpu")
    check_deterministic(config)


@explains_out_of_memory()
def dry_run(config: Config) -> None:
    """Check a run and print its summary, estimated memory and data. No step, no files in run_dir.

    Of a checkpoint that the run would resume, or begin from, the metadata are read.
    """
    set_up(config)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(with_fields(config, {"run_dir": folder}))
        settings = with_fields(run.config, {"run_dir": config.run_dir})
        checkpoints = Checkpointer(files.checkpoint_folder(settings))
        identity = run.tokenizer.identity
        resumed = check_start(settings, checkpoints, run.program.abstract, identity)
        step, metadata = (resumed.step, resumed.metadata) if resumed else (0, {})
        if multihost.is_primary():
            print_resumed(settings, step, metadata, "would resume")
            print_summary(run.config, sizes_of(run.program.mesh), run.program.abstract)
            if memory := planned_memory(run.config, jax.device_count()):
                print(*memory_table(memory), sep="\n", flush=True)
        if step < config.train.num_steps:
            run.open_data(step, metadata)
        check_step(run.config, run.program)
    if multihost.is_primary():
        say("dry run: these settings are valid; nothing was trained or saved")
    multihost.shutdown()


@explains_out_of_memory()
def main(
    config: Config,
    source: Source | None = None,
    objective: Objective | None = None,
    prepare: Callable[[Config], Config] = lambda config: config,
) -> None:
    """Train a run. source, objective: replace the data and the loss that config.data selects.
    prepare: called once the run folder is locked; returns the config to train with."""
    set_up(config, os.path.join(os.path.abspath(config.run_dir), files.COMPILE_CACHE))
    interrupt = Interrupt(config.train.exit_after_minutes)
    with interrupt, Watchdog(config) as watchdog, lock_run(config.run_dir) as lock:
        run = Run(config := prepare(config), watchdog, source, objective)
        if lock is not None:
            run.checkpointer.may_write = lock.check
        run_start = start(
            config,
            run.checkpointer,
            run.program.optimizer,
            run.program.abstract,
            run.tokenizer.identity,
        )
        run.base = run_start.base
        announce(run, run_start)
        if run_start.step < config.train.num_steps:
            run.open_data(run_start.step, run_start.metadata)
            if interrupt.lets_train():
                finish(run, train(run, run_start.state, run_start.step, interrupt))
    multihost.shutdown()
    run.checkpointer.check()


@ending_together
def command(config: Config, options: Options) -> None:
    """`maxmeg train`."""
    if options.dry_run:
        dry_run(config)
    else:
        main(config)
