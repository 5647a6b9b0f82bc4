"""Errors in the form of OpenAI's API."""

import json
import typing

import fastapi
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

SHOWN = 3  # problems of a body in one error
KINDS = {  # type and code
    401: ("authentication_error", "invalid_api_key"),
    404: ("not_found_error", "not_found"),
    429: ("rate_limit_error", "queue_is_full"),
}


class Json(Response):
    """JSON in ASCII: text may hold halves of surrogate pairs."""

    media_type = "application/json"

    def render(self, content: typing.Any) -> bytes:
        return as_json(content).encode()


def as_json(content: typing.Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


class ApiError(HTTPException):
    """An answer other than 200. param: the field that is wrong. retry: after so many seconds."""

    def __init__(self, status: int, message: str, param: str | None = None, retry: int = 0) -> None:
        headers = {"Retry-After": str(retry)} if retry else None
        super().__init__(status, message, headers)
        self.param = param


def body_of(status: int, message: str, param: str | None = None) -> dict:
    other = "server_error" if status >= 500 else "invalid_request_error"
    kind, code = KINDS.get(status, (other, None))
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def add_handlers(app: fastapi.FastAPI) -> None:
    async def http(request: fastapi.Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = body_of(error.status_code, str(error.detail), getattr(error, "param", None))
        return Json(body, error.status_code, error.headers)

    async def invalid(request: fastapi.Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = [(_field(each["loc"]), each["msg"]) for each in error.errors()]
        message = "; ".join(f"{name or 'body'}: {text}" for name, text in problems[:SHOWN])
        if "json" not in request.headers.get("content-type", ""):
            message = "send JSON with the header Content-Type: application/json"
        return Json(body_of(400, message, problems[0][0] or None), 400)

    async def user(request: fastapi.Request, error: Exception) -> Response:
        return Json(body_of(400, str(error)), 400)

    async def ours(request: fastapi.Request, error: Exception) -> Response:
        return Json(body_of(500, f"the server failed: {type(error).__name__}"), 500)

    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    for kind in (ValueError, RecursionError, NotImplementedError):
        app.add_exception_handler(kind, user)
    app.add_exception_handler(Exception, ours)


def _field(place: typing.Sequence) -> str:
    """The name of a field in a body, such as messages.0.content."""
    return ".".join(map(str, place[1:]))
