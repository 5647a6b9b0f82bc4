"""A tokenizer.json of a few words, for tests that need files beside one."""

import json

from maxmeg.data.tokenizers.load import load_tokenizer

WORDS = ["<s>", "</s>", "<|user|>", "<|assistant|>", "a", "b", "[UNK]"]


def folder(path, settings: dict | None = None, **files):
    """A tokenizer.json of WORDS, the first two special, with other files beside it."""
    path.mkdir(exist_ok=True)
    added = [
        {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i, word in enumerate(WORDS[:4])
    ]
    model = {
        "type": "WordLevel",
        "vocab": {w: i for i, w in enumerate(WORDS)},
        "unk_token": "[UNK]",
    }
    whole = {"version": "1.0", "added_tokens": added, "model": model}
    whole |= {"pre_tokenizer": {"type": "Whitespace"}}
    whole |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (path / "tokenizer.json").write_text(json.dumps(whole | (files.pop("tokenizer", {}))))
    if settings is not None:
        files["tokenizer_config"] = settings
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer(f"huggingface:{path / 'tokenizer.json'}")
