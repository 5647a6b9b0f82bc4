"""Mean loss of a trained run: python -m maxmeg.evaluate --run_dir=runs/gpt [--split=test]"""

import dataclasses
import math

from maxmeg.config.flags import run_command
from maxmeg.config.setting import setting
from maxmeg.config.validate import validate
from maxmeg.data.build import build_dataset, open_corpus
from maxmeg.data.gpt import SPLITS
from maxmeg.data.loader import eval_batches
from maxmeg.evals.perplexity import mean_loss
from maxmeg.inference.load import load_run
from maxmeg.parallel import multihost
from maxmeg.parallel.mesh import local_mesh
from maxmeg.parallel.placement import local_rows
from maxmeg.step import make_eval_step


@dataclasses.dataclass
class Options:
    """What to evaluate, on what."""

    run_dir: str = setting("runs/gpt", "folder of the run")
    step: int = setting(-1, "of the checkpoint; -1: the newest intact one")
    split: str = setting("validation", "train | validation | test")
    paths: tuple[str, ...] = setting((), "prefixes of another corpus, read whole; empty: the run's")
    num_batches: int = setting(0, "batches read; 0: the split once")
    batch_size: int = setting(16, "samples at once, >= 1")
    tensor: int = setting(1, "devices that share the model")


def main(options: Options) -> None:
    multihost.order_cpu_collectives()
    if options.split not in SPLITS:
        raise ValueError(f"split={options.split!r} must be one of {', '.join(SPLITS)}")
    if options.batch_size < 1 or options.num_batches < 0:
        raise ValueError(
            f"batch_size={options.batch_size} must be at least 1 and "
            f"num_batches={options.num_batches} at least 0"
        )
    step = None if options.step < 0 else options.step
    trained = load_run(options.run_dir, step, local_mesh(options.tensor))
    config = trained.config
    config.train.global_batch_size = options.batch_size
    config.train.micro_batch_size = 0
    validate(config, options.tensor)
    index = SPLITS.index(options.split)
    if options.paths:
        config.data.paths = options.paths
        config.data.split = ",".join(str(int(i == index)) for i in range(len(SPLITS)))
    tokenizer, prefixes = open_corpus(config.data, options.run_dir)
    data = build_dataset(
        config.data, prefixes, tokenizer, index, config.seed, config.model.vocab_size
    )
    if data is None:
        raise ValueError(f"data.split={config.data.split!r} leaves the {options.split} split empty")
    num_batches = options.num_batches or max(data.samples_per_epoch // options.batch_size, 1)
    eval_step = make_eval_step(config, trained.mesh, trained.model)
    size, rows = options.batch_size, local_rows(trained.mesh)
    batches = eval_batches(data, num_batches, size, rows)
    loss, tokens = mean_loss(eval_step, trained.model, batches, trained.mesh, size, rows)
    print(
        f"step {trained.step}  {options.split} loss {loss:.4f} nats per token  "
        f"perplexity {math.exp(min(loss, 700)):.3f}  {tokens:.0f} tokens"
    )


if __name__ == "__main__":
    run_command(main, Options, needs_config=False)
