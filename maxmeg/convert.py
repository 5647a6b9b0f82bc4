"""Convert a model: python -m maxmeg.convert --input=HF_FOLDER --output=FOLDER

Or --input=FILE.gguf, or a folder of Megatron-LM's torch_dist (needs torch; --config if it names no
architecture). Back: --to=huggingface --input=RUN_DIR merges adapters, --to=peft writes them alone.
"""

import dataclasses
import enum
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

import jax

from maxmeg.config.flags import run_command
from maxmeg.config.model import DType
from maxmeg.config.schema import Config
from maxmeg.config.setting import setting
from maxmeg.hf import convert, peft
from maxmeg.hf.formats import gguf
from maxmeg.hf.formats.source import Source
from maxmeg.megatron import convert as megatron


class To(enum.Enum):
    maxmeg = "maxmeg"
    huggingface = "huggingface"
    peft = "peft"


@dataclasses.dataclass
class Options:
    """Input, output and format."""

    input: str = setting(
        dataclasses.MISSING, "folder of Hugging Face, Megatron or a run, or a .gguf file"
    )
    output: str = setting("", "folder to create: a run's, Hugging Face's or PEFT's")
    to: To = setting(To.maxmeg, "maxmeg | huggingface | peft")
    list: bool = setting(False, "show tensors and arrays, write nothing")
    tokenizer: str = setting(
        "", "--to=maxmeg: as data.tokenizer, or a tokenizer.json; empty: the input's"
    )
    dtype: DType = setting(DType.bfloat16, "--to=huggingface: of weights, bfloat16 | float32")
    step: int = setting(-1, "--to=huggingface: step of the checkpoint; -1: the newest")
    shard_gb: float = setting(5.0, "--to=huggingface: most 10^9 bytes per file, > 0")
    family: str = setting("", "architecture in transformers; empty: the model's")


def main(*arguments: typing.Any) -> None:
    """Convert. arguments: (options,) or (config, options)."""
    config: Config | None = arguments[0] if len(arguments) == 2 else None
    options: Options = arguments[-1]
    # Only checksums are computed: leave the accelerators to other programs.
    jax.config.update("jax_platforms", "cpu")
    if not options.output and not options.list:
        raise ValueError("no --output: name the folder to create, or add --list to see the tensors")
    if options.shard_gb <= 0:
        raise ValueError(f"--shard_gb={options.shard_gb} must be positive")
    inward = options.to is To.maxmeg
    from_megatron = inward and megatron.is_checkpoint(options.input)
    if (config and not from_megatron) or (options.list and from_megatron):
        raise ValueError(f"{options.input}: --config is for Megatron's, --list for all others")
    if options.list:
        if inward:
            pairs = convert.imported(opened(options))
        else:
            pairs = convert.exported(options.input, options.family)
        print("\n".join(convert.describe_match(pairs)))
        return
    step = None if options.step < 0 else options.step
    if options.to is To.peft:
        peft.export_adapter(options.input, options.output, step=step, family=options.family)
        print(f"adapters -> {options.output}")
        return
    report = to_maxmeg(options, config) if inward else to_huggingface(options, step)
    print(
        f"{report.family}: {report.num_tensors} tensors, {report.num_parameters:,} parameters"
        f" -> {options.output}\ntokenizer: {report.tokenizer}"
    )
    for note in report.notes:
        print(f"note: {note}")
    if inward:
        prompt = "'ID ID ...'" if report.tokenizer.startswith("null:") else "TEXT"
        print(f"next: python -m maxmeg.generate --run_dir={options.output} --prompt={prompt}")
    else:
        print(f"next: transformers.AutoModelForCausalLM.from_pretrained('{options.output}')")


def to_huggingface(options: Options, step: int | None) -> convert.Report:
    limit = int(options.shard_gb * 1e9)
    return convert.export_model(
        options.input, options.output, options.dtype, limit, step, options.family
    )


def to_maxmeg(options: Options, config: Config | None) -> convert.Report:
    tokenizer = options.tokenizer
    is_file = tokenizer.endswith(".json") and ":" not in tokenizer
    if megatron.is_checkpoint(options.input):
        tokenizer = f"huggingface:{Path(tokenizer).absolute()}" if is_file else tokenizer
        return megatron.import_megatron(options.input, options.output, config, tokenizer)
    source = opened(options)
    if is_file:
        source, tokenizer = convert.with_tokenizer(source, tokenizer), ""
    return convert.import_model(source, options.output, tokenizer)


def has_config(argv: Sequence[str]) -> bool:
    return any(argument.partition("=")[0] == "--config" for argument in argv)


def opened(options: Options) -> Source:
    is_gguf = Path(options.input).suffix == ".gguf"
    return gguf.open_file(options.input) if is_gguf else convert.open_folder(options.input)


if __name__ == "__main__":
    run_command(main, Options, needs_config=has_config(sys.argv))
