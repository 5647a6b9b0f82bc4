"""Headless Chromium, driven by its DevTools protocol over two pipes: no driver is needed."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60  # until the browser answers or a page shows what it should, on a busy machine
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}
SHIFT = 8


def find_chromium() -> str | None:
    """Path of the first Chromium that is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page. events: what the page logged, threw or blocked.

    folder: of the browser's profile.
    """

    def __init__(self, program: str, folder: Path) -> None:
        requests, self._out = os.pipe()
        answers, replies = os.pipe()
        # Chromium reads from 3 and writes to 4; the copies are above both.
        ours = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (requests, replies)]
        run = f'exec "$@" 3<&{ours[0]} 4>&{ours[1]}'
        command = [program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", run, "bash", *command], pass_fds=ours,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (requests, replies, *ours):
            os.close(fd)
        self._in = os.fdopen(answers, "rb")
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)  # Chromium ends when its pipe does
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._in.close()

    def call(self, method: str, **params) -> dict:
        """Call a method of the protocol; returns its result. RuntimeError if it fails."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.events.append(answer["params"])
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            data = os.read(self._in.fileno(), 1 << 16)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str):
        """Value of a JavaScript expression. RuntimeError if it throws."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true; AssertionError with the page's text after SECONDS."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            text = self.evaluate("document.body?.innerText")
            assert time.monotonic() < end, f"not within {SECONDS} s: {expression}\n{text}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Insert text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        code["modifiers"] = SHIFT * shift
        if key == "Enter":
            code["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def click(self, selector: str) -> None:
        """Click with the mouse on the middle of the element."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()"
        found = self.evaluate(box)
        x, y = found["x"] + found["width"] / 2, found["y"] + found["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Size of the window in CSS pixels, and whether the reader prefers dark pages."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
