"""A server in a thread of the test's process: it starts without Python, JAX and their imports."""

import concurrent.futures
import contextlib
import queue
import re
import signal
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_servers import ENDS_WITHIN, SIZES, Server

from maxmeg import serve
from maxmeg.__main__ import main


class ThreadedServer(Server):
    """worker: what runs the model. terminate: the handler that SIGTERM would call."""

    def __init__(self, ended: concurrent.futures.Future, url: str, key: str, started: dict):
        super().__init__(None, url, key)  # pyright: ignore
        self._ended, self.worker = ended, started["worker"]
        self.terminate = started[signal.SIGTERM]
        assert started[signal.SIGINT] is self.terminate

    def is_running(self) -> bool:
        return not self._ended.done()

    def wait(self) -> None:
        """Wait until the command has ended; raise what it raised."""
        self._ended.result(ENDS_WITHIN)


@contextlib.contextmanager
def serving_here(
    run: Path, *flags: str, key: str = "", sizes: tuple[str, ...] = SIZES
) -> Iterator[ThreadedServer]:
    """A warm server of a run, which ends with the block."""
    started, printed, make_server = {}, queue.SimpleQueue(), serve.make_server

    def kept(*arguments):
        app, started["worker"] = make_server(*arguments)
        return app, started["worker"]

    command = ["serve", str(run), "--port=0", *sizes, *flags]
    command += [f"--api_key={key}"] if key else []
    handlers = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "signal": started.__setitem__}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with pytest.MonkeyPatch.context() as patch:
            # Python gives signals to the main thread alone.
            patch.setattr(serve, "signal", types.SimpleNamespace(**handlers))
            patch.setattr(serve, "make_server", kept)
            patch.setattr(serve, "print", lambda text, **_: printed.put(text), raising=False)
            ended = pool.submit(main, command)
            ended.add_done_callback(lambda _: printed.put(""))
            url = re.search(r"http://\S+:\d+", printed.get())
            if not url:
                raise AssertionError("the server has ended") from ended.exception()
        server = ThreadedServer(ended, url[0], key, started)
        try:
            server.wait_until_warm()
            yield server
        finally:
            server.terminate()
            server.wait()
