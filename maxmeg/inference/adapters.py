"""LoRA adapters that are served beside their base model; each request chooses one, or none.

For each projection, the A (and B) matrices of all adapters are concatenated along the rank. A step
multiplies by both whole matrices, and each row masks the ranks of other adapters: a reply is the
same whichever adapters the other rows use.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxmeg.checkpoint.places import place_of, steps_in
from maxmeg.config import files
from maxmeg.config.files import checkpoints_of
from maxmeg.config.schema import LoraConfig
from maxmeg.data import run_folder
from maxmeg.data.chat.ends import end_tokens
from maxmeg.data.chat.template import ChatTemplate, NoTemplateError, load_chat_template
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.hf.families.read import differences
from maxmeg.hf.folder import open_checkpoints
from maxmeg.hf.peft import SETTINGS, Adapter, read_adapter
from maxmeg.hf.trained import carried_config, carried_folder, choose_family, open_run
from maxmeg.inference.load import Trained
from maxmeg.layers.lora import Lora, linears
from maxmeg.parallel.parameter import annotate, info
from maxmeg.parallel.rules import storage_specs

MERGED = LoraConfig(rank=1, alpha=1.0, dropout=0.0, targets=())  # alpha / rank lies within B


def with_adapters(trained: Trained, folders: Mapping[str, str | os.PathLike]) -> Trained:
    """Return the model with the adapters in these folders, by the names that requests will use.

    A folder is that of a run with lora.rank, whose base is this model, or PEFT's. ValueError for
    any other, and for a model that is trained with adapters itself.
    """
    if folders and trained.config.lora.rank:
        config = trained.config
        raise ValueError(
            f"{config.run_dir} holds an adapter itself (lora.rank={config.lora.rank}): serve its "
            f"base {config.checkpoint.init_from}, and this one as one of its adapters"
        )
    served = attached(trained, {name: read(trained, folders[name]) for name in folders})
    ends = [token for folder in folders.values() for token in ends_of(trained, folder)]
    templates = {name: template_of(trained, folders[name]) for name in folders}
    templates = {name: template for name, template in templates.items() if template}
    return dataclasses.replace(served, ends=tuple(dict.fromkeys(ends)), templates=templates)


def named_folders(texts: Sequence[str], model: str = "") -> dict[str, str]:
    """Return {name: folder} of texts NAME=FOLDER; ValueError for another form, a name twice, and
    the name of the model."""
    folders: dict[str, str] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ValueError(f"adapters={text}: write NAME=FOLDER")
        if name == model:
            raise ValueError(
                f"adapters: {name} is the name of the model: choose another, or set --name"
            )
        if name in folders:
            raise ValueError(
                f"adapters: {name} is both {folders[name]} and {folder}: choose two names"
            )
        folders[name] = folder
    return folders


def read(trained: Trained, folder: str | os.PathLike) -> Adapter:
    """Return the adapter in a folder; ValueError if it does not belong to the model."""
    if Path(folder, SETTINGS).is_file():
        config = trained.config
        carried = carried_config(carried_folder(config.run_dir, config))
        return read_adapter(folder, config.model, choose_family(config.model, carried, ""))
    if not steps_in(place_of(checkpoints_of(folder))):
        raise ValueError(f"{folder} holds neither checkpoints of a run nor {SETTINGS}: no adapter")
    reader = open_run(Path(folder))
    config, base = files.from_dict(reader.metadata["config"]), reader.metadata.get("base", {})
    if not config.lora.rank:
        raise ValueError(f"{folder} has lora.rank=0, no adapter: serve it as a model of its own")
    run_dir = trained.config.run_dir
    served = open_checkpoints(run_dir).manifest(trained.step)
    if base.get("digest") != served.digest:
        raise ValueError(
            f"{folder} was trained beside the base {base}, and this is {run_dir}, step "
            f"{trained.step}, digest {served.digest}: serve each base with its own adapters"
        )
    models = (each.model.without_mtp() for each in (trained.config, config))
    if changed := differences(*models):
        raise ValueError(
            f"{folder} was trained with other settings than its base: {', '.join(changed)}: serve "
            "it as a model of its own"
        )
    scale, adapter = config.lora.alpha / config.lora.rank, Adapter()
    for path in reader.tensors:
        if path.startswith("model/") and path.endswith("/lora/a"):  # not the optimizer's
            a, b = reader.read(path), scale * reader.read(f"{path.removesuffix('a')}b")
            name = path.removeprefix("model/").removesuffix("/lora/a").replace("/", ".")
            adapter[name] = dict(enumerate(zip(a, b, strict=True)))
    return adapter


def ends_of(trained: Trained, folder: str | os.PathLike) -> tuple[int, ...]:
    """Return the tokens that end a reply of the adapter in a folder; none for PEFT's."""
    if Path(folder, SETTINGS).is_file():
        return ()
    data = run_folder.read(open_run(Path(folder)).metadata["config"], folder).data
    return end_tokens(trained.tokenizer, data, trained.config.model.vocab_size)


