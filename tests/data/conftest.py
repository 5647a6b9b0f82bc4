"""Tiny corpora, made on the spot; chat templates that render without a new process."""

import json
import logging
import threading

import numpy as np
import pytest

from maxmeg.data.chat import template, template_child
from maxmeg.data.corpus.indexed import IndexedWriter


class Store:
    """An S3 server on loopback that can cut its answers in the middle."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.cuts = 0  # answers of objects that will be cut
        self.asked: list[str] = []  # ranges of objects that were asked for
        self._application = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, threaded=True)

    def __call__(self, environ, start_response):
        answer = self._application(environ, start_response)
        if environ["REQUEST_METHOD"] == "GET" and "HTTP_RANGE" in environ:
            self.asked.append(environ["HTTP_RANGE"])
            if self.cuts:
                self.cuts -= 1
                body = b"".join(answer)
                return [body[: len(body) // 2]]
        return answer


@pytest.fixture(scope="module")
def s3():
    """A server that the environment names."""
    import s3fs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = Store()
    threading.Thread(target=store.server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.server.port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "x")
        yield store
        s3fs.S3FileSystem.clear_instance_cache()
    store.server.shutdown()
    store.server.server_close()


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
