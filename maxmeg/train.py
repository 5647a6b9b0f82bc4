"""Train a language model: python -m maxmeg.train --config=configs/gpt.py [--config.FIELD=VALUE]"""

import contextlib
import logging
import os

import jax
import numpy as np

from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.config import files
from maxmeg.config.flags import run_command
from maxmeg.config.lazy import Lazy
from maxmeg.config.schema import Config
from maxmeg.config.validate import axis_sizes, batch_unit, resolve, validate
from maxmeg.data.build import (
    build_dataset,
    build_validation,
    cache_folder,
    evaluation_start,
    open_corpus,
    order_of,
    samples_asked,
    warn_of_order,
)
from maxmeg.data.loader import eval_batches, train_loader
from maxmeg.evals.perplexity import mean_loss
from maxmeg.optim.build import make_optimizer
from maxmeg.optim.schedules import Schedules
from maxmeg.parallel import multihost
from maxmeg.parallel.mesh import make_mesh
from maxmeg.parallel.placement import local_rows, place_batch, place_flag
from maxmeg.runtime.curve import write_curve
from maxmeg.runtime.observe import Pending, make_throughput, training_hooks
from maxmeg.runtime.signals import Interrupt
from maxmeg.runtime.summary import print_mesh, print_parameters
from maxmeg.state import (
    CHECKPOINTS,
    abstract_state,
    base_of,
    create_state,
    parameter_rows,
    resume,
    to_tree,
)
from maxmeg.step import make_eval_step, make_train_step

closing = Lazy("maxmeg.inference.closing")
loads = Lazy("maxmeg.runtime.loads")


