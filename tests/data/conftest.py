"""Tiny corpora, made on the spot; chat templates that render without a new process."""

import json

import numpy as np
import pytest
from s3_server import s3  # noqa: F401

from maxmeg.data.chat import template, template_child
from maxmeg.data.corpus.indexed import IndexedWriter


@pytest.fixture
def renders_here(monkeypatch) -> None:
    """Chat templates render in this process; tests/inference/test_chat.py tests the other one."""

    def run_child(request: dict, source: str) -> dict:
        monkeypatch.setattr(template_child.Generation, "is_used", False)
        return json.loads(json.dumps(template_child.render(json.loads(json.dumps(request)))))

    monkeypatch.setattr(template, "run_child", run_child)


@pytest.fixture
def make_corpus(tmp_path):
    """Writes documents of ids and returns the prefix."""

    def make(documents, name="corpus", vocab_size=1000) -> str:
        prefix = str(tmp_path / name)
        with IndexedWriter(prefix, vocab_size) as writer:
            for document in documents:
                writer.add_document(np.asarray(document))
        return prefix

    return make


@pytest.fixture
def write_lines(tmp_path):
    """Writes texts as JSON lines and returns the path."""

    def write(texts, name="corpus.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(path)

    return write
