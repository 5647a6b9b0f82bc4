"""The bodies of requests, read so that large ones keep neither the memory nor the time of others.

Python parses a body in one go, and everything else waits for it: 8 MB take from 0.1 s, if they are
one text, to 10 s, if they are millions of small lists.
"""

import asyncio
import contextlib
import time

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from maxmeg.server.errors import ApiError

SMALL_BYTES = 2**18  # any number of bodies up to this size may be read at once
LARGE = 4  # larger ones that are read at once
READ_SECONDS = 60.0  # for a body to arrive
BYTE_SECONDS, VALUE_SECONDS = 2e-8, 5e-6  # to read and parse a byte, and one of JSON's values
FREE_SECONDS = 0.02  # of parsing that no request waits for
SHARE = 0.1  # of the time, at most, in which longer bodies are read and parsed
WAIT_SECONDS = 10.0  # at most until a body is parsed


class Bodies:
    """Reads bodies of at most `most_bytes` bytes and `most_values` values of JSON."""

    def __init__(self, most_bytes: int, most_values: int) -> None:
        self.most_bytes, self.most_values = most_bytes, most_values
        self._large = asyncio.Semaphore(LARGE)
        self._next = 0.0  # when the next body may be parsed that takes more than FREE_SECONDS

    async def read(self, receive: Receive) -> bytes:
        """Return the body when it may be parsed. ApiError for one that exceeds a limit, does not
        arrive, or would have to wait too long."""
        body, is_complete, is_large = bytearray(), False, False
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(READ_SECONDS):
                    while not is_complete:
                        if len(body) > SMALL_BYTES and not is_large:
                            await turn.enter_async_context(self._large)
                            is_large = True
                        is_complete = await self._extend(body, receive)
            except TimeoutError:
                text = f"the body has not arrived in {READ_SECONDS:g} s"
                raise ApiError(408, text) from None
            values = sum(body.count(sign) for sign in (b",", b"[", b"{"))  # at most
            is_refused = values > self.most_values
            parsing = 0 if is_refused else values * VALUE_SECONDS
            await self._wait(len(body) * BYTE_SECONDS + parsing)
            if is_refused:
                text = f"the body has more than {self.most_values} values: send fewer in a request"
                raise ApiError(413, text)
            return bytes(body)

    async def _extend(self, body: bytearray, receive: Receive) -> bool:
        """Add the next part of a body; whether it was the last one."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > self.most_bytes:
            raise self.too_large()
        return not message.get("more_body", False)

    async def _wait(self, seconds: float) -> None:
        """Wait for a time in which parsing may take so many seconds."""
        if seconds <= FREE_SECONDS:
            return
        now = time.monotonic()
        start = max(now, self._next)
        if start > now + WAIT_SECONDS:
            raise ApiError(429, "many large bodies are waiting: try again later", retry=10)
        self._next = start + seconds / SHARE
        await asyncio.sleep(start - now)

    def too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self.most_bytes} bytes: send less text")
