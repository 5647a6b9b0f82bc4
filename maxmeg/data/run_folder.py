"""Make a run folder complete: it holds a copy of the tokenizer, and a config.yaml whose paths
are valid from every working directory and after the folder is moved (`config/paths.py`)."""

import os
import typing
from pathlib import Path

from maxmeg.config import files, paths
from maxmeg.config.schema import Config
from maxmeg.data.corpus.stored import write_atomically

TOKENIZER = "tokenizer"  # the folder of the copy
TEMPLATE = "data.chat_template.jinja"  # the name of the copy in that folder
_IN_FOLDER = {  # files that each kind of tokenizer reads in a folder
    "huggingface": (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*.jinja"),
        *("added_tokens.json", "chat_template.json", "generation_config.json", "config.json"),
    ),
    "gpt2": ("vocab.json", "merges.txt", "encoder.json", "vocab.bpe"),
    "wordpiece": ("vocab.txt", "tokenizer_config.json"),
}


def stored(config: Config) -> Config:
    """The settings as run folders and checkpoints hold them: with absolute paths, and with the
    copies of tokenizer and chat template that `write` makes."""
    config = paths.absolute(config)
    place = Path(config.run_dir, TOKENIZER)
    kind, argument, options = paths.split_spec(config.data.tokenizer)
    if _is_outside(config, argument) and kind not in paths.KINDS_WITHOUT_FILES:
        name = "" if os.path.isdir(argument) else _copied_name(kind, argument)
        config.data.tokenizer = f"{kind}:{place / name}{options}"
    if config.data.chat_template and _is_outside(config, config.data.chat_template):
        config.data.chat_template = str(place / TEMPLATE)
    return config


def write(config: Config) -> None:
    """Copy tokenizer and chat template into the run folder, then write its config.yaml."""
    target = stored(config)
    sources = paths.absolute(config).data
    if target.data.tokenizer != sources.tokenizer:
        kind, argument, _ = paths.split_spec(sources.tokenizer)
        copied = tokenizer_files(kind, Path(argument))
        if kind == "huggingface" and sources.chat_template:  # the tokenizer of runs that follow
            copied |= {"chat_template.jinja": Path(sources.chat_template)}
        for name, source in copied.items():
            write_atomically(_folder(target) / name, source.read_bytes())
    if target.data.chat_template != sources.chat_template:
        write_atomically(_folder(target) / TEMPLATE, Path(sources.chat_template).read_bytes())
    files.save(target, Path(target.run_dir, files.CONFIG_FILE))


def read(settings: dict[str, typing.Any], run_dir: str | os.PathLike) -> Config:
    """The settings in a checkpoint's metadata, with paths that are valid now.

    ValueError where the base model of the run's LoRA adapters is missing.
    """
    saved = files.from_dict(settings)
    config = paths.relocated(saved, run_dir)
    base = config.checkpoint.init_from
    if config.lora.rank and base and not os.path.exists(base):
        places = [base]
        if os.path.isabs(saved.run_dir) and saved.run_dir != config.run_dir:
            places.append(paths.path_after_move(base, saved.run_dir, config.run_dir))
        raise ValueError(
            f"{run_dir} holds LoRA adapters, and their base model is not in "
            f"{' nor in '.join(places)}: move it back, or link it there (ln -s BASE {base})"
        )
    return config


def tokenizer_files(kind: str, argument: Path) -> dict[str, Path]:
    """{name of the copy: file} for every file that the tokenizer KIND:ARGUMENT reads."""
    is_folder = argument.is_dir()
    folder, sources = argument if is_folder else argument.parent, {}
    if is_folder or kind == "huggingface":
        paths_in_folder = (p for pattern in _IN_FOLDER.get(kind, ()) for p in folder.glob(pattern))
        sources = {path.name: path for path in paths_in_folder if path.is_file()}
    return sources if is_folder else sources | {_copied_name(kind, argument): argument}


def _copied_name(kind: str, argument: str | Path) -> str:
    """The file name of the copy; export and transformers expect tokenizer.json."""
    return "tokenizer.json" if kind == "huggingface" else os.path.basename(argument)


def _is_outside(config: Config, path: str) -> bool:
    return not Path(path).is_relative_to(config.run_dir)


def _folder(config: Config) -> Path:
    folder = Path(config.run_dir, TOKENIZER)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
