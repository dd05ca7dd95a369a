"""Error answers in the format of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from starlette.exceptions import HTTPException as AnyHttpException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from compress.common.errors import CheckpointError, LongPromptError, RequestError, ToolkitError, sentences
from runtime.server.field_paths import field_path, most_specific
from runtime.server.protocol.accepted_fields import REFUSED
from runtime.server.response_models import to_json

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CLIENT_CLOSED_REQUEST = 499
"""Status in the log of a request whose client left before the answer."""


class ApiError(HTTPException):
    """A refusal with its HTTP status; `param` names the request field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        headers = dict(self.headers) if self.headers else None
        return ApiError, (self.status_code, self.detail, self.param, self.code, headers)

    def response(self) -> JsonResponse:
        """Returns the answer."""
        return error_response(self.status_code, self.detail, self.param, self.code, self.headers)


@contextmanager
def renaming(**names: str) -> Iterator[None]:
    """Gives fields in errors the names that they have in the body of a route, by the names that they have in chats."""
    try:
        yield
    except ApiError as error:
        detail, param = error.detail, error.param
        for name, own in names.items():
            detail = re.sub(rf"(?<!')\b{name}\b", own, detail)
            param = own if param == name else param
        raise ApiError(error.status_code, detail, param, error.code) from None


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns the `error` object of OpenAI's API."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class JsonResponse(Response):
    """A JSON answer in ASCII, which can hold text with lone surrogates; NaN and infinity raise ValueError."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode("ascii")


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JsonResponse:
    """Returns an error answer in the format of OpenAI's API."""
    return JsonResponse(error_body(status, message, param, code), status, headers)


ANTHROPIC_PATHS = "/v1/messages"
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Makes Anthropic's client send whole conversations from then on."""


def answer(request: Request, error: ApiError) -> JsonResponse:
    """Returns the answer to a request; its body has a type of its own where the path is of Anthropic's API."""
    body = error_body(error.status_code, error.detail, error.param, error.code)
    if error.param == "thread":
        body["error"]["details"] = NO_THREADS
    marked = {"type": "error", **body} if request.url.path.startswith(ANTHROPIC_PATHS) else body
    return JsonResponse(marked, error.status_code, error.headers)


RETRY_LATER = {"Retry-After": "1"}


def draining() -> ApiError:
    """Returns the error for a request that comes after the server was told to stop."""
    return ApiError(503, "The server is stopping. Try again later.", code="draining", headers=RETRY_LATER)


def aborted() -> ApiError:
    """Returns the error for a request that the server ends because it stops."""
    message = "The server ended this request before it was complete: it is stopping. Try again later."
    return ApiError(503, message, code="aborted", headers=RETRY_LATER)


NO_OBJECT = "The body must be a JSON object, sent with 'Content-Type: application/json'."


def field_name(location: Sequence[str | int]) -> str:
    """Formats `("messages", 0, "content")` as `messages[0].content`."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def describe_invalid(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str, str | None, str | None]:
    """Returns message, field and code of what pydantic finds wrong with a body."""
    error = most_specific(errors, body)
    name = field_name(field_path(error, body))
    match error["type"]:
        case "extra_forbidden":
            instead = REFUSED.get(name)
            said = "Remove it" if instead is None else f"Instead, {instead}"
            return f"Unknown or unsupported field '{name}'. {said}.", name, "unknown_field"
        case "missing" if name:
            return f"The field '{name}' is required.", name, "missing_field"
        case "value_error" | "contradiction" if not name:
            return sentences(error["msg"].removeprefix("Value error, ")), None, "contradiction"
        case "contradiction":
            return sentences(f"{name}: {error['msg']}"), name, "contradiction"
        case "string_unicode" if not name:
            return "A field name is not valid Unicode: it has half a surrogate pair.", None, "unknown_field"
        case _ if not name:
            return NO_OBJECT, None, None
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{name}: must be an object.", name, "invalid_value"
        case "union_tag_invalid":
            known, given = error["ctx"]["expected_tags"], error["ctx"]["tag"]
            return f"{name}: type must be one of {known}, not '{given}'.", f"{name}.type", "invalid_value"
        case "union_tag_not_found":
            return f"The field '{name}.type' is required.", f"{name}.type", "missing_field"
        case _:
            return sentences(f"{name}: {error['msg'].removeprefix('Value error, ')}"), name, "invalid_value"


def add_error_handlers(app: FastAPI) -> None:
    """Turns every exception into OpenAI's error object."""

    @app.exception_handler(CheckpointError)  # a chat template is compiled by the first request that needs it
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: ToolkitError) -> Response:
        return answer(request, ApiError(400, str(error), code="refused"))

    @app.exception_handler(LongPromptError)
    async def too_long(request: Request, error: LongPromptError) -> Response:
        return answer(request, ApiError(400, str(error), "prompt", "context_length_exceeded"))

    @app.exception_handler(AnyHttpException)
    async def http(request: Request, error: AnyHttpException) -> Response:
        if isinstance(error, ApiError):
            return answer(request, error)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(error.status_code, message, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def crashed(request: Request, error: Exception) -> Response:
        return error_response(500, f"The server failed: {type(error).__name__}. Its log has the details.")
