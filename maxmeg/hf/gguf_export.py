"""Write a run's model as a GGUF file for llama.cpp, by the tables of hf/formats/gguf.py.

The metadata are read back before anything is written: a model that they cannot describe is refused.
"""

import math
import os
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from maxmeg.checkpoint.names import VOCABULARY_TABLES
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.options import Quantize
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.data.chat.ends import end_tokens
from maxmeg.data.chat.template import has_chat_template, load_chat_template
from maxmeg.data.tokenizers.load import load_tokenizer, parse_spec
from maxmeg.hf.convert import Report
from maxmeg.hf.families import read as families
from maxmeg.hf.families.binding import Binding
from maxmeg.hf.formats import gguf
from maxmeg.hf.formats.gguf_tokenizer import PREFIX, TEMPLATE, tokenizer_fields
from maxmeg.hf.trained import TrainedModel
from maxmeg.runtime.screen import tracked

# Type of the matrices, and the number of llama.cpp for a file of it (general.file_type).
TYPES: Mapping[DType | Quantize, tuple[str, int]] = {
    DType.float32: ("F32", 0),
    DType.float16: ("F16", 1),
    DType.bfloat16: ("BF16", 32),
    Quantize.q4_0: ("Q4_0", 2),
    Quantize.q8_0: ("Q8_0", 7),
}
VOCABULARY = ("token_embd.weight", "output.weight")  # of 8 bits in files of 4 bits
Fields = dict[str, typing.Any]