def template_of(trained: Trained, folder: str | os.PathLike) -> ChatTemplate | None:
    """Return the chat template in the folder of an adapter; None if it has none."""
    try:
        if Path(folder, SETTINGS).is_file():
            return load_chat_template(trained.tokenizer, folder=Path(folder))
        data = run_folder.read(open_run(Path(folder)).metadata["config"], folder).data
        return load_chat_template(load_tokenizer(data.tokenizer), data.chat_template)
    except NoTemplateError:
        return None


def attached(trained: Trained, adapters: Mapping[str, Adapter]) -> Trained:
    """Return the model with adapters by name; ValueError for one with numbers that are not finite,
    which would spoil the products of all rows."""
    model = jax.tree.map(lambda array: array, trained.model)
    projections = linears(model)
    for name, adapter in adapters.items():
        assert adapter.keys() <= projections.keys(), adapter.keys() - projections.keys()
        pairs = [pair for layers in adapter.values() for pair in layers.values()]
        if not all(np.isfinite(matrix).all() for pair in pairs for matrix in pair):
            raise ValueError(f"adapter {name} holds infinities or NaN: train it again")
    for path, linear in projections.items():
        weight, a_parts, b_parts, owners = linear.weight, [], [], []
        for number, adapter in enumerate(adapters.values(), 1):
            if path in adapter:
                a, b = stacked(adapter[path], weight.shape)
                a_parts, b_parts = [*a_parts, a], [*b_parts, b]
                owners += [number] * b.shape[1]
        if owners:
            matrices = np.concatenate(a_parts, axis=2), np.concatenate(b_parts, axis=1)
            lora = Lora(*matrices, info(weight).axes, MERGED, 0, tuple(owners))
            annotate(lora, num_kv_heads=info(weight).num_kv_heads)
            linear.lora = placed(lora, trained)
    return dataclasses.replace(trained, model=model, adapters=tuple(adapters))


def stacked(
    layers: Mapping[int, tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B of all layers of a weight, zeros where a layer's rank is less."""
    count, width_in, width_out = shape
    rank = max(len(b) for _, b in layers.values())
    a, b = np.zeros((count, width_in, rank), "f4"), np.zeros((count, rank, width_out), "f4")
    for layer, (one_a, one_b) in layers.items():
        a[layer, :, : len(one_b)], b[layer, : len(one_b)] = one_a, one_b
    return a, b


def placed(lora: Lora, trained: Trained) -> Lora:
    """Return the adapters on the mesh, each process having read all of them."""

    def place(array: np.ndarray, spec) -> jax.Array:
        sharding = NamedSharding(trained.mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    specs = storage_specs(lora, trained.mesh, trained.config.parallel.zero1)
    return jax.tree.map(place, lora, specs)
