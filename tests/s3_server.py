"""An S3 of one's own, as a fixture."""

import functools
import logging
import threading

import pytest


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


@functools.cache
def running() -> Store:
    """One for all tests of a process: libraries keep the address that they first read."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = Store()
    threading.Thread(target=store.server.serve_forever, daemon=True).start()
    return store


@pytest.fixture(scope="module")
def s3():
    """A server that the environment names."""
    store = running()
    store.cuts, store.asked = 0, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.server.port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "x")
        yield store
