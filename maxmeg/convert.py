"""Convert a model: maxmeg convert --input=HF_FOLDER --output=FOLDER

Or --input=FILE.gguf, or a folder of Megatron-LM's torch_dist (needs torch; --config if it names no
architecture). Back: --to=huggingface|gguf --input=RUN_DIR merges adapters, --to=peft writes them.
"""

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    run_module("convert")

import shlex
import typing
from pathlib import Path

import jax

from maxmeg.config import files
from maxmeg.config.options import Convert as Options
from maxmeg.config.options import Quantize, To
from maxmeg.config.schema import Config
from maxmeg.data.chat.template import has_chat_template
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.hf import convert, gguf_export, peft
from maxmeg.hf.families.classifier_tables import CLASSIFIERS
from maxmeg.hf.families.encoder_tables import ENCODERS
from maxmeg.hf.families.t5_tables import ENCODER_DECODERS
from maxmeg.hf.formats.safetensors import read_json
from maxmeg.hf.matching import describe_match
from maxmeg.megatron import convert as megatron


def main(*arguments: typing.Any) -> None:
    """Convert. arguments: (options,) or (config, options)."""
    config: Config | None = arguments[0] if len(arguments) == 2 else None
    options: Options = arguments[-1]
    # Only checksums are computed: leave the accelerators to other programs.
    jax.config.update("jax_platforms", "cpu")
    if not options.output and not options.list:
        raise ValueError("no --output: name the folder to create, or add --list to see the tensors")
    inward = options.to is To.maxmeg
    if options.list and options.quantize is not Quantize.none:
        raise ValueError("--list shows the tensors before they are quantized: omit --quantize")
    from_megatron = inward and megatron.is_checkpoint(options.input)
    if (config and not from_megatron) or (options.list and from_megatron):
        raise ValueError(f"{options.input}: --config is for Megatron's, --list for all others")
    if options.list:
        if inward:
            pairs = convert.imported(convert.open_source(options.input))
        else:
            pairs = convert.exported(options.input, options.family)
        print("\n".join(describe_match(pairs)))
        return
    step = None if options.step < 0 else options.step
    if options.to is To.peft:
        base, chosen = options.base, {"step": step, "family": options.family}
        folder = peft.export_adapter(options.input, options.output, base=base, **chosen)
        named = read_json(folder / peft.SETTINGS)["base_model_name_or_path"]
        print(f"adapters -> {options.output}, base model: {named}")
        if not base and Path(named).is_dir() and not [*Path(named).glob("*.safetensors")]:
            print("note: peft finds no weights there: name the base model with --base=NAME")
        return
    report = to_maxmeg(options, config) if inward else exported(options, step)
    print(
        f"{report.family}: {report.num_tensors} tensors, {report.num_parameters:,} parameters"
        f" -> {options.output}\ntokenizer: {report.tokenizer}"
    )
    for note in report.notes:
        print(f"note: {note}")
    if inward and report.family in CLASSIFIERS:
        print(f"next: maxmeg.load('{options.output}').classify([TEXT, ...])")
    elif inward and report.family in ENCODERS:
        print(f"next: maxmeg train --config=finetune:{options.output}, or maxmeg.load(...).embed")
    elif inward and report.family in ENCODER_DECODERS:
        print(f"next: maxmeg train --config=finetune:{options.output}, with pairs of texts")
    elif inward:
        print(f"next: {next_command(options.output)}")
    else:
        print(f"next: {report.loaded_by}")


def next_command(folder: str) -> str:
    """Return the command that uses an imported decoder: a chat if it has a chat template."""
    data = files.load(Path(folder, files.CONFIG_FILE)).data
    if has_chat_template(load_tokenizer(data.tokenizer), data.chat_template):
        return f"maxmeg chat {shlex.quote(folder)}"
    prompt = "'ID ID ...'" if data.tokenizer.startswith("null:") else "TEXT"
    return f"maxmeg generate {shlex.quote(folder)} --prompt={prompt}"


def exported(options: Options, step: int | None) -> convert.Report:
    if options.to is To.gguf:
        chosen = options.dtype, options.quantize, step, options.average
        return gguf_export.export_gguf(options.input, options.output, *chosen)
    shard_bytes = int(options.shard_gb * 1e9)
    chosen = options.dtype, shard_bytes, step, options.family, options.average, options.quantize
    return convert.export_model(options.input, options.output, *chosen)


def to_maxmeg(options: Options, config: Config | None) -> convert.Report:
    tokenizer = options.tokenizer
    is_file = tokenizer.endswith(".json") and ":" not in tokenizer
    if megatron.is_checkpoint(options.input):
        tokenizer = f"huggingface:{Path(tokenizer).absolute()}" if is_file else tokenizer
        return megatron.import_megatron(options.input, options.output, config, tokenizer)
    source = convert.open_source(options.input)
    if is_file:
        source, tokenizer = convert.with_tokenizer(source, tokenizer), ""
    return convert.import_model(source, options.output, tokenizer)
