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


def decoding_kinds(path) -> dict[str, str]:
    """Specs of a tokenizer.json for each kind of decoder, all with the same added tokens; the last
    is <s>, which a model may have no row for."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as splits

    letters = {letter: i for i, letter in enumerate(sorted(splits.ByteLevel.alphabet()))}
    pieces = ["<unk>", "x", "a", "▁", "▁a", "▁▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    ids, merges = {piece: i for i, piece in enumerate(pieces)}, [("▁", "a"), ("▁", "▁")]
    bpe = models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True)
    unigram = models.Unigram([(piece, -1.0) for piece in pieces], 0, True)
    sign, space = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    first, chain = normalizers.Sequence([normalizers.Prepend("▁"), sign]), decoders.Sequence
    fall, fuse, strip = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    regex, signs = decoders.Replace(Regex("[▁]"), " "), chain([fall, decoders.Metaspace()])
    kinds = {
        "letters": (models.BPE(letters, []), None, splits.ByteLevel(False), decoders.ByteLevel()),
        "gemma": (bpe, sign, None, chain([space, fall, fuse])),
        "llama": (bpe, first, None, chain([space, fall, fuse, strip])),
        "unigram": (unigram, None, splits.Metaspace(), signs),
        "nested": (bpe, sign, None, chain([chain([regex, fall]), fuse, space])),
        "stripped": (bpe, first, None, chain([space, fall, strip])),
        "words": (bpe, None, None, decoders.WordPiece()),
        "none": (bpe, sign, None, None),
    }
    added = [AddedToken(name, normalized=False) for name in ("på", "▁▁▁", "\n\n", "Ġx")]
    added += [AddedToken("ab cd"), AddedToken("<r>", rstrip=True, lstrip=True)]
    added += [AddedToken("▁▁", normalized=False), AddedToken("w", single_word=True)]
    for name, (model, normalizer, split, decoder) in kinds.items():
        made = Tokenizer(model)
        made.normalizer, made.pre_tokenizer, made.decoder = normalizer, split, decoder
        made.add_tokens(added)
        made.add_special_tokens(["</s>", "<s>"])
        (path / name).mkdir()
        made.save(str(path / name / "tokenizer.json"))
    return {name: f"huggingface:{path / name / 'tokenizer.json'}" for name in kinds}
