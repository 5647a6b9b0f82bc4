"""What every HTTP request passes first: an id, the API key, and the limits on its body."""

import asyncio
import hmac
import uuid

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxmeg.server.bodies import Bodies
from maxmeg.server.errors import ApiError, Json, body_of

FREE = ("/", "/health")  # paths that need no key
WRITE_SECONDS = 60.0  # for a client to take a part of an answer
LEAST_VALUES = 2**17  # of JSON in a body, that are allowed with any context


class Gate:
    """max_position: the model's context, in tokens."""

    def __init__(self, app: ASGIApp, api_key: str, max_bytes: int, max_position: int) -> None:
        self.app = app
        self.bodies = Bodies(max_bytes, max(LEAST_VALUES, 2 * max_position))
        self.authorization = f"Bearer {api_key}".encode() if api_key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        number, headers = uuid.uuid4().hex, dict(scope["headers"])
        scope.setdefault("state", {})["id"] = number

        async def send_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = (b"x-request-id", number.encode())
                message["headers"] = [*message.get("headers", ()), named]
            async with asyncio.timeout(WRITE_SECONDS):  # TimeoutError ends the connection
                await send(message)

        try:
            self._check(scope["path"], headers)
            body: Message | None = {
                "type": "http.request",
                "body": await self.bodies.read(receive),
                "more_body": False,
            }

            async def receive_whole() -> Message:
                nonlocal body
                message, body = body or await receive(), None
                return message

            await self.app(scope, receive_whole, send_id)
        except ApiError as error:
            text = body_of(error.status_code, error.detail)
            answer = Json(text, error.status_code, error.headers)
            await answer(scope, receive, send_id)
        except (ClientDisconnect, TimeoutError):
            return  # nobody reads an answer

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """ApiError for what is refused before the body is read."""
        credentials, key = self.authorization, headers.get(b"authorization", b"")
        if credentials and path not in FREE and not hmac.compare_digest(key, credentials):
            raise ApiError(401, "no or wrong API key: send the header Authorization: Bearer KEY")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.bodies.most_bytes:
            raise self.bodies.too_large()