class Run:
    """Everything a run needs before its first step, checked and opened."""

    def __init__(self, config: Config):
        validate(config, jax.device_count())
        os.makedirs(config.run_dir, exist_ok=True)
        self.tokenizer, prefixes = open_corpus(config.data, config.run_dir)
        resolve(config, self.tokenizer.vocab_size)
        self.config = config
        self.base = base_of(config)
        self.mesh = make_mesh(
            axis_sizes(config.parallel, jax.device_count()), fold=config.parallel.fold
        )
        self.rows = local_rows(self.mesh, config.train.micro_batch_size)
        self.schedules = Schedules(config, batch_unit(config, dict(self.mesh.shape)))
        self.data, self.validation = self.datasets(prefixes)
        self.optimizer = make_optimizer(config.optim)
        self.abstract = abstract_state(config, self.optimizer, self.mesh)
        self.train_step = make_train_step(config, self.mesh, self.optimizer, self.abstract)
        self.eval_step = make_eval_step(config, self.mesh, self.abstract.model)
        self.checkpointer = Checkpointer(
            os.path.join(config.run_dir, CHECKPOINTS),
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            asynchronous=config.checkpoint.asynchronous,
        )

    def datasets(self, prefixes: list[str]):
        """That of training, and those of validation by name."""
        config, consumed = self.config, self.schedules.consumed_samples
        vocab_size, folder = config.model.vocab_size, cache_folder(config.data, config.run_dir)
        common = (config.seed, vocab_size)
        asked = [samples_asked(config, split, consumed) for split in (0, 1)]
        source = (config.data, prefixes, self.tokenizer)
        return (
            build_dataset(*source, 0, *common, asked[0], folder),
            build_validation(*source, *common, asked[1], folder),
        )

    def batches(self, start_step: int):
        """A loader of (step, this process's rows) from `start_step` on."""
        assert self.data is not None  # an empty training split is an error
        return train_loader(self.data, self.config, start_step, self.schedules.extent, self.rows)

    def place(self, step: int, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return place_batch(batch, self.rows, self.mesh, self.schedules.batch_size(step))

    def controls(self, step: int, stop: bool) -> dict[str, jax.Array | np.floating]:
        return {
            "learning_rate": np.float32(self.schedules.learning_rate(step)),
            "weight_decay": np.float32(self.schedules.weight_decay(step)),
            "stop": place_flag(stop, self.mesh),
        }

    def validate(self, model, step: int) -> dict[str, float]:
        """The mean loss over train.eval_steps batches of validation, and of each set's alone."""
        size, rows = self.config.train.global_batch_size, self.rows
        first, losses = evaluation_start(self.config, step), {}
        for name, data in self.validation.items():
            batches = eval_batches(data, self.config.train.eval_steps, size, rows, first)
            losses[name], _ = mean_loss(self.eval_step, model, batches, self.mesh, size, rows)
        each = {f"validation_loss/{name}": loss for name, loss in losses.items() if name}
        return {"validation_loss": float(np.mean([*losses.values()])), **each}

    def save(self, state) -> None:
        step = int(state.step)
        consumed = self.schedules.consumed_samples(step)
        metadata = {
            "config": files.to_dict(self.config),
            "tokenizer": self.tokenizer.identity,
            "base": self.base,
            "consumed_samples": consumed,
            "order": order_of(self.data, consumed),
        }
        self.checkpointer.save(step, to_tree(state), metadata)


def train(run: Run, state, start_step: int):
    """Steps until the end, or until the processes agree to stop; the last state, saved."""
    config, primary = run.config, multihost.is_primary()
    device_kind = jax.devices()[0].device_kind
    throughput = make_throughput(config, run.schedules, jax.device_count(), device_kind)
    hooks = training_hooks(config, run.schedules, throughput, start_step, primary)
    pending = Pending(hooks, run.schedules)
    evaluate, save = config.train.eval_every, config.checkpoint.save_every

    def due(every: int, step: int) -> bool:
        return every > 0 and (step + 1) % every == 0

    saves = contextlib.closing(run.checkpointer)
    with saves, Interrupt() as interrupt, hooks, run.batches(start_step) as batches:
        for step, batch in batches:
            hooks.before(step)
            controls = run.controls(step, interrupt.requested)
            state, metrics = run.train_step(state, run.place(step, batch), controls)
            pending.hand_on()  # the metrics of the step before
            pending.put(step, {**metrics, "data_wait_seconds": batches.waited})
            alone = jax.process_count() == 1 and interrupt.requested
            last = step + 1 == config.train.num_steps or pending.stop_agreed or alone
            if run.validation and (due(evaluate, step) or (evaluate and last)):
                jax.block_until_ready(state.step)
                with throughput.paused():
                    pending.add(run.validate(state.model, step))
            if due(save, step) or last:
                pending.hand_on()  # a loss that is not finite raises here, before the save
                run.save(state)
            if last:
                break
    return state


def finish(run: Run, state) -> None:
    """Wait for the save; then say where things are, draw the losses, write a sample."""
    saved = run.checkpointer.wait()
    config, step = run.config, int(state.step)
    done = step == config.train.num_steps
    sample = ""
    pipelined = run.mesh.shape["pipe"] > 1  # then the model that writes is the saved one
    if done and config.log.sample_prompt and (saved or not pipelined):
        sample = closing.sample(state.model, config, run.tokenizer, step, run.mesh)
    if not multihost.is_primary():
        return
    if sample:
        print(f"\n--- sample\n{config.log.sample_prompt}{sample}\n---")
    metrics, curve = (os.path.join(config.run_dir, name) for name in ("metrics.jsonl", "loss.png"))
    title = os.path.basename(os.path.normpath(config.run_dir))
    write_curve(metrics, curve, title=title)
    print(f"loss curve: {curve}")
    found, picture = (os.path.join(config.run_dir, f"experts.{end}") for end in ("json", "png"))
    if config.model.num_experts and os.path.exists(found):
        loads.write_loads(found, picture, title)
        print(f"loads of experts: {picture}")
    if saved:
        print(f"checkpoint: {run.checkpointer.folder}, step {step}")
    if not done:
        print(f"stopped after step {step}; the same command goes on from there")


def main(config: Config) -> None:
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    logging.getLogger("maxmeg").setLevel(logging.INFO)
    multihost.initialize()
    run = Run(config)
    found = resume(config, run.checkpointer, run.abstract, run.tokenizer.identity)
    if multihost.is_primary():
        files.save(config, os.path.join(config.run_dir, "config.yaml"))
        print_mesh(dict(run.mesh.shape), jax.devices()[0].device_kind)
        print_parameters(parameter_rows(run.abstract.model))
    if found is None:
        start, state = 0, create_state(config, run.optimizer, run.abstract)
    else:
        start, state = found
        if start in run.checkpointer.steps():  # else it is another run's, with data of its own
            order = run.checkpointer.metadata(start).get("order")
            warn_of_order(order, run.data, run.schedules.consumed_samples(start))
        print(f"resumed at step {start}")
    if start < config.train.num_steps:
        state = train(run, state, start)
    finish(run, state)
    multihost.shutdown()


if __name__ == "__main__":
    run_command(main)
