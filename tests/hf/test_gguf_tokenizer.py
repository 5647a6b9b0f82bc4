"""Tokenizers in GGUF files: those that their metadata came from encode text in the same way."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.hf.formats import gguf_tokenizer
from maxmeg.hf.formats.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPLITTINGS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_fields,
)

WORDS = ["hello world", "the cat sat on the mat", "it's 1234 tests", "naïve café", "HTML <b>"] * 9
TEXTS = [
    *("hello the world", "", "  two  spaces ", "naïve 東京 🎉\n\n\ttabs", "it's 123456 I'LL"),
    *("a\nb\r\n\n c", "x=3.14; y(2)", "ctrl</s>x"),
]
ADDED = ["<s>", "</s>", "<|user|>"]


def fields_of(model: str, tokens, types, **more) -> dict:
    own = {"model": model, "tokens": list(tokens), "token_type": list(types), **more}
    own |= {"bos_token_id": list(tokens).index("<s>"), "eos_token_id": list(tokens).index("</s>")}
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


def loaded(fields: dict, folder):
    for name, text in gguf_tokenizer.tokenizer_files(fields).items():
        (folder / name).write_text(text, "utf-8")
    return load_tokenizer(f"huggingface:{folder}")


@pytest.fixture(scope="module")
def byte_level() -> dict:
    """Fields of a small byte-level BPE with the special tokens at the end."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get) + ADDED
    types = [NORMAL] * len(model["vocab"]) + [CONTROL] * len(ADDED)
    return fields_of("gpt2", tokens, types, merges=[" ".join(pair) for pair in model["merges"]])


# tokenizer.ggml.pre -> how "it's 12345 I'LL" and two ends of lines are split.
PARTS = {
    "gpt-2": ["it", "'s", " 12345", " I", "'", "LL", "\n\n"],
    "smollm": ["it", "'s", " ", "1", "2", "3", "4", "5", " I", "'", "LL", "\n\n"],
    "llama-bpe": ["it", "'s", " ", "123", "45", " I", "'LL", "\n\n"],
    "qwen2": ["it", "'s", " ", "1", "2", "3", "4", "5", " I", "'LL", "\n\n"],
    "tekken": ["it", "'s", " ", "1", "2", "3", "4", "5", " I", "'LL", "\n\n"],
}


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_byte_level_bpe_encodes_as_its_source(byte_level, tmp_path, pre):
    tokenizer = loaded({**byte_level, "tokenizer.ggml.pre": pre}, tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text.replace("</s>", ""))
        assert tokenizer.decode(ids) == text.replace("</s>", "")
    assert (
        tokenizer.token_id("</s>") == tokenizer.eod == len(byte_level["tokenizer.ggml.tokens"]) - 2
    )
    assert tokenizer.opening == ((tokenizer.bos,) if SPLITTINGS[pre].bos else ())
    chosen = {**byte_level, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": True}
    assert loaded(chosen, tmp_path).opening == (tokenizer.bos,)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if pre in PARTS:
        actual = library.pre_tokenizer.pre_tokenize_str("it's 12345 I'LL\n\n")
        parts = ["it's 12345 I'LL\n\n"[begin:end] for _, (begin, end) in actual]
        assert parts == PARTS[pre]
    assert json.loads(library.to_str())["model"]["ignore_merges"] == SPLITTINGS[pre].whole_words
    size, ids = len(byte_level["tokenizer.ggml.tokens"]), {"tokenizer.ggml.bos_token_id": 0}
    written = tokenizer_fields(tmp_path / "tokenizer.json", size, True, ids)
    assert SPLITTINGS[written["tokenizer.ggml.pre"]] == SPLITTINGS[pre]
    for name in ("tokens", "token_type", "merges", "add_bos_token"):
        assert written[f"tokenizer.ggml.{name}"] == chosen[f"tokenizer.ggml.{name}"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_is_rebuilt_from_scores(tmp_path, prefix):
    """The ids are those of the SentencePiece model that tokens, scores and types come from."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS), model_writer=made, vocab_size=330, model_type="bpe",
        byte_fallback=True, add_dummy_prefix=prefix, normalization_rule_name="identity",
        remove_extra_whitespaces=False, user_defined_symbols=["<b>", "\n\n"], minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    ids = range(theirs.GetPieceSize())

    def kind(i):
        special = theirs.IsControl(i), theirs.IsUnknown(i), theirs.IsByte(i)
        if any(special):
            return (CONTROL, UNKNOWN, BYTE)[special.index(True)]
        return USER_DEFINED if theirs.IdToPiece(i) in ("<b>", "\n\n") else NORMAL

    tokens, types = [theirs.IdToPiece(i) for i in ids], [kind(i) for i in ids]
    fields = fields_of("llama", tokens, types, scores=[theirs.GetScore(i) for i in ids])
    fields["tokenizer.ggml.add_space_prefix"] = prefix
    ours = loaded(fields, tmp_path)
    for text in [*WORDS[:5], *TEXTS]:
        text = text.replace("</s>", "").replace("\n\n", "")
        if text:
            assert ours.encode(text).tolist() == theirs.EncodeAsIds(text), text
            assert ours.decode(ours.encode(text)) == text
    assert ours.encode("cat<b>").tolist()[-1] == theirs.PieceToId("<b>")
    assert (ours.eod, ours.bos, ours.opening) == (2, 1, (1,))
    (tmp_path / "m.model").write_bytes(made.getvalue())
    ids = {f"tokenizer.ggml.{name}_token_id": i for name, i in (("bos", 1), ("eos", 2))}
    fields["tokenizer.ggml.add_bos_token"] = True
    assert tokenizer_fields(tmp_path / "m.model", len(tokens), True, ids) == fields
    padded = tokenizer_fields(tmp_path / "tokenizer.json", len(tokens) + 1, True, ids)
    assert padded["tokenizer.ggml.token_type"] == [*types, UNUSED]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "ggml.model='bert' is not supported; supported are gpt2 and llama"),
        ({"pre": "magic"}, "ggml.pre='magic' is not supported; supported are gpt-2, smollm"),
        ({"tokens": []}, "has no tokenizer.ggml.tokens"),
        ({"tokens": ["a", "a"]}, "names some token twice"),
        ({"token_type": [1]}, "token_type has 1 entries for"),
        ({"model": "llama", "scores": [0.0]}, "scores has 1 entries for"),
    ],
)
def test_unsupported_tokenizers_are_named(byte_level, changes, message):
    fields = {**byte_level, **{f"tokenizer.ggml.{name}": v for name, v in changes.items()}}
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer.tokenizer_files(fields)