def export_gguf(
    run: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: DType = DType.bfloat16,
    quantize: Quantize = Quantize.none,
    step: int | None = None,
    average: bool = False,
) -> Report:
    """Write a run's model as a GGUF file; merge adapters.

    dtype, quantize: type of the matrices; vectors are float32. step: default the newest. average:
    write the averages of optim.ema. ValueError where GGUF cannot describe the model or its
    tokenizer.
    """
    form = dtype if quantize is Quantize.none else quantize
    if form not in TYPES:
        raise ValueError(f"--quantize={quantize.value} needs --to=huggingface: GGUF has q8_0, q4_0")
    run, target = Path(run), Path(target)
    if target.exists() or target.suffix != ".gguf":
        raise ValueError(f"--output={target}: name a file that does not exist, ending in .gguf")
    library = gguf.load_library(f"writing {target}")
    trained = TrainedModel(run, step, average)
    model, name = trained.model.without_mtp(), architecture(trained.model)
    tokenizer = read_tokenizer(trained.config, model.vocab_size)
    fields = {"general.name": run.resolve().name, **metadata(model, name), **tokenizer}
    fields |= {"general.file_type": TYPES[form][1], "general.quantization_version": 2}
    tensors: dict[str, list[Binding]] = {}  # by name; all experts of a layer share a tensor
    for b in families.bindings(model, gguf.FAMILIES[name].name):
        tensors.setdefault(gguf.ggml_name(b.theirs, name), []).append(b)
    shapes = {
        tensor: gguf.ggml_shape(tensor, len(parts), parts[0].shape)
        for tensor, parts in tensors.items()
    }
    heads = {
        "num_attention_heads": model.attention.num_heads,
        "num_key_value_heads": model.kv_heads,
    }
    kinds = {tensor: _kind(library, tensor, shape, form) for tensor, shape in shapes.items()}
    partial = target.with_name(target.name + ".partial")
    writer = library.GGUFWriter(partial, name.split()[0])
    try:
        for key, value in fields.items():
            _adder(writer, value)(key, value)
        factors = rotary_factors(model)
        if factors is not None:
            writer.add_tensor_info(gguf.ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        for tensor, kind in kinds.items():
            shape = library.quants.quant_shape_to_byte_shape(shapes[tensor], kind)
            writer.add_tensor_info(tensor, shape, np.dtype(np.uint8), math.prod(shape), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for tensor, parts in tracked(tensors.items(), "converting"):
            arrays = (gguf.to_ggml(b.theirs, _tensor(trained, b), name, heads) for b in parts)
            rows = (library.quants.quantize(array, kinds[tensor]) for array in arrays)
            joined = [np.ascontiguousarray(row).view(np.uint8) for row in rows]
            writer.write_tensor_data(np.concatenate(joined))
        writer.close()
        partial.rename(target)
    except BaseException:
        writer.close()
        partial.unlink(missing_ok=True)
        raise
    notes = [*_notes(library, kinds, form)]
    if trained.model.mtp.num_layers:
        notes.append(
            f"MTP layers are left out (model.mtp.num_layers={trained.model.mtp.num_layers})"
        )
    count = sum(map(math.prod, shapes.values()))
    spec = trained.config.data.tokenizer
    return Report(name, len(tensors), count, spec, tuple(notes), f"llama-cli -m {target}")


def architecture(model: ModelConfig) -> str:
    """Return GGUF's architecture of a model; ValueError if it has none that describes the model."""
    model, problems = model.without_mtp(), []
    for name in gguf.FAMILIES:
        try:
            metadata(model, name)
        except ValueError as error:
            problems.append(f"{name}: {error}")
        else:
            return name
    classes = " or ".join(families.families_of(model)) or "of no class of transformers"
    nearest = min(problems, key=len).split("; ")[0]
    raise ValueError(
        f"GGUF is written for {', '.join(gguf.FAMILIES)}, and the run's model is {classes}: leave "
        f"--to=gguf out ({nearest})"
    )


def metadata(model: ModelConfig, name: str) -> Fields:
    """Return the metadata of a model without its tokenizer.

    ValueError if they do not describe the model.
    """
    family, prefix = gguf.FAMILIES[name], name.split()[0]
    model = with_fields(model, {"moe.aux_loss": 0.0})  # of training
    config = families.hf_config(model, family.name)
    config |= {"head_dim": model.head_size, "num_key_value_heads": model.kv_heads}
    entries = {key: config[hf] for key, hf in family.keys.items() if config.get(hf) is not None}
    entries = {
        key: float(np.float32(v)) if isinstance(v, float) else v for key, v in entries.items()
    }
    entries |= {"vocab_size": model.vocab_size, "rope.dimension_count": model.head_size}
    entries |= {"attention.value_length": model.head_size}
    rotary = model.rotary
    if rotary.scaling in (RotaryScaling.linear, RotaryScaling.yarn):
        entries |= {"rope.scaling.type": rotary.scaling.value, "rope.scaling.factor": rotary.factor}
        if rotary.scaling is RotaryScaling.yarn:
            entries["rope.scaling.original_context_length"] = rotary.original_length
    fields = {f"{prefix}.{key}": value for key, value in entries.items()}
    described, _ = gguf.describe(
        {"general.architecture": prefix} | fields,
        model.vocab_size,
        model.tied,
        rotary_factors(model),
    )
    if problems := families.differences(model, families.model_config(described)):
        raise ValueError(f"its metadata cannot say {'; '.join(problems)}")
    return fields


def rotary_factors(model: ModelConfig) -> np.ndarray | None:
    """Return the divisors of the rotary frequencies, which Llama 3 needs."""
    if model.rotary.scaling is not RotaryScaling.llama3:
        return None
    factors = gguf.llama3_factors(model.rotary.base, model.head_size, model.rotary.factor)
    return factors.astype(np.float32)


def read_tokenizer(config: Config, vocab_size: int) -> Fields:
    """Return the metadata of a run's tokenizer; ValueError if GGUF cannot describe it."""
    spec, loaded = parse_spec(config.data.tokenizer), load_tokenizer(config.data.tokenizer)
    path = Path(spec.argument)
    path = path / "tokenizer.json" if path.is_dir() else path
    if spec.kind not in ("huggingface", "sentencepiece") or spec.options:
        raise ValueError(
            f"data.tokenizer={config.data.tokenizer}: a GGUF file holds its tokenizer, which must "
            "be huggingface:FILE or sentencepiece:FILE without options"
        )
    ends = end_tokens(loaded, config.data, vocab_size)
    ids = {"bos": loaded.bos, "eos": ends[0], "unknown": loaded.unk, "padding": loaded.pad}
    ids |= {"eot": ends[-1]} if len(ends) > 1 else {}
    fields = {f"{PREFIX}{role}_token_id": i for role, i in ids.items() if i is not None}
    fields |= tokenizer_fields(path, vocab_size, bool(loaded.opening), fields)
    if has_chat_template(loaded, config.data.chat_template):
        fields[TEMPLATE] = load_chat_template(loaded, config.data.chat_template).text
    return fields


def _tensor(trained: TrainedModel, binding: Binding) -> np.ndarray:
    """Return a tensor by transformers' names, float32."""
    if binding.ours[0].name in VOCABULARY_TABLES:
        return np.concatenate([*trained.words(binding.ours[0].name)])
    ((_, piece),) = binding.pieces()
    return np.asarray(piece.join([*map(trained.read, piece.ours)]), np.float32)


def _kind(
    library: typing.Any, name: str, shape: tuple[int, ...], form: DType | Quantize
) -> typing.Any:
    """Return the type of a tensor in the file."""
    kinds, (chosen, _) = library.GGMLQuantizationType, TYPES[form]
    if len(shape) < 2 or gguf.ROUTER in name:
        return kinds.F32
    if isinstance(form, DType):
        return kinds[chosen]
    if shape[-1] % library.GGML_QUANT_SIZES[kinds[chosen]][0]:
        return kinds.F16
    return kinds.Q8_0 if name in VOCABULARY else kinds[chosen]


def _notes(
    library: typing.Any, kinds: Mapping[str, typing.Any], form: DType | Quantize
) -> Iterator[str]:
    """Yield what the user should know about the types of the tensors."""
    halves = [name for name, kind in kinds.items() if kind is library.GGMLQuantizationType.F16]
    if halves and isinstance(form, Quantize):
        yield f"{len(halves)} matrices whose rows 32 does not divide are float16"


def _adder(writer: typing.Any, value: typing.Any) -> typing.Any:
    """Return the writer's method for a value of this type."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adders |= {str: writer.add_string, list: writer.add_array}
    return adders[type(value)]
