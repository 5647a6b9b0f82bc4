"""Mean loss of a trained run: maxmeg evaluate runs/gpt [--split=test]

Instead of the loss, --tasks=lambada:FILE.jsonl,wikitext:FILE runs these; --tasks=arc_easy,hellaswag
or --tasks=MY_TASK.yaml runs tasks of lm-evaluation-harness (pip install 'maxmeg[evals]').
"""

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    run_module("evaluate")

import math

from maxmeg.config import values
from maxmeg.config.options import Evaluate as Options
from maxmeg.config.retro import Neighbours
from maxmeg.config.validate import validate
from maxmeg.data.batch_sizes import Origin
from maxmeg.data.build import build_dataset, cache_folder, open_corpus, read_whole, samples_asked
from maxmeg.data.loader import eval_batches
from maxmeg.data.placement import local_rows
from maxmeg.data.samples.dataset import SPLITS
from maxmeg.eval_step import make_eval_step
from maxmeg.evals.harness import run_tasks
from maxmeg.evals.perplexity import accuracy_lines, mean_loss
from maxmeg.evals.zero_shot import is_task, run_zero_shot
from maxmeg.inference.load import Trained, load_chosen
from maxmeg.optim.schedules import Schedules
from maxmeg.processes import multihost
from maxmeg.runtime.faults.out_of_memory import explains_out_of_memory
from maxmeg.runtime.gpu_environment import set_gpu_environment
from maxmeg.runtime.screen import say, tracked


@explains_out_of_memory("lower --batch_size, set --dtype=bfloat16 or raise --tensor")
def main(options: Options) -> None:
    set_gpu_environment()
    multihost.use_one_process()
    if options.split not in SPLITS:
        raise ValueError(f"split={options.split!r} must be one of {', '.join(SPLITS)}")
    trained = load_chosen(options)
    if options.tasks:
        limits = options.batch_size, options.limit
        tasks = [*filter(is_task, options.tasks)]
        if options.shots >= 0 and len(tasks) == len(options.tasks):
            raise ValueError(f"shots={options.shots}: {', '.join(tasks)} have no examples: omit it")
        if tasks:
            print(*run_zero_shot(trained, tasks, *limits), sep="\n")
        if harness := [name for name in options.tasks if not is_task(name)]:
            shots = None if options.shots < 0 else options.shots
            print(run_tasks(trained, harness, options.batch_size, shots, options.limit or None))
    else:
        print_loss(trained, options)


def print_loss(trained: Trained, options: Options) -> None:
    config = trained.config
    index = SPLITS.index(options.split)
    origin = Origin.of_checkpoint(trained.step, trained.metadata)
    schedules = Schedules(config, origin=origin)
    sample_range = samples_asked(config, index, schedules, trained.metadata.get("data_order", ()))
    last = max(trained.step - 1, 0)
    first = schedules.evaluation_start(last) if SPLITS[index] == "validation" else 0
    config.train.global_batch_size = options.batch_size
    config.train.micro_batch_size = 0
    if options.neighbours:
        kind = values.convert("neighbours", options.neighbours, Neighbours)
        config.data.read_neighbours = kind
    if options.paths:
        read_whole(config.data, options.paths, index)
    validate(config, options.tensor, training=False)
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
        sample_range if is_part else None,
        cache_folder(config.data, options.run_dir),
    )
    if data is None:
        raise ValueError(f"data.split={config.data.split!r} leaves the {options.split} split empty")
    num_batches = options.num_batches or -(-data.samples_per_epoch // options.batch_size)
    byte_lengths = tokenizer.byte_lengths()
    eval_step = make_eval_step(config, trained.mesh, trained.model, byte_lengths)
    size, rows = options.batch_size, local_rows(trained.mesh)
    batches = eval_batches(data, options.num_batches, size, rows, first if is_part else 0)
    samples = num_batches * size if options.num_batches else data.samples_per_epoch
    tokens = samples * data.sequence_length
    read = (
        f"{tokens:,} tokens" if config.data.objective.predicts_tokens else f"{samples:,} examples"
    )
    plan = f"{read} of the {options.split} split in {num_batches:,} batches"
    say(f"step {trained.step}: {plan}")
    batches = tracked(batches, "evaluating", num_batches)
    loss = mean_loss(eval_step, trained.model, batches, trained.mesh, size, rows)
    if loss.accuracy is not None:
        for line in accuracy_lines(loss, options.split, config.data.class_names):
            say(line)
        return
    per_byte = "" if loss.per_byte is None else f", {loss.per_byte:.4f} nats per byte"
    perplexity = math.exp(min(loss.per_token, 700))
    say(
        f"{options.split} loss {loss.per_token:.4f} nats per token{per_byte}, perplexity "
        f"{perplexity:.4g}"
    )
