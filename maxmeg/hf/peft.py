"""Adapters as folders of peft: export those of a run, and read those of any training.

Where a family fuses projections, one adapter whose rank is the sum of their ranks computes exactly
the same: its A stacks theirs, its B is block-diagonal.
"""

import dataclasses
import json
import os
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from maxmeg.checkpoint.integrity import some
from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import LoraConfig
from maxmeg.data import run_folder
from maxmeg.hf.families.binding import Binding, Place
from maxmeg.hf.families.read import bindings, table_of
from maxmeg.hf.folder import Reader
from maxmeg.hf.formats.safetensors import SINGLE, SafetensorsFile, SafetensorsWriter, read_json
from maxmeg.hf.trained import carried_config, carried_folder, choose_family, open_run

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
PREFIX = "base_model.model."  # of the names of modules
PLAIN = {  # values of settings with which an adapter is alpha / rank A B beside a frozen projection
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False,)),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), (None,)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "trainable_token_indices"), (None,)),
}
# (A [in, rank], B [rank, out]) by projection ("stack.groups.0...query") and layer of the group.
Adapter = dict[str, dict[int, tuple[np.ndarray, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of transformers with an adapter.

    adapted: the projections fused in it that have adapters. rank: the sum of their ranks.
    """

    name: str
    binding: Binding
    adapted: tuple[Place, ...]
    rank: int
    width_in: int
    width_out: int

    def tensors(self) -> dict[str, TensorInfo]:
        a, b = (f"{PREFIX}{self.name}.{name}.weight" for name in ("lora_A", "lora_B"))
        single = np.dtype(np.float32)
        return {
            a: TensorInfo(single, (self.rank, self.width_in)),
            b: TensorInfo(single, (self.width_out, self.rank)),
        }


def export_adapter(
    run_dir: str, target: str, *, step: int | None = None, family: str = "", base: str = ""
) -> Path:
    """Write the adapters of a LoRA run to a PEFT folder `target`, which must not hold weights.

    step: default the newest. family: default that of the folder the base was imported from. base:
    name or folder of the base model for adapter_config.json, default the name in the config.json
    that the base was imported with, else the folder of that file, which has no weights. ValueError
    for a run without adapters.
    """
    reader = open_run(Path(run_dir), step)
    config = run_folder.read(reader.metadata["config"], run_dir)
    if not config.lora.rank:
        raise ValueError(f"{run_dir} has lora.rank=0, no adapters: export the whole model instead")
    if config.model.mup.base_hidden_size:
        raise ValueError(
            f"{run_dir} has model.mup.base_hidden_size={config.model.mup.base_hidden_size}, whose "
            "factors an adapter alone cannot have: export the whole model instead"
        )
    carried = carried_folder(run_dir, config)
    imported = carried_config(carried)
    family = choose_family(config.model, imported, family)
    first = table_of(family).outputs_first
    every = bindings(config.model, family)
    modules = adapted_modules(every, reader.tensors, config.lora.rank, first)
    tensors = [module.tensors() for module in modules]
    announced = {name: info for each in tensors for name, info in each.items()}
    with SafetensorsWriter(target, announced, max_shard_bytes=2**62) as writer:
        for module, names in zip(modules, tensors, strict=True):
            for name, array in zip(names, fused(module, reader, first), strict=True):
                writer.write(name, array)
    os.replace(Path(target, SINGLE), Path(target, WEIGHTS))
    settings = adapter_config(config.lora, modules, every, first)
    settings["base_model_name_or_path"] = base or imported.get("_name_or_path") or str(carried)
    settings["task_type"] = "SEQ_2_SEQ_LM" if config.model.has_source else "CAUSAL_LM"
    Path(target, SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return Path(target)


def array_of(place: Place, name: str) -> str:
    """Return the path in a checkpoint of a weight's adapter matrix A or B ("a", "b")."""
    return "/".join(["model", *place.name.split(".")[:-1], "lora", name])


def adapted_modules(
    every: Sequence[Binding], arrays: Mapping[str, TensorInfo], rank: int, outputs_first: bool
) -> list[Module]:
    modules = []
    for binding in every:
        adapted = tuple(place for place in binding.ours if array_of(place, "a") in arrays)
        if adapted and binding.theirs.endswith(".weight"):
            sizes = binding.shape[::-1] if outputs_first else binding.shape
            name = binding.theirs.removesuffix(".weight")
            modules.append(Module(name, binding, adapted, rank * len(adapted), *sizes))
    return modules


def fused(module: Module, reader: Reader, outputs_first: bool) -> tuple[np.ndarray, ...]:
    """Return A [rank, in] and B [out, rank] of a module, from those of its projections."""
    a_parts = [reader.read(array_of(place, "a"), place.index) for place in module.adapted]
    one = (module.width_out, 1) if outputs_first else (1, module.width_out)
    widths = [part.shape[1] for part in module.binding.split(np.zeros(one, np.float32))]
    parts, first = [], 0
    for place, width in zip(module.binding.ours, widths, strict=True):
        part = np.zeros((module.rank, width), np.float32)
        if place in module.adapted:
            b = reader.read(array_of(place, "b"), place.index)
            part[first : first + len(b)] = b
            first += len(b)
        parts.append(part)
    b = module.binding.join(parts)
    return np.concatenate(a_parts, axis=1).T, b if outputs_first else b.T


def adapter_config(
    lora: LoraConfig, modules: Sequence[Module], every: Sequence[Binding], outputs_first: bool
) -> dict[str, typing.Any]:
    """Return the settings of peft's LoraConfig; patterns give the ranks of fused modules."""
    wide = {module.name: len(module.adapted) for module in modules if len(module.adapted) > 1}
    return {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": endings([module.name for module in modules], every),
        "rank_pattern": {name: count * lora.rank for name, count in wide.items()},
        "alpha_pattern": {name: count * lora.alpha for name, count in wide.items()},
        "fan_in_fan_out": not outputs_first,
        "bias": "none",
        "inference_mode": True,
    }


def endings(names: Sequence[str], every: Sequence[Binding]) -> list[str]:
    """Return the shortest suffixes that only these modules have: "q_proj" for every layer."""
    others = {binding.theirs.rpartition(".")[0] for binding in every} - set(names)

    def shortest(name: str) -> str:
        parts = name.split(".")
        tails = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        return next(tail for tail in tails if not any(f".{o}".endswith(f".{tail}") for o in others))

    return sorted({shortest(name) for name in names})


def read_adapter(folder: str | os.PathLike, model: ModelConfig, family: str) -> Adapter:
    """Return the adapter in a PEFT folder, alpha / rank within B.

    ValueError for anything beside adapters of projections that the model has.
    """
    file, settings = SafetensorsFile(Path(folder, WEIGHTS)), read_json(Path(folder, SETTINGS))
    for name, values in PLAIN.items():
        if (value := settings.get(name)) and value not in values:
            raise ValueError(
                f"{folder}: {name}={value!r} in {SETTINGS} is not supported, only "
                f"{' or '.join(map(repr, values))}: merge the adapter into its base with peft "
                "(merge_and_unload), and convert that"
            )
    adapter, unknown, outputs_first = Adapter(), {*file.tensors}, table_of(family).outputs_first
    for binding in bindings(model, family):
        module = binding.theirs.removesuffix(".weight")
        names = [f"{PREFIX}{module}.{name}.weight" for name in ("lora_A", "lora_B")]
        layers = {place.layer for place in binding.ours if place.name.endswith(".weight")}
        if not unknown.issuperset(names) or layers <= {None}:
            continue
        unknown.difference_update(names)
        a, b = (file.read(name).astype(np.float32) for name in names)
        inputs, outputs = binding.shape[::-1] if outputs_first else binding.shape
        if (a.shape, b.shape) != ((len(a), inputs), (outputs, len(a))):
            raise ValueError(
                f"{folder}: {module} has lora_A {a.shape} and lora_B {b.shape}, and the model "
                f"{inputs} inputs and {outputs} outputs: the adapter is of another model"
            )
        b = scale_of(module, len(a), settings) * (b if outputs_first else b.T)
        for place, part in zip(binding.ours, binding.split(b), strict=True):
            projection = adapter.setdefault(place.name.removesuffix(".weight"), {})
            projection[place.layer or 0] = a.T, part
    if unknown or not adapter:
        raise ValueError(
            f"{folder}: {len(unknown)} tensors are not adapters of projections of the model: "
            f"{some(sorted(unknown))}"
        )
    return adapter


def scale_of(module: str, rank: int, settings: Mapping[str, typing.Any]) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA.

    alpha_pattern: alphas of modules, by the ends of their names. peft reads these as regular
    expressions; a downloaded file could hold one that takes for ever. ValueError for one that is
    not a name.
    """
    patterns: dict[str, float] = settings.get("alpha_pattern") or {}
    if others := [name for name in patterns if not re.fullmatch(r"\^?[\w.]+", name)]:
        raise ValueError(
            f"{SETTINGS} has alpha_pattern {some(others)}: only names of modules are supported, "
            "such as q_proj or layers.0.self_attn.q_proj, not regular expressions"
        )
    alphas = (
        alpha
        for name, alpha in patterns.items()
        if f"^.{module}".endswith(f"^.{name[1:]}" if name.startswith("^") else f".{name}")
    )
    alpha = next(alphas, settings.get("lora_alpha", 8))
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)
