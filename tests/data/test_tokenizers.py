"""Every tokenizer: round trips, special ids, identity, and files that are wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxmeg.data.tokenizers import KINDS, load_tokenizer

TEXTS = ["hello the world", "", " leading, trailing ", "naïve 東京 🎉\n\n\ttabs", "1234567 it's"]
LOSSLESS = [kind for kind in KINDS if kind not in ("null", "wordpiece")]


@pytest.mark.parametrize("kind", LOSSLESS)
def test_text_round_trips(vocabularies, kind):
    tokenizer = load_tokenizer(vocabularies[kind])
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        assert tokenizer.eod not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_interface_is_whole(vocabularies, kind):
    tokenizer = load_tokenizer(vocabularies[kind])
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert isinstance(tokenizer.decode([tokenizer.eod]), str)
    assert tokenizer.identity.startswith(kind)
    again = load_tokenizer(tokenizer.spec)
    assert again.identity == tokenizer.identity
    for special in (tokenizer.bos, tokenizer.pad):
        assert special is None or 0 <= special < tokenizer.vocab_size


def test_special_ids(vocabularies):
    def ids(kind):
        tokenizer = load_tokenizer(vocabularies[kind])
        return tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.pad

    assert ids("bytes") == (257, 256, None, None)
    assert ids("null") == (1000, 999, None, None)
    assert ids("tiktoken") == (261, 260, None, None)
    assert ids("sentencepiece")[1:] == (2, 1, 3)
    assert ids("gpt2")[1] == 0
    assert ids("huggingface")[1:] == (0, None, None)


@given(st.text())
def test_bytes_round_trip_any_text(text):
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_null_reads_numbers():
    tokenizer = load_tokenizer("null:100")
    assert tokenizer.encode("5 7  99").tolist() == [5, 7, 99]
    assert tokenizer.decode([5, 7]) == "5 7"
    for text in ("5 x", "100", "-1"):
        with pytest.raises(ValueError, match="null"):
            tokenizer.encode(text)


def test_byte_decode_replaces_what_is_not_utf8():
    assert load_tokenizer("bytes").decode([0xFF, 65, 256]) == "\N{REPLACEMENT CHARACTER}A"


def test_identity_is_the_content_not_the_path(vocabularies, tmp_path):
    path = Path(vocabularies["sentencepiece"].partition(":")[2])
    other = shutil.copy(path, tmp_path / "elsewhere.model")
    same = load_tokenizer(f"sentencepiece:{other}")
    assert same.identity == load_tokenizer(vocabularies["sentencepiece"]).identity
    ranks = Path(vocabularies["tiktoken"].partition(":")[2]).read_bytes()
    changed = tmp_path / "ranks"
    changed.write_bytes(ranks.replace(b" 259", b" 300"))
    different = load_tokenizer(f"tiktoken:{changed}")
    assert different.identity != load_tokenizer(vocabularies["tiktoken"]).identity
    assert different.vocab_size == 302


def test_huggingface_takes_special_names_from_its_config(vocabularies, tmp_path):
    source = Path(vocabularies["huggingface"].partition(":")[2])
    shutil.copy(source, tmp_path / "tokenizer.json")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<s>"}, "bos_token": "<|endoftext|>"}))
    tokenizer = load_tokenizer(f"huggingface:{tmp_path}")
    assert (tokenizer.eod, tokenizer.bos) == (1, 0)
    config.write_text(json.dumps({"eos_token": "<absent>"}))
    with pytest.raises(ValueError, match="'<absent>' is not in the vocabulary"):
        load_tokenizer(f"huggingface:{tmp_path}")


def test_special_names_in_text_are_text(vocabularies):
    for kind in ("gpt2", "tiktoken", "sentencepiece"):
        tokenizer = load_tokenizer(vocabularies[kind])
        for text in ("a<|endoftext|>b", "a</s>b"):
            assert tokenizer.eod not in tokenizer.encode(text)
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sentencepeice:x", "did you mean 'sentencepiece'"),
        ("zzz", "Choose one of bytes, null"),
        ("", "unknown tokenizer"),
        ("gpt2", "gpt2:FOLDER"),
        ("huggingface:", "huggingface:FILE"),
        ("bytes:3", "takes no argument"),
        ("null:", "like null:32000"),
        ("null:-3", "like null:32000"),
        ("sentencepiece:/nowhere", "/nowhere: No such file"),
        ("huggingface:/nowhere", "/nowhere: No such file"),
        ("gpt2:/nowhere", "vocab.json: No such file"),
        ("tiktoken:/nowhere", "/nowhere: No such file"),
    ],
)
def test_wrong_specs_are_explained(spec, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(spec)


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "gpt2", "tiktoken"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}", b"\xff\xfe\x00", b"YQ== x\n"])
def test_wrong_files_are_explained(tmp_path, kind, content):
    names = ("vocab.json", "merges.txt") if kind == "gpt2" else ("file",)
    for name in names:
        (tmp_path / name).write_bytes(content)
    path = tmp_path if kind == "gpt2" else tmp_path / "file"
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(f"{kind}:{path}")


def test_tiktoken_files_with_gaps_are_refused(vocabularies, tmp_path):
    ranks = Path(vocabularies["tiktoken"].partition(":")[2]).read_bytes().splitlines()
    (tmp_path / "short").write_bytes(b"\n".join(ranks[1:]))
    with pytest.raises(ValueError, match="lacks 1 single bytes"):
        load_tokenizer(f"tiktoken:{tmp_path / 'short'}")
    (tmp_path / "twice").write_bytes(b"\n".join([*ranks, b"YWI= 5"]))
    with pytest.raises(ValueError, match="same rank"):
        load_tokenizer(f"tiktoken:{tmp_path / 'twice'}")
