"""Tiny corpora, made on the spot; chat templates that render without a new process."""

import json
import logging

import numpy as np
import pytest

from maxmeg.data.chat import template, template_child
from maxmeg.data.corpus.indexed import IndexedWriter


@pytest.fixture(scope="module")
def s3():
    """The address of an S3 server on loopback, which the environment names."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "x")
        yield host, port
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def renders_here(monkeypatch) -> None:
    """Chat templates render in this process; tests/inference/test_chat.py tests the other one."""

    def run_child(request: dict, source: str) -> dict:
        monkeypatch.setattr(template_child.Generation, "seen", False)
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
