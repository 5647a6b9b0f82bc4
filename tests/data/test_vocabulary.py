"""Corpora say which tokenizer wrote them, and another one is refused."""

import pytest

from maxmeg.config.data import DataConfig
from maxmeg.data.build import build_dataset, open_corpus
from maxmeg.data.corpus.vocabulary import SUFFIX, vocabulary_of, write_vocabulary
from maxmeg.data.prepare.encoding import Options
from maxmeg.data.prepare.merge import merge
from maxmeg.data.prepare.run import prepare
from maxmeg.data.tokenizers.load import load_tokenizer


def opened(prefix: str, tokenizer: str):
    config = DataConfig(sequence_length=4, tokenizer=tokenizer, split="1", paths=(prefix,))
    found, prefixes = open_corpus(config, "unused")
    return build_dataset(config, prefixes, found, 0, 1)


def written(write_lines, tmp_path, name: str, tokenizer: str = "bytes") -> str:
    texts = ["1 2 3 4 5 6"] * 8
    path = write_lines(texts, f"{name}.jsonl")
    return prepare([path], str(tmp_path / name), Options(tokenizer), 0).prefixes["text"]


def test_another_tokenizer_is_refused_and_none_is_warned_of(write_lines, tmp_path, caplog):
    prefix = written(write_lines, tmp_path, "a")
    assert vocabulary_of(prefix) == load_tokenizer("bytes").identity and opened(prefix, "bytes")
    message = f"{prefix} was written with the tokenizer bytes, and data.tokenizer=null:500 is"
    with pytest.raises(ValueError, match=message):
        opened(prefix, "null:500")
    assert not caplog.text
    write_vocabulary(prefix, "")
    assert opened(prefix, "null:500")
    assert f"{prefix}: no {SUFFIX} file says which tokenizer wrote it" in caplog.text
    for text in ("", "{", "[]", "{}"):
        (tmp_path / f"a_text_document{SUFFIX}").write_text(text)
        with pytest.raises(ValueError, match=rf"a_text_document\{SUFFIX} is damaged .*: delete it"):
            opened(prefix, "bytes")


def test_what_is_merged_was_written_by_one_tokenizer(write_lines, tmp_path):
    a, b = (written(write_lines, tmp_path, name) for name in "ab")
    other = written(write_lines, tmp_path, "c", "null:300")
    output = str(tmp_path / "merged")
    merge([a, b], output)
    assert vocabulary_of(output) == "bytes"
    with pytest.raises(ValueError, match=f"{a} by bytes, {other} by null:300; prepare all with"):
        merge([a, other], output)
    write_vocabulary(b, "")
    merge([a, b], output)  # one of them does not say it, so the merged corpus does not either
    assert vocabulary_of(output) == ""
