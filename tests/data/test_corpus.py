"""The default corpus: which files, in which order, and where it is kept."""

from pathlib import Path

import pytest

from maxmeg.config.data import Builtin
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.prepare import standard_library as module
from maxmeg.data.prepare.standard_library import docstrings, source_files, standard_library


@pytest.fixture
def few_files(monkeypatch) -> None:
    """The corpus is made of a few files of the standard library."""
    files = source_files()[:9]
    monkeypatch.setattr(module, "source_files", lambda: files)


def test_order_is_fixed_and_mixed():
    files = source_files()
    assert files == source_files() and len(files) > 300
    names = [path.name[0] for path in files]
    assert names != sorted(names)
    text = "\n".join(map(str, files))
    assert "site-packages" not in text and "/test/" not in text


def test_a_folder_without_sources_is_explained(tmp_path):
    with pytest.raises(ValueError, match=r"data\.paths"):
        source_files(tmp_path)


def test_a_damaged_cache_is_named(tmp_path, few_files):
    prefix = standard_library(tmp_path, "bytes")
    Path(prefix + ".bin").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"python_text_document\.bin has 5 bytes"):
        standard_library(tmp_path, "bytes")


def test_sentences_are_those_of_docstrings(tmp_path, few_files):
    corpus = IndexedDataset(standard_library(tmp_path, "bytes", Builtin.sentences))
    files = [path for path in module.source_files() if docstrings(path)]
    assert corpus.num_documents == len(files) < len(corpus)
    first = bytes(corpus.get(0).astype("u1")).decode()
    assert first == docstrings(files[0])[0] and first.split()[0] in files[0].read_text("utf-8")


def test_another_tokenizer_is_another_folder(tmp_path, vocabularies, few_files):
    one = standard_library(tmp_path, "bytes")
    two = standard_library(tmp_path, vocabularies["tiktoken"])
    assert Path(one).parent != Path(two).parent
    assert IndexedDataset(two).num_tokens < IndexedDataset(one).num_tokens
