"""A small server with the API that the chat page uses; a message says what happens to it."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from maxmeg.pages.templates import render

PAGE = render("chat.html")
CODE = (
    "Use `range`:\n```python\nfor i in range(3):\n    print(i, '<b>')\n```\nIt prints three lines."
)
MARKUP = "<img src=x onerror=\"document.title = 'run'\"> & <b>bold</b>"
LONG = "".join(f"line {number}\n" for number in range(80))


class FakeAPI(ThreadingHTTPServer):
    """Answers until `gate` is shut; while it is, the second half of an answer waits.

    bodies: of all requests. key: what it asks for. template: whether the model has one.
    generation: the settings with which the page begins.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.gate, self.key, self.template = threading.Event(), "", True
        self.gate.set()
        self.bodies: list[dict] = []
        self.generation: dict[str, float] = {}
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def info(self) -> dict:
        return {"chat_template": "x" if self.template else None, "generation": self.generation}

    def pieces(self, asked: str) -> Iterator[str]:
        """The answer to a message: its number makes each one different."""
        text = {"code": CODE, "markup": MARKUP, "long": LONG}.get(asked)
        text = text or f"Answer {len(self.bodies)} to {asked}: first half, second half."
        words = text.split(" ") if "\n" not in text else text.splitlines(keepends=True)
        ends = " " if "\n" not in text else ""
        for number, word in enumerate(words):
            if number == len(words) // 2:
                self.gate.wait(60)
            yield word + ends * (number < len(words) - 1)


class Handler(BaseHTTPRequestHandler):
    server: FakeAPI

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/":
            return self.send(200, PAGE.encode(), "text/html; charset=utf-8")
        if self.path == "/tokenizer_info":
            self.send_json(200, self.server.info())
        elif self.allowed():
            models = [{"id": "smollm2", "object": "model", "max_model_len": 2048}]
            self.send_json(200, {"object": "list", "data": models})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        self.server.bodies.append(body)
        is_chat = self.path == "/v1/chat/completions"
        asked = body["messages"][-1]["content"] if is_chat else body["prompt"]
        if is_chat and not self.server.template:
            self.fail(400, "the tokenizer has no chat template: use /v1/completions")
        elif asked == "refuse":
            self.fail(400, "a prompt of 900 tokens and 200 new ones exceed the context of 1024")
        elif asked == "busy":
            self.fail(429, "the queue is full", {"Retry-After": "3"})
        else:
            self.stream(asked, is_chat)

    def allowed(self) -> bool:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.fail(401, "the API key is missing or wrong")
            return False
        return True

    def stream(self, asked: str, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number, piece in enumerate(self.server.pieces(asked)):
            if asked == "lost" and number == 3:
                return
            if asked == "broken" and number == 3:
                return self.event({"error": {"message": "the device failed"}})
            self.event({"choices": [{"delta": {"content": piece}} if is_chat else {"text": piece}]})
        end = {"delta": {}, "text": "", "finish_reason": "length"}
        self.event({"choices": [end], "seed": 7})
        self.event({"choices": [], "seed": 7, "usage": {"completion_tokens": 12}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: dict) -> None:
        with contextlib.suppress(OSError):  # the reader has stopped it
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def fail(self, status: int, message: str, headers: dict | None = None) -> None:
        self.send_json(status, {"error": {"message": message}}, headers)

    def send_json(self, status: int, value: dict, headers: dict | None = None) -> None:
        self.send(status, json.dumps(value).encode(), "application/json", headers)

    def send(self, status: int, data: bytes, kind: str, headers: dict | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(data))} | (headers or {})
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
