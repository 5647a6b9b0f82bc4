"""What comes before a request is parsed: limits on bodies, and on the patience of the server."""

import asyncio
import json

import pytest

from maxmeg.server import bodies, gate
from maxmeg.server.bodies import LARGE, SMALL_BYTES, Bodies
from maxmeg.server.errors import ApiError

MOST_BYTES, MOST_VALUES = 2**21, 1000


def receiver(body: bytes, is_whole: bool = True):
    """What gives a body in two parts, and then waits forever unless it is whole."""
    half = len(body) // 2
    parts = [(body[:half], True), (body[half:], not is_whole)]

    async def receive():
        if not parts:
            await asyncio.Event().wait()
        content, more = parts.pop(0)
        return {"type": "http.request", "body": content, "more_body": more}

    return receive


def read(reader: Bodies, *receivers) -> list:
    """The bodies or errors of requests that arrive at once."""

    async def together():
        return await asyncio.gather(*map(reader.read, receivers), return_exceptions=True)

    return asyncio.run(together())


@pytest.mark.parametrize(
    ("body", "is_whole", "status"),
    [
        (b"[" + b"7," * (MOST_VALUES // 2) + b"7]", True, 0),
        (json.dumps([[7]] * MOST_VALUES).encode(), True, 413),
        (b"a" * (MOST_BYTES + 1), True, 413),
        (b'{"prompt": ', False, 408),
        (b"a" * (SMALL_BYTES + 2), False, 408),
    ],
)
def test_a_body_is_read_whole_or_refused(monkeypatch, body, is_whole, status):
    monkeypatch.setattr(bodies, "READ_SECONDS", 0.05)
    (found,) = read(Bodies(MOST_BYTES, MOST_VALUES), receiver(body, is_whole))
    assert (found.status_code == status) if status else (found == body)


def test_few_large_bodies_are_read_at_once_and_any_small_one():
    async def check():
        reader, large, small = Bodies(MOST_BYTES, MOST_VALUES), b"a" * 4 * SMALL_BYTES, b"ab"
        endless = [asyncio.create_task(reader.read(receiver(large, False))) for _ in range(LARGE)]
        late = asyncio.create_task(reader.read(receiver(large)))
        await asyncio.sleep(0.01)
        assert await reader.read(receiver(small)) == small and not late.done()
        endless[0].cancel()
        assert await late == large

    asyncio.run(check())


def test_bodies_that_take_long_to_parse_take_a_share_of_the_time(monkeypatch):
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(bodies.asyncio, "sleep", sleep)
    monkeypatch.setattr(bodies, "VALUE_SECONDS", 0.001)
    body = b"[" + b"7," * (MOST_VALUES // 2) + b"7]"  # half a second
    found = read(Bodies(MOST_BYTES, MOST_VALUES), *(receiver(body) for _ in range(9)))
    assert [error.status_code for error in found if isinstance(error, ApiError)] == [429] * 7
    assert slept == pytest.approx([0, 5], abs=0.2)


def test_a_client_that_reads_nothing_is_left(monkeypatch):
    monkeypatch.setattr(gate, "WRITE_SECONDS", 0.05)
    ended = []

    async def app(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200})
        finally:
            ended.append(await receive())

    async def stuck(message):
        await asyncio.Event().wait()

    scope = {"type": "http", "path": "/", "headers": []}
    asyncio.run(gate.Gate(app, "", MOST_BYTES, 1)(scope, receiver(b"ab"), stuck))
    assert ended == [{"type": "http.request", "body": b"ab", "more_body": False}]
