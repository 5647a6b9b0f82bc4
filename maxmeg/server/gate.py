"""What every HTTP request passes first: an id, the API key, and the limit on its body."""

import hmac
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxmeg.server.errors import ApiError, Json, body_of

FREE = ("/", "/health")  # paths that need no key


class Gate:
    def __init__(self, app: ASGIApp, api_key: str, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes
        self.authorization = f"Bearer {api_key}".encode() if api_key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        number, size, headers = uuid.uuid4().hex, 0, dict(scope["headers"])
        scope.setdefault("state", {})["id"] = number

        async def send_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = (b"x-request-id", number.encode())
                message["headers"] = [*message.get("headers", ()), named]
            await send(message)

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_bytes:
                raise self._too_large()
            return message

        error = None
        length = headers.get(b"content-length", b"0")
        authorization = headers.get(b"authorization", b"")
        if scope["path"] not in FREE and not self._has_key(authorization):
            error = ApiError(401, "no or wrong API key: send the header Authorization: Bearer KEY")
        elif length.isdigit() and int(length) > self.max_bytes:
            error = self._too_large()
        if error is None:
            return await self.app(scope, receive_limited, send_id)
        answer = Json(body_of(error.status_code, error.detail), error.status_code)
        await answer(scope, receive, send_id)

    def _has_key(self, authorization: bytes) -> bool:
        wanted = self.authorization
        return not wanted or hmac.compare_digest(authorization, wanted)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self.max_bytes} bytes: send less text")
