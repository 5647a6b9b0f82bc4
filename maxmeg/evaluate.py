"""Mean loss of a trained run: python -m maxmeg.evaluate --run_dir=runs/gpt [--split=test]

Instead of the loss, --tasks=arc_easy,hellaswag or --tasks=MY_TASK.yaml runs tasks of
lm-evaluation-harness; they need pip install 'maxmeg[evals]'.
"""

import dataclasses
import math

from maxmeg.config import files
from maxmeg.config.flags import run_command
from maxmeg.config.model import DType
from maxmeg.config.setting import setting
from maxmeg.config.validate import validate
from maxmeg.data.build import (
    build_dataset,
    cache_folder,
    open_corpus,
    read_whole,
    samples_asked,
)
from maxmeg.data.loader import eval_batches
from maxmeg.data.samples.gpt import SPLITS
from maxmeg.evals.harness import run_tasks
from maxmeg.evals.perplexity import mean_loss
from maxmeg.inference.load import Trained, load_run
from maxmeg.optim.schedules import Origin, Schedules
from maxmeg.parallel import multihost
from maxmeg.parallel.mesh import local_mesh
from maxmeg.parallel.placement import local_rows
from maxmeg.runtime.faults.out_of_memory import explains_out_of_memory
from maxmeg.runtime.gpu_environment import set_gpu_environment
from maxmeg.step import make_eval_step


@dataclasses.dataclass
class Options:
    """Run, data and tasks of an evaluation."""

    run_dir: str = setting("runs/gpt", "folder of the run")
    step: int = setting(-1, "step of the checkpoint; -1: the newest intact one")
    split: str = setting("validation", "train | validation | test")
    paths: tuple[str, ...] = setting((), "prefixes of another corpus, in full; empty: the run's")
    num_batches: int = setting(0, "number of batches; 0: the whole split once")
    batch_size: int = setting(16, "samples per batch, >= 1")
    tensor: int = setting(1, "number of tensor-parallel devices")
    dtype: str = setting("", "compute dtype, float32 or bfloat16; empty: the run's")
    tasks: tuple[str, ...] = setting((), "lm-evaluation-harness tasks or files; empty: loss")
    shots: int = setting(-1, "few-shot examples per question; -1: the task's default")
    limit: int = setting(0, "number of questions per task; 0: all")


@explains_out_of_memory("lower --batch_size, set --dtype=bfloat16 or raise --tensor")
def main(options: Options) -> None:
    set_gpu_environment()
    multihost.order_cpu_collectives()
    if options.split not in SPLITS:
        raise ValueError(f"split={options.split!r} must be one of {', '.join(SPLITS)}")
    if options.batch_size < 1 or options.num_batches < 0:
        raise ValueError(
            f"batch_size={options.batch_size} must be at least 1 and "
            f"num_batches={options.num_batches} at least 0"
        )
    step = None if options.step < 0 else options.step
    dtype = files.convert("dtype", options.dtype, DType) if options.dtype else None
    trained = load_run(options.run_dir, step, local_mesh(options.tensor))
    config = trained.config
    config.model.dtype = dtype or config.model.dtype
    if options.tasks:
        shots = None if options.shots < 0 else options.shots
        print(run_tasks(trained, options.tasks, options.batch_size, shots, options.limit or None))
    else:
        print_loss(trained, options)


def print_loss(trained: Trained, options: Options) -> None:
    config = trained.config
    index = SPLITS.index(options.split)
    origin = Origin.of_checkpoint(trained.step, trained.metadata)
    schedules = Schedules(config, origin=origin)
    asked = samples_asked(config, index, schedules, trained.metadata.get("data_order", ()))
    last = max(trained.step - 1, 0)
    first = schedules.evaluation_start(last) if SPLITS[index] == "validation" else 0
    config.train.global_batch_size = options.batch_size
    config.train.micro_batch_size = 0
    validate(config, options.tensor, training=False)
    if options.paths:
        read_whole(config.data, options.paths, index)
    tokenizer, prefixes = open_corpus(config.data, options.run_dir)
    # With num_batches, read the samples of the run's own validation; otherwise one epoch.
    is_part = options.num_batches and not options.paths
    data = build_dataset(
        config.data,
        prefixes,
        tokenizer,
        index,
        config.seed,
        config.model.vocab_size,
        asked if is_part else None,
        cache_folder(config.data, options.run_dir),
    )
    if data is None:
        raise ValueError(f"data.split={config.data.split!r} leaves the {options.split} split empty")
    num_batches = options.num_batches or max(data.samples_per_epoch // options.batch_size, 1)
    byte_lengths = tokenizer.byte_lengths()
    eval_step = make_eval_step(config, trained.mesh, trained.model, byte_lengths)
    size, rows = options.batch_size, local_rows(trained.mesh)
    batches = eval_batches(data, num_batches, size, rows, first if is_part else 0)
    loss = mean_loss(eval_step, trained.model, batches, trained.mesh, size, rows)
    per_byte = "" if loss.per_byte is None else f"{loss.per_byte:.4f} nats per byte  "
    print(
        f"step {trained.step}  {options.split} loss {loss.per_token:.4f} nats per token  {per_byte}"
        f"perplexity {math.exp(min(loss.per_token, 700)):.3f}  {loss.tokens:.0f} tokens"
    )


if __name__ == "__main__":
    run_command(main, Options, needs_config=False)
