"""Open a Hugging Face folder, and match its tensors with the arrays of the model."""

import os
import typing
from collections.abc import Mapping
from pathlib import Path

from maxmeg.checkpoint.integrity import some
from maxmeg.checkpoint.stream import row_blocks
from maxmeg.config.model import ModelConfig
from maxmeg.hf.families import read as families
from maxmeg.hf.families.binding import Binding, Place
from maxmeg.hf.formats.quantized import dequantized
from maxmeg.hf.formats.safetensors import DTYPES, read_json
from maxmeg.hf.formats.source import Source, Weights
from maxmeg.hf.formats.torch_files import open_weights

GENERATION = "generation_config.json"
TOKENIZER_FILES = ["tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"]
TOKENIZER_FILES += ["vocab.txt", "merges.txt", "tokenizer.model", "*.jinja", "chat_template.json"]
SMALL_FILES = ("config.json", GENERATION, *TOKENIZER_FILES, "LICENSE*", "NOTICE*")  # never code
EXACT = [DTYPES[name] for name in ("F32", "BF16", "F16")]  # dtypes that float32 represents exactly
Pairs: typing.TypeAlias = list[tuple[str, Binding]]


def open_folder(folder: str | os.PathLike[str]) -> Source:
    """Open a folder that transformers' save_pretrained wrote; ValueError for any other."""
    folder = Path(folder)
    weights: Weights = open_weights(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json, which describes the model: add it")
    small, original = small_files(folder), read_json(path)
    config, weights, notes = dequantized(original, weights)
    if config is not original:  # the original describes quantized weights, which the run has not
        small = tuple(path for path in small if path.name != "config.json")
    return Source(config, weights, small, notes=notes)


def small_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a folder beside its weights and its code."""
    paths = (path for pattern in SMALL_FILES for path in sorted(folder.glob(pattern)))
    return tuple(path for path in paths if path.is_file())


def model_of(source: Source) -> tuple[str, ModelConfig]:
    """Return the family and the model of a source, with MTP layers only if its files have them."""
    family, model = families.architecture(source.config), families.model_config(source.config)
    return family, families.with_saved_tensors(model, source.weights.tensors, family)


def match(weights: Weights, model: ModelConfig, family: str) -> Pairs:
    """Return (name in the files, binding) for every tensor of a model, in the bindings' order.

    ValueError naming tensors that are missing, unknown, duplicate, or of another shape or dtype.
    The repetition of a tied tensor must be equal to it.
    """
    names: dict[str, str] = {}
    for name, canonical in families.canonical_names(weights.tensors, family).items():
        if canonical in names:
            raise ValueError(
                f"{names[canonical]} and {name} are both {canonical}: remove one of them"
            )
        names[canonical] = name
    for alias, original in families.aliases(model, family).items():
        if alias in names and original in names:
            _check_equal(weights, names.pop(alias), names[original])
    for name in families.unread_tensors(model, family):
        names.pop(name, None)
    known_bindings = families.bindings_of_files(names, model, family)
    bindings = {binding.theirs: binding for binding in known_bindings}
    _check_experts(weights, names, bindings, model, family)
    problems = []
    if missing := [name for name in bindings if name not in names]:
        problems.append(f"{len(missing)} tensors are missing: {some(missing)}")
    if extra := [name for canonical, name in names.items() if canonical not in bindings]:
        problems.append(f"{len(extra)} tensors do not belong to a {family}: {some(extra)}")
    for canonical, binding in bindings.items():
        info = weights.tensors[names[canonical]] if canonical in names else None
        if info and (info.shape != binding.shape or info.dtype not in EXACT):
            problems.append(
                f"{names[canonical]} is {info.dtype}{list(info.shape)}: config.json needs shape "
                f"{list(binding.shape)}, in float32, bfloat16 or float16"
            )
    if problems:
        raise ValueError("the tensors do not fit config.json:\n" + some(problems, "\n"))
    return [(names[canonical], binding) for canonical, binding in bindings.items()]


def describe_match(matched: Pairs) -> list[str]:
    """Return one line per tensor: its name, its shape and the arrays that hold it."""
    return [
        f"{name} {list(binding.shape)} <-> {', '.join(_label(place) for place in binding.ours)}"
        for name, binding in matched
    ]


def find_tokenizer(folder: Path) -> str:
    """Return data.tokenizer for the tokenizer in a folder; empty if there is none."""
    if (folder / "tokenizer.json").exists():
        return f"huggingface:{folder / 'tokenizer.json'}"
    if (folder / "tokenizer.model").exists():
        return f"sentencepiece:{folder / 'tokenizer.model'}"
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return f"gpt2:{folder}"
    return ""


def _check_experts(
    weights: Weights,
    names: Mapping[str, str],
    bindings: Mapping[str, Binding],
    model: ModelConfig,
    family: str,
) -> None:
    """ValueError if the files have another number of experts than config.json says."""
    counts = {families.num_experts_in(names, family)}
    for canonical, binding in bindings.items():
        if binding.stacked and canonical in names:
            counts |= {(*weights.tensors[names[canonical]].shape, 0)[0]}
    if others := counts - {0, model.moe.num_experts}:
        raise ValueError(
            f"the files hold {', '.join(map(str, sorted(others)))} experts per layer, config.json "
            f"has {model.moe.num_experts}: one of them belongs to another model"
        )


def _check_equal(weights: Weights, name: str, other: str) -> None:
    """ValueError if two tied tensors differ in any bit."""
    a, b = weights.tensors[name], weights.tensors[other]
    equal = a == b
    if equal:
        x, y = weights.read(name), weights.read(other)
        blocks = row_blocks(a.shape, a.dtype.itemsize)
        equal = all(x[rows].tobytes() == y[rows].tobytes() for rows in blocks)
    if not equal:
        raise ValueError(
            f"{name} and {other} are tied by config.json but differ: set tie_word_embeddings to "
            "false if both are meant"
        )


def _label(place: Place) -> str:
    return f"{place.name}[{', '.join(map(str, place.index))}]" if place.index else place.name
