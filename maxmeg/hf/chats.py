"""What an exported folder says about chats: the template, and the tokens that end an answer."""

import json
import typing
from collections.abc import Mapping
from pathlib import Path

from maxmeg.config.schema import Config
from maxmeg.data.chat.ends import end_tokens
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.hf.families.keys import TOKENS
from maxmeg.hf.formats.safetensors import read_json
from maxmeg.hf.matching import GENERATION


def replace_chat_template(folder: Path, text: str) -> None:
    """Write the chat template that a model was trained with, in place of its base model's."""
    for path in folder.glob("chat_template.*"):
        path.unlink()
    (folder / "chat_template.jinja").write_text(text, "utf-8")
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        entries = {k: value for k, value in read_json(settings).items() if k != "chat_template"}
        settings.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_ends(folder: Path, described: Mapping[str, typing.Any], config: Config) -> None:
    """Name the end tokens of a run that was trained on chats in generation_config.json.

    described: config.json, which has the special tokens if there is no generation_config.json.
    """
    path = folder / GENERATION
    settings = {name: described[name] for name in TOKENS if described.get(name) is not None}
    settings = read_json(path) if path.is_file() else settings
    loaded = load_tokenizer(config.data.tokenizer)
    ends = [*end_tokens(loaded, config.data, config.model.vocab_size)]
    if settings.get("eos_token_id") not in (ends, *ends[: len(ends) == 1]):
        settings = {**settings, "eos_token_id": ends}
        path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
