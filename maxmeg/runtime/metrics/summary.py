"""What a run is about to train, in lines of a terminal: model, parameters, memory, mesh, batch; and
what it has made at its end."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from maxmeg.config import files
from maxmeg.config.schema import Config, Optimizer
from maxmeg.data import run_folder
from maxmeg.ops.attention.call import warn_of_xla
from maxmeg.ops.recipes import recipe_of
from maxmeg.parallel.parameter import info
from maxmeg.planning.automatic import chosen_words, cluster_here
from maxmeg.planning.cost.parameters import num_parameters, parameters
from maxmeg.planning.remedies import planned_kernels, planned_memory
from maxmeg.runtime.metrics.memory import memory_limit
from maxmeg.runtime.metrics.parameter_table import parameter_rows, parameter_table
from maxmeg.runtime.metrics.plots import validation_words, write_plots
from maxmeg.runtime.metrics.progress import memory_size, quantity
from maxmeg.runtime.screen import say, width
from maxmeg.runtime.slurm import resuming_words

_BATCH_AXES = ("data", "fsdp", "expert")


def summary(config: Config, axes: Mapping[str, int], state) -> Iterator[tuple[str, str]]:
    """(label, text) of each line. axes: sizes of the mesh axes, as the settings name them.

    state: the abstract train state, with shardings.
    """
    yield "model", model_words(config)
    yield "params", parameter_words(config)
    yield "memory", memory_words(config, state)
    if words := planned_kernels(config, jax.device_count())[0]:
        yield "kernels", words
    yield "mesh", mesh_words(config, axes)
    if words := chosen_words(config, cluster_here()):
        yield "layout", words
    yield "batch", batch_words(config, axes)


def model_words(config: Config) -> str:
    model = config.model
    words = [f"{model.num_layers} layers", f"hidden {model.hidden_size}"]
    if model.has("attention") or model.is_mla:
        shared = model.kv_heads != model.attention.num_heads and not model.is_mla
        kv = f" ({model.kv_heads} KV)" if shared else ""
        words.append(f"{model.attention.num_heads} heads{kv}")
    words += [f"vocabulary {model.vocab_size:,}", model.dtype.name]
    if share := quantized_share(config):
        words.append(f"{config.train.quantization.recipe.name} for {share:.0%} of parameters")
    return ", ".join(words)


def quantized_share(config: Config) -> float:
    """Fraction of the parameters that train.quantization rounds."""
    recipe, model = recipe_of(config.train.quantization), config.model
    sizes = [p.variable.size for p in parameters(model) if p.is_quantized(recipe)]
    return sum(sizes) / num_parameters(model)[0]


def parameter_words(config: Config) -> str:
    """Numbers of parameters without the padding of the vocabulary: all; of a mixture of experts
    also those that one token uses; with adapters also those that are trained."""
    model, trained = config.model, 0
    if config.lora.rank:
        arrays = [parameter.variable for parameter in parameters(model, config.lora)]
        trained = sum(array.size for array in arrays if info(array).is_trained)
    total, active = (number + trained for number in num_parameters(model))
    words = f"{total:,}" if total < 10**7 else quantity(total)
    if model.has("moe"):
        words += f", {quantity(active)} active (top {model.moe.top_k} of {model.moe.num_experts}"
        words += " experts)"
    if config.lora.rank:
        words += f", {quantity(trained)} trainable ({100 * trained / total:.2g} %, LoRA rank "
        words += f"{config.lora.rank})"
    return words


def memory_words(config: Config, state) -> str:
    """Memory per device: of the state by its shardings, of a whole step by the planner."""
    words = f"{memory_size(_bytes((state.model, state.remainders)))} parameters, "
    words += f"{memory_size(_bytes((state.optimizer, state.ema)))} optimizer"
    notes = [config.optim.optimizer.name] * (config.optim.optimizer is not Optimizer.adamw)
    notes += ["with averages"] * (config.optim.ema.decay > 0)
    notes += ["in host memory"] * config.optim.offload
    words += f" ({', '.join(notes)})" if notes else ""
    planned, limit = planned_memory(config, jax.device_count()), memory_limit()
    if planned:
        estimate = sum(planned.values())
        words += f", step ~{memory_size(estimate)}"
        if limit:
            words += ", more than the pool" * (estimate > limit) + f" of {memory_size(limit)}"
    return f"{words} per device"


def mesh_words(config: Config, axes: Mapping[str, int]) -> str:
    count, kind = math.prod(axes.values()), jax.devices()[0].device_kind
    words = f"{count} {kind} device{'s' * (count > 1)}"
    if large := " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1):
        words += f": {large}"
    if config.parallel.expert > axes["expert"]:  # also along tensor or context
        words += f" (experts over {config.parallel.expert} devices)"
    if jax.process_count() > 1:
        words += f", {jax.process_count()} processes"
    return words


def batch_words(config: Config, axes: Mapping[str, int]) -> str:
    train, length = config.train, config.data.sequence_length
    size = train.global_batch_size
    shards = math.prod(axes[name] for name in _BATCH_AXES)
    number = size // (shards * train.micro_batch_size) if train.micro_batch_size else 1
    words = f"{size:,} samples of {length:,} tokens in {number:,} microbatch{'es' * (number > 1)}"
    grows = bool(train.batch_rampup or train.batch_schedule)
    words = f"up to {words}" if grows else words
    words += f"; {train.num_steps:,} step{'s' * (train.num_steps > 1)}"
    return words if grows else f"{words}, {quantity(train.num_steps * size * length)} tokens"


def _bytes(tree) -> int:
    """Bytes of one device's shards of all arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def print_resumed(
    config: Config, step: int, metadata: Mapping[str, Any], verb: str = "resumed"
) -> None:
    """Print the step that a run goes on from, and what changed since. metadata: {} of a new run."""
    if metadata:
        say(f"{verb} at step {step}, sample {metadata['consumed_samples']:,}")
        if changed := files.differences(metadata["config"], run_folder.stored(config)):
            say(f"changed since step {step}: {', '.join(changed)}")
    if step >= config.train.num_steps:
        say(
            f"already finished at step {step}: raise train.num_steps={config.train.num_steps} to "
            "train further, or choose another run_dir"
        )


def print_summary(config: Config, axes: Mapping[str, int], state) -> None:
    """Print the `summary` and, with log.parameters, all parameters; warn of kernels that a GPU
    lacks. Arguments as of `summary`."""
    for label, text in summary(config, axes, state):
        say(text, label)
    for reason, words in planned_kernels(config, jax.device_count())[1].items():
        warn_of_xla(reason, words)
    if config.log.parameters:
        table = parameter_table(parameter_rows(state.model), width())
        print(*table, sep="\n", flush=True)


def print_end(config: Config, step: int, sample: str, saved: bool) -> None:
    """Print a sample of text, validation losses and where things are, and draw the charts.

    step: of the last state; saved: whether its checkpoint is complete."""
    if sample:
        lines = (line.rstrip() for line in sample.rstrip().splitlines())
        print("", "--- sample", *lines, "---", sep="\n")
    if words := validation_words(config.run_dir):
        print(f"{words}{', of the averaged weights' * config.optim.ema.evaluates}")
    for title, path in write_plots(config.run_dir).items():
        print(f"{title}: {path}")
    if saved:
        print(f"checkpoint: {files.checkpoint_folder(config)}, step {step}")
    if step < config.train.num_steps:
        print(f"stopped after step {step}; {resuming_words()}")
